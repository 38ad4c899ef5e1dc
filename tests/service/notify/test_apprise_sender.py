"""One try by Apprise itself, in its process, against a real receiver."""

import asyncio
import importlib
import json
import os
import sysconfig

import pytest

from rankwatch_service.allow_list import allow_list
from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.apprise import apprise_sender
from rankwatch_service.notify.apprise.apprise_sender import NOT_INSTALLED, AppriseSender, refusal
from rankwatch_service.notify.sender import TryOutcome
from rankwatch_service.policy.notification import incident_message
from tests.support.service.webhook_receiver import Answer, webhook_receiver
from tests.support.values.incidents import transition

BODY = incident_message(transition(), {"incident": "https://watch.example/incidents/inc_1"}, world_size=64)
OTHER = TryOutcome(204, "", 0.0)
LOOPBACK = "127.0.0.0/8"


class Others:
    async def send(self, _url, _secret, _message_id, _body):
        return OTHER


def send(url, *, allow=LOOPBACK, timeout_s=15.0):
    sender = AppriseSender(SystemClock(), allow_list(allow), Others(), timeout_s)
    return asyncio.run(sender.send(url, "", "msg_1", BODY))


def refused(url):
    return asyncio.run(refusal(url, allow_list("")))


def target(receiver, rest=""):
    return receiver.url.replace("http://", "apprise+json://") + rest


def test_other_receivers_are_left_to_the_other_senders():
    assert send("https://hooks.example/x") is OTHER


def test_without_the_extra_nothing_is_sent_and_the_command_is_named(monkeypatch):
    monkeypatch.setattr(apprise_sender, "find_spec", lambda _name: None)
    outcome = send("apprise+json://hooks.example/x")
    assert (outcome.delivered, outcome.is_final, outcome.error) == (False, False, f"cannot be sent: {NOT_INSTALLED}")
    assert "pip install 'rankwatch[apprise]'" in refused("json://hooks.example/x")


class TestInstalled:
    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("apprise")

    def test_a_message_arrives_with_its_lines_and_links(self):
        with webhook_receiver() as receiver:
            outcome = send(target(receiver))
        assert (outcome.error, outcome.status, outcome.delivered) == ("", 200, True)
        (call,) = receiver.calls
        found = json.loads(call.body)
        assert (found["title"][:17], found["type"]) == ("WARNING gpt-small", "warning")
        assert found["message"].endswith("Open incident: https://watch.example/incidents/inc_1")

    def test_what_is_tried_again_is_as_with_every_receiver(self):
        found = {}
        for status in (503, 401):
            with webhook_receiver(lambda *_: Answer(status, {"retry-after": "7"}, body=b"not now")) as receiver:  # noqa: B023
                outcome = send(target(receiver))
            found[status] = (outcome.status, outcome.error, outcome.is_final, outcome.retry_after_s)
        assert found == {
            503: (503, "answered 503: not now", False, 7),
            401: (401, "answered 401: not now", True, 7),
        }

    def test_a_receiver_that_never_answers_costs_one_timeout(self):
        with webhook_receiver(lambda _n, _call: Answer(delay_s=2)) as receiver:
            outcome = send(target(receiver), timeout_s=1)
        assert (outcome.error, outcome.is_final) == ("no answer within 1 s", False)
        assert outcome.seconds < 1.9

    def test_a_private_address_is_refused_at_the_connection(self):
        with webhook_receiver() as receiver:
            outcome = send(target(receiver), allow="")
        assert outcome.error.startswith("refused: 127.0.0.1 is a private address; to allow it")
        assert (outcome.is_final, receiver.calls) == (False, [])

    def test_a_name_that_is_allowed_leads_to_its_private_address(self):
        with webhook_receiver() as receiver:
            assert send(target(receiver).replace("127.0.0.1", "localhost"), allow="localhost").delivered

    def test_nobody_there_is_said_without_the_url(self):
        outcome = send("apprise+json://127.0.0.1:9999/secret-path")
        assert "Connection refused" in outcome.error
        assert "secret" not in outcome.error

    @pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # Apprise's plugins for e-mail
    @pytest.mark.parametrize(
        ("url", "says"),
        [
            ("syslog://", "only plugins"),
            ("dbus://", "only plugins"),
            ("mailto://me:secret@mail.example", "only plugins"),
            ("rsyslog://logs.example", "only plugins"),
            ("file:///etc/passwd", "knows no file://…"),
            ("json://hooks.example/?verify=no", "certificates"),
            ("tgram://secret/", "cannot read"),
        ],
    )
    def test_what_is_no_receiver_by_http_is_refused_without_its_secrets(self, url, says):
        process = importlib.import_module("rankwatch_service.notify.apprise.apprise_process")
        with pytest.raises(ValueError, match=says) as found:
            process.plugin_of(url)
        assert "secret" not in str(found.value)

    @pytest.mark.parametrize(
        ("event", "arguments"),
        [
            ("open", ("/etc/passwd", "r", os.O_RDONLY)),
            ("open", (f"{sysconfig.get_path('purelib')}/../../../../secret.key", "r", os.O_RDONLY)),
            ("open", (f"{sysconfig.get_path('purelib')}/new.py", "w", os.O_WRONLY | os.O_CREAT)),
            ("subprocess.Popen", ("/bin/sh", [], None, None)),
            ("os.system", (b"true",)),
            ("socket.connect", (None, "/run/dbus/system_bus_socket")),
            ("socket.connect", (None, ("169.254.169.254", 80))),
            ("socket.connect", (None, ("93.184.215.14", 25))),
            ("socket.sendto", (None, ("93.184.215.14", 514))),
        ],
    )
    def test_whatever_a_plugin_tries_is_refused(self, event, arguments):
        process = importlib.import_module("rankwatch_service.notify.apprise.apprise_process")
        hook = process.AuditHook(allow_list(""))
        with pytest.raises(PermissionError):
            hook(event, arguments)

    def test_a_plugin_may_read_its_own_files_and_connect_to_the_world(self):
        hook = importlib.import_module("rankwatch_service.notify.apprise.apprise_process").AuditHook(allow_list(""))
        hook("open", (importlib.import_module("apprise").__file__, "r", os.O_RDONLY))
        hook("socket.connect", (None, ("93.184.215.14", 443)))

    def test_a_url_is_checked_without_sending(self):
        assert refused("json://hooks.example/x") == ""
        assert "only plugins" in refused("syslog://")
