"""One try against a real mail server on a real socket; what an e-mail says, and that nothing in it becomes a header."""

import asyncio
import ssl
import threading
from email import message_from_bytes, policy

import pytest

from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.email_sender import EmailSender
from rankwatch_service.notify.receiver_types import email
from rankwatch_service.notify.receiver_types.message import OutgoingMessage
from rankwatch_service.settings import MailServer
from tests.support.service.machine import make_certificate
from tests.support.service.mail_server import mail_server
from tests.support.values.incidents import incident_message, transition

LINKS = {"incident": "https://watch.example/incidents/inc_1"}
BODY = incident_message(transition(), LINKS, world_size=64)
TARGET = "email+mailto:oncall@example.com"


def send(server, url=TARGET, *, trusted=None, timeout_s=10.0):
    async def once():
        async with EmailSender(server, SystemClock(), timeout_s, trusted) as sender:
            return await sender.send(url, "", "msg_1", BODY)

    return asyncio.run(once())


def settings(port, **changes):
    values = {"host": "127.0.0.1", "port": port, "is_tls": False, "username": "", "password": ""}
    return MailServer(**values | {"sender": "rw@example.com"} | changes)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Contexts of a server and of a client that trusts it."""
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder / "server.pem", folder / "server.key")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "server.pem", folder / "server.key")
    return server, ssl.create_default_context(cafile=folder / "server.pem")


def test_an_email_arrives_with_its_text():
    with mail_server() as server:
        outcome = send(settings(server.port))
    assert (outcome.status, outcome.error, outcome.delivered) == (250, "", True)
    (mail,) = server.mails
    found = message_from_bytes(mail, policy=policy.default)
    assert (found["To"], found["Message-ID"]) == ("oncall@example.com", "<msg_1@example.com>")
    assert "Rank 3 runs at 0.62 of its peers" in found.get_content()
    assert "rcpt to:<oncall@example.com>" in server.commands


@pytest.mark.parametrize("is_tls", [False, True], ids=["starttls", "tls"])
def test_a_login_goes_over_tls(certificate, is_tls):
    of_server, trusted = certificate
    with mail_server({"AUTH": "235 welcome"}, of_server, starts_with_tls=is_tls) as server:
        to = settings(server.port, is_tls=is_tls, username="rw", password="secret")
        outcome = send(to, trusted=trusted)
    assert (outcome.error, len(server.mails)) == ("", 1)
    words = [command.split()[0] for command in server.commands]
    assert is_tls or words.index("starttls") < words.index("auth")


def test_a_server_that_nobody_vouches_for_gets_no_login(certificate):
    with mail_server({}, certificate[0]) as server:
        outcome = send(settings(server.port, username="rw", password="secret"))
    assert (outcome.delivered, outcome.is_final) == (False, False)
    assert "CERTIFICATE_VERIFY_FAILED" in outcome.error
    assert not any(command.startswith("auth") for command in server.commands)


def test_a_server_elsewhere_without_starttls_gets_no_email(monkeypatch):
    monkeypatch.setattr("rankwatch_service.notify.email_sender.is_loopback", lambda _host: False)
    with mail_server() as server:
        outcome = send(settings(server.port))
    assert "STARTTLS" in outcome.error
    assert server.mails == []


@pytest.mark.parametrize(
    ("answers", "status", "is_final"),
    [
        ({"RCPT": "550 no such user"}, 550, True),
        ({"RCPT": "450 greylisted"}, 450, False),
        ({"MAIL": "553 not your address"}, 553, True),
        ({"content": "552 too large"}, 552, True),
        ({"content": "451 later"}, 451, False),
        ({"greeting": "554 no service"}, 554, False),
        ({"AUTH": "535 wrong password"}, 535, False),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_what_the_server_refuses_for_good_is_not_tried_again(answers, status, is_final):
    login = {"username": "rw", "password": "x"} if "AUTH" in answers else {}
    with mail_server(answers) as server:
        outcome = send(settings(server.port, **login))
    assert (outcome.status, outcome.is_final, outcome.delivered) == (status, is_final, False)
    assert str(status) in outcome.error
    assert server.mails == []


def test_an_email_that_was_taken_is_delivered_whatever_follows():
    with mail_server({"QUIT": "421 gone"}) as server:
        assert send(settings(server.port)).delivered


@pytest.mark.parametrize("where", ["EHLO", "MAIL", "content"])
def test_a_server_that_never_answers_costs_one_timeout_and_frees_its_thread(where):
    with mail_server({where: "hang"} if where != "content" else {"DATA": "hang"}) as server:
        outcome = send(settings(server.port), timeout_s=0.3)
    assert (outcome.status, outcome.error) == (None, "no answer within 0.3 s")
    senders = [thread for thread in threading.enumerate() if thread.name.startswith("smtp")]
    for thread in senders:
        thread.join(30)
    assert not [thread for thread in senders if thread.is_alive()]


def test_a_refused_connection_is_reported():
    with mail_server() as server:
        port = server.port
    outcome = send(settings(port))
    assert (outcome.status, outcome.is_final) == (None, False)
    assert "refused" in outcome.error


def test_without_a_mail_server_the_error_says_what_to_set():
    assert "RANKWATCH_SMTP_URL" in send(None).error


@pytest.mark.parametrize(
    ("url", "more", "says"),
    [
        ("http://mail.example.com", {}, "smtp://HOST:PORT"),
        ("smtp://user:pw@mail.example.com", {}, "login"),
        ("smtp://mail.example.com", {"sender": ""}, "smtp_from"),
        ("smtp://mail.example.com", {"password": ""}, "belong together"),
        ("", {}, "need smtp_url"),
    ],
)
def test_settings_that_cannot_work_are_refused(url, more, says):
    values = {"username": "rw", "password": "x", "sender": "rw@example.com"} | more
    with pytest.raises(ValueError, match=says):
        MailServer.of(url, **values)


def test_ports_are_those_of_the_scheme_unless_one_is_given():
    made = [MailServer.of(url, "", "", "rw@example.com") for url in ("smtp://m", "smtps://m", "smtp://m:25")]
    assert [(one.port, one.is_tls) for one in made] == [(587, False), (465, True), (25, False)]
    assert MailServer.of("", "", "", "") is None


# ---- What an e-mail says ---------------------------------------------------------------------------------------------


def message(what="opened", **incident):
    return OutgoingMessage("msg_1", incident_message(transition(what, **incident), LINKS, world_size=64))


def mail(of):
    return message_from_bytes(email.email(of, "oncall@example.com", "rw@example.com").content, policy=policy.default)


def test_an_email_has_the_three_lines_and_links_and_belongs_to_its_group():
    found, update = mail(message()), mail(message("updated"))
    assert found["Subject"].startswith("[rankwatch] WARNING in job gpt-small: Rank 3")
    assert (found["From"], found["To"]) == ("rw@example.com", "oncall@example.com")
    assert found["Message-ID"] == "<msg_1@example.com>"
    assert found["References"] == update["References"]
    assert found["Auto-Submitted"] == "auto-generated"
    text = found.get_content()
    assert "Confidence that it is real: " in text
    assert f"Open incident: {LINKS['incident']}" in text


def test_a_job_cannot_add_headers_or_recipients_to_an_email():
    content = email.email(message(job="x\r\nBcc: all@example.com\r\n\r\nhi"), "a@example.com", "b@example.com").content
    assert mail(message(job="x\r\nBcc: all@example.com"))["Bcc"] is None
    assert content.isascii()
    assert max(map(len, content.split(b"\r\n"))) <= 998


def test_a_subject_at_the_limit_is_whole():
    assert len(mail(message(summary="é" * 1_000))["Subject"]) == email.SUBJECT_CHARS_MAX
