"""One try against a real server on a real socket."""

import asyncio
import contextlib
import json
import socket
import ssl
import subprocess
import threading

import pytest
from standardwebhooks import Webhook

from rankwatch_service.allow_list import EVERY_ADDRESS, allow_list
from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.http_sender import HttpSender
from rankwatch_service.policy.notification import incident_message
from tests.support.service.webhook_receiver import Answer, webhook_receiver
from tests.support.values.incidents import SECRET, transition

BODY = b'{"type":"incident.opened","data":{"id":"inc_1"}}'


def send(url, *, private=EVERY_ADDRESS, timeout_s=5.0, secret=SECRET):
    async def once():
        async with HttpSender(SystemClock(), private, timeout_s=timeout_s) as sender:
            return await sender.send(url, secret, "msg_1", BODY)

    return asyncio.run(once())


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
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip():
            connection, _ = server.accept()
            with connection, contextlib.suppress(ConnectionError):
                for byte in b"HTTP/1.1 200 OK\r\nx: " + b"y" * 10_000:
                    if stop.wait(0.02):
                        return
                    connection.sendall(bytes([byte]))

        thread = threading.Thread(target=drip)
        thread.start()
        outcome = send(f"http://127.0.0.1:{server.getsockname()[1]}/", timeout_s=0.3)
        stop.set()
        thread.join()
    assert outcome.error == "no answer within 0.3 s"


def test_a_refused_connection_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    outcome = send(f"http://127.0.0.1:{port}/")
    assert outcome.status is None
    assert "Connect" in outcome.error or "refused" in outcome.error


def test_an_answer_that_is_not_http_is_a_failure():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(b"\x00\x01 not http\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        outcome = send(f"http://127.0.0.1:{server.getsockname()[1]}/")
        thread.join()
    assert (outcome.status, outcome.delivered) == (None, False)
    assert outcome.error


@pytest.mark.parametrize("spelling", ["127.0.0.1", "2130706433", "0177.0.0.1", "[::ffff:127.0.0.1]", "localhost"])
def test_where_private_addresses_are_not_allowed_nothing_is_connected(spelling):
    with webhook_receiver() as receiver:
        outcome = send(receiver.url.replace("127.0.0.1", spelling), private=allow_list(""))
    assert (outcome.status, receiver.calls) == (None, [])
    assert outcome.error.startswith("refused: ")


def test_the_checked_address_is_the_one_connected_to_even_if_the_name_changes(monkeypatch):
    with webhook_receiver() as receiver:
        port = int(receiver.url.split(":")[2].split("/")[0])
        asked = []

        async def first_good_then_bad(self, host, port, **_kwargs):
            asked.append(host)
            address = "127.0.0.1" if len(asked) == 1 else "169.254.169.254"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

        # The connection itself looks literal addresses up too; only the name is answered by this server.
        real = asyncio.BaseEventLoop.getaddrinfo

        async def lookup(self, host, port, **kwargs):
            answer = first_good_then_bad if host == "rebinding.example" else real
            return await answer(self, host, port, **kwargs)

        monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", lookup)
        outcome = send(f"http://rebinding.example:{port}/hook")
    assert outcome.delivered
    assert asked == ["rebinding.example"]
    assert receiver.calls[0].headers["host"] == f"rebinding.example:{port}"


def test_a_broken_secret_is_a_failure_with_a_reason_not_a_crash():
    with webhook_receiver() as receiver:
        outcome = send(receiver.url, secret="whsec_short")
    assert outcome.error.startswith("cannot be sent: a receiver's secret")
    assert receiver.calls == []


def test_an_unknown_certificate_is_refused(tmp_path):
    pem = tmp_path / "self.pem"
    subprocess.run(
        [
            *[
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                "/CN=localhost",
                "-keyout",
            ],
            pem,
            "-out",
            f"{pem}.crt",
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{pem}.crt", pem)
    with webhook_receiver() as receiver:
        receiver.server.socket = context.wrap_socket(receiver.server.socket, server_side=True)
        outcome = send(receiver.url.replace("http:", "https:"))
    assert receiver.calls == []
    assert outcome.error.startswith("certificate refused: ")


def incident(what, id_="inc_1"):
    return incident_message(transition(what, id=id_), {})


def test_messages_of_a_bot_about_one_incident_form_a_thread():
    told = [incident("opened"), incident("updated"), incident("opened", "inc_2"), incident("resolved")]

    async def all_of(url):
        async with HttpSender(SystemClock(), EVERY_ADDRESS) as sender:
            return [await sender.send(url, "xoxb-1", f"msg_{n}", body) for n, body in enumerate(told)]

    answer = b'{"ok":true,"ts":"%d.5"}'
    with webhook_receiver(lambda n, _: Answer(200, body=answer % n)) as receiver:
        base = receiver.url.removesuffix("/hook")
        outcomes = asyncio.run(all_of(f"slack+{base}/api/chat.postMessage#C1"))
    assert all(outcome.delivered for outcome in outcomes)
    sent = [json.loads(call.body) for call in receiver.calls]
    assert [one.get("thread_ts") for one in sent] == [None, "0.5", None, "0.5"]
    assert {one["channel"] for one in sent} == {"C1"}
    assert {call.headers["authorization"] for call in receiver.calls} == {"Bearer xoxb-1"}


def test_threads_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr("rankwatch_service.notify.http_sender.THREADS_MAX", 1)
    told = [incident("opened"), incident("opened", "inc_2"), incident("updated"), incident("updated", "inc_2")]

    async def all_of(url):
        async with HttpSender(SystemClock(), EVERY_ADDRESS) as sender:
            for n, body in enumerate(told):
                await sender.send(url, "xoxb-1", f"msg_{n}", body)

    with webhook_receiver(lambda n, _: Answer(200, body=b'{"ok":true,"ts":"%d.5"}' % n)) as receiver:
        base = receiver.url.removesuffix("/hook")
        asyncio.run(all_of(f"slack+{base}/api/chat.postMessage#C1"))
    assert [json.loads(call.body).get("thread_ts") for call in receiver.calls] == [None] * 4


def test_what_a_receiver_refuses_in_its_body_is_no_delivery():
    with webhook_receiver(lambda *_: Answer(200, body=b'{"ok":false,"error":"not_in_channel"}')) as receiver:
        base = receiver.url.removesuffix("/hook")

        async def once():
            async with HttpSender(SystemClock(), EVERY_ADDRESS) as sender:
                return await sender.send(f"slack+{base}/api/chat.postMessage#C1", "xoxb-1", "msg_1", incident("opened"))

        outcome = asyncio.run(once())
    assert (outcome.status, outcome.delivered, outcome.is_final) == (200, False, True)
    assert "not_in_channel" in outcome.error
