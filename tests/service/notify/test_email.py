"""What an e-mail says, and that nothing in it becomes a header."""

from email import message_from_bytes, policy

from rankwatch_service.notify.receiver_types import email
from rankwatch_service.notify.receiver_types.message import OutgoingMessage
from rankwatch_service.policy.notification import incident_message
from tests.support.values.incidents import transition

LINKS = {"incident": "https://watch.example/incidents/inc_1"}


def message(what="opened", **incident):
    return OutgoingMessage("msg_1", incident_message(transition(what, **incident), LINKS, world_size=64))


def mail(of):
    return message_from_bytes(email.email(of, "oncall@example.com", "rw@example.com").content, policy=policy.default)


def test_an_email_has_the_three_lines_and_links_and_belongs_to_its_group():
    found, update = mail(message()), mail(message("updated"))
    assert found["Subject"].startswith("[rankwatch] WARNING gpt-small: Rank 3")
    assert (found["From"], found["To"]) == ("rw@example.com", "oncall@example.com")
    assert found["Message-ID"] == "<msg_1@example.com>"
    assert found["References"] == update["References"]
    assert found["Auto-Submitted"] == "auto-generated"
    text = found.get_content()
    assert "Normal: " in text
    assert f"Open incident: {LINKS['incident']}" in text


def test_a_job_cannot_add_headers_or_recipients_to_an_email():
    content = email.email(message(job="x\r\nBcc: all@example.com\r\n\r\nhi"), "a@example.com", "b@example.com").content
    assert mail(message(job="x\r\nBcc: all@example.com"))["Bcc"] is None
    assert content.isascii()
    assert max(map(len, content.split(b"\r\n"))) <= 998


def test_a_subject_at_the_limit_is_whole():
    assert len(mail(message(summary="é" * 1_000))["Subject"]) == email.SUBJECT_CHARS_MAX
