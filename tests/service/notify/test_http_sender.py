"""One try against a real server on a real socket."""

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from rankwatch_service.allow_list import EVERY_ADDRESS, allow_list
from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.http_sender import HttpSender
from rankwatch_service.notify.receiver_types.base import new_secret, signed_headers, signing_key
from tests.support.service.machine import make_certificate
from tests.support.service.webhook_receiver import Answer, webhook_receiver
from tests.support.values.incidents import SECRET, incident_message, transition

BODY = '{"type":"incident.opened","data":{"id":"inc_1","job":"größe"}}'.encode()


def send_all(url, bodies, *, private=EVERY_ADDRESS, timeout_s=5.0, secret="xoxb-1"):
    async def one_by_one():
        async with HttpSender(SystemClock(), private, timeout_s=timeout_s) as sender:
            return [await sender.send(url, secret, f"msg_{n}", body) for n, body in enumerate(bodies)]

    return asyncio.run(one_by_one())


def send(url, *, secret=SECRET, **how):
    return send_all(url, [BODY], secret=secret, **how)[0]


@contextlib.contextmanager
def raw_server(answer):
    """The URL of a server that does this with a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection, contextlib.suppress(ConnectionError):
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        thread.join()


def test_a_message_arrives_signed_as_json_with_its_id():
    with webhook_receiver() as receiver:
        outcome = send(receiver.url)
    (call,) = receiver.calls
    assert (outcome.status, outcome.error, outcome.delivered) == (204, "", True)
    assert call.body == BODY
    assert call.headers["content-type"] == "application/json"
    assert call.headers["host"] == receiver.url.split("/")[2]
    assert Webhook(SECRET).verify(call.body, call.headers) == json.loads(BODY)


def test_a_name_with_several_addresses_is_tried_until_one_answers():
    with webhook_receiver() as receiver:
        outcome = send(receiver.url.replace("127.0.0.1", "localhost"))
    assert outcome.delivered
    assert receiver.calls[0].headers["host"].startswith("localhost:")


def test_a_redirect_is_a_failure_and_is_not_followed():
    with webhook_receiver() as target, webhook_receiver(lambda *_: Answer(307, {"location": target.url})) as receiver:
        outcome = send(receiver.url)
    assert (outcome.status, outcome.delivered, target.calls) == (307, False, [])


def test_retry_after_is_reported():
    with webhook_receiver(lambda *_: Answer(429, {"retry-after": "17"})) as receiver:
        outcome = send(receiver.url)
    assert (outcome.status, outcome.retry_after_s, outcome.error) == (429, 17.0, "answered 429")


def test_a_receiver_that_never_answers_costs_one_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        outcome = send(f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout_s=0.2)
    assert (outcome.status, outcome.error) == (None, "no answer within 0.2 s")


def test_a_slow_response_is_cut_by_the_same_timeout():
    stop = threading.Event()

    def drip(connection):
        for byte in b"HTTP/1.1 200 OK\r\nx: " + b"y" * 10_000:
            if stop.wait(0.02):
                return
            connection.sendall(bytes([byte]))

    with raw_server(drip) as url:
        outcome = send(url, timeout_s=0.3)
        stop.set()
    assert outcome.error == "no answer within 0.3 s"


def test_a_refused_connection_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    outcome = send(f"http://127.0.0.1:{port}/")
    assert outcome.status is None
    assert "Connect" in outcome.error or "refused" in outcome.error


def test_an_answer_that_is_not_http_is_a_failure():
    def answer(connection):
        connection.recv(10_000)
        connection.sendall(b"\x00\x01 not http\r\n\r\n")

    with raw_server(answer) as url:
        outcome = send(url)
    assert (outcome.status, outcome.delivered) == (None, False)
    assert outcome.error


@pytest.mark.parametrize("spelling", ["127.0.0.1", "2130706433", "0177.0.0.1", "[::ffff:127.0.0.1]", "localhost"])
def test_where_private_addresses_are_not_allowed_nothing_is_connected(spelling):
    with webhook_receiver() as receiver:
        outcome = send(receiver.url.replace("127.0.0.1", spelling), private=allow_list(""))
    assert (outcome.status, receiver.calls) == (None, [])
    assert outcome.error.startswith("refused: ")


def test_the_checked_address_is_the_one_connected_to_even_if_the_name_changes(monkeypatch):
    # The connection itself looks literal addresses up too; only the name is answered by this server.
    real, asked = asyncio.BaseEventLoop.getaddrinfo, []

    async def lookup(self, host, port, **kwargs):
        if host != "rebinding.example":
            return await real(self, host, port, **kwargs)
        asked.append(host)
        address = "127.0.0.1" if len(asked) == 1 else "169.254.169.254"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", lookup)
    with webhook_receiver() as receiver:
        outcome = send(receiver.url.replace("127.0.0.1", "rebinding.example"))
    assert outcome.delivered
    assert asked == ["rebinding.example"]
    assert receiver.calls[0].headers["host"].startswith("rebinding.example:")


def test_a_broken_secret_is_a_failure_with_a_reason_not_a_crash():
    with webhook_receiver() as receiver:
        outcome = send(receiver.url, secret="whsec_short")
    assert outcome.error.startswith("cannot be sent: a receiver's secret")
    assert receiver.calls == []


def test_an_unknown_certificate_is_refused(tmp_path):
    make_certificate(tmp_path / "own.pem", tmp_path / "own.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem", tmp_path / "own.key")
    with webhook_receiver() as receiver:
        receiver.server.socket = context.wrap_socket(receiver.server.socket, server_side=True)
        outcome = send(receiver.url.replace("http:", "https:"))
    assert receiver.calls == []
    assert outcome.error.startswith("certificate refused: ")


def incident(what, id_="inc_1"):
    return incident_message(transition(what, id=id_), {})


def bot_of(receiver):
    return f"slack+{receiver.url.removesuffix('/hook')}/api/chat.postMessage#C1"


def numbered(n, _):
    return Answer(200, body=b'{"ok":true,"ts":"%d.5"}' % n)


def test_messages_of_a_bot_about_one_incident_form_a_thread():
    reported = [incident("opened"), incident("updated"), incident("opened", "inc_2"), incident("resolved")]
    with webhook_receiver(numbered) as receiver:
        assert all(outcome.delivered for outcome in send_all(bot_of(receiver), reported))
    sent = [json.loads(call.body) for call in receiver.calls]
    assert [one.get("thread_ts") for one in sent] == [None, "0.5", None, "0.5"]
    assert {one["channel"] for one in sent} == {"C1"}
    assert {call.headers["authorization"] for call in receiver.calls} == {"Bearer xoxb-1"}


def test_threads_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr("rankwatch_service.notify.http_sender.THREADS_MAX", 1)
    with webhook_receiver(numbered) as receiver:
        send_all(
            bot_of(receiver), [incident(what, id_) for what in ("opened", "updated") for id_ in ("inc_1", "inc_2")]
        )
    assert [json.loads(call.body).get("thread_ts") for call in receiver.calls] == [None] * 4


def test_what_a_receiver_refuses_in_its_body_is_no_delivery():
    with webhook_receiver(lambda *_: Answer(200, body=b'{"ok":false,"error":"not_in_channel"}')) as receiver:
        (outcome,) = send_all(bot_of(receiver), [incident("opened")])
    assert (outcome.status, outcome.delivered, outcome.is_final) == (200, False, True)
    assert "not_in_channel" in outcome.error


# ---- Signatures, verified by the reference library -------------------------------------------------------------------


@pytest.mark.parametrize("change", ["body", "id", "timestamp", "secret"])
def test_the_reference_library_refuses_a_message_that_was_changed(change):
    secret, body, now_s = new_secret(), BODY, int(time.time())
    headers = signed_headers(secret, "msg_1", now_s, body)
    assert Webhook(secret).verify(body, headers) == json.loads(body)
    headers |= {"id": {"webhook-id": "msg_2"}, "timestamp": {"webhook-timestamp": str(now_s + 1)}}.get(change, {})
    with pytest.raises(WebhookVerificationError):
        Webhook(new_secret() if change == "secret" else secret).verify(body + b" " * (change == "body"), headers)


def test_while_secrets_change_both_the_old_and_the_new_one_verify():
    old, new = new_secret(), new_secret()
    headers = signed_headers(f"{old} {new}", "msg_1", int(time.time()), BODY)
    for secret in (old, new):
        Webhook(secret).verify(BODY, headers)


@pytest.mark.parametrize("secret", ["", "abc", "whsec_", "whsec_!!!", "whsec_c2hvcnQ=", "whsec_" + "A" * 92])
def test_a_malformed_secret_is_refused_with_a_reason(secret):
    with pytest.raises(ValueError, match="a receiver's secret"):
        signing_key(secret)
