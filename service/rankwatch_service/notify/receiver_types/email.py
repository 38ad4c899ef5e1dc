"""E-mail: the three lines as plain text, in a thread for each group."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import format_datetime
from hashlib import sha256
from typing import Final
from urllib.parse import unquote

from rankwatch_service.names import is_address
from rankwatch_service.notify.receiver_types.base import ReceiverTraits
from rankwatch_service.notify.receiver_types.message import OutgoingMessage, cut

SCHEME: Final = "mailto:"

SUBJECT_CHARS_MAX: Final = 200
"""Phones show about 40 characters; a header line of more than 998 bytes would be against the protocol."""


@dataclass(frozen=True, slots=True)
class Email:
    """One e-mail to one address."""

    sender: str
    to: str
    content: bytes
    """Headers and text, with the line ends of SMTP."""


def check(url: str, secret: str) -> None:
    """Check that a receiver is one address, without a secret.

    Raises:
        ValueError: it is not.
    """
    address(url)
    if secret:
        raise ValueError("an e-mail address has no secret: the login of the mail server is RANKWATCH_SMTP_PASSWORD")


def address(url: str) -> str:
    """The address in `mailto:oncall@example.com`.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = unquote(url.removeprefix(SCHEME))
    if not url.startswith(SCHEME) or not is_address(found):
        raise ValueError(
            "the target of an e-mail is one address, such as mailto:oncall@example.com; use a list for more"
        )
    return found


def email(message: OutgoingMessage, to: str, sender: str) -> Email:
    """The message as an e-mail.

    Its id is that of the message, so that a mail server or reader can drop one that comes twice; what it answers is the
    group, so that mail readers show all messages about an incident as one conversation.
    """
    domain = sender.rpartition("@")[2]
    group = sha256(message.group_key.encode(errors="replace")).hexdigest()[:32]
    # Not every server takes eight bits.
    content = EmailMessage(SMTP.clone(cte_type="7bit"))
    content["From"] = sender
    content["To"] = to
    content["Subject"] = cut(f"[rankwatch] {message.lines[0]}", SUBJECT_CHARS_MAX)
    content["Date"] = format_datetime(datetime.fromisoformat(message.timestamp))
    content["Message-ID"] = f"<{message.id}@{domain}>"
    content["In-Reply-To"] = content["References"] = f"<{group}@{domain}>"
    # No vacation replies (RFC 3834).
    content["Auto-Submitted"] = "auto-generated"
    content["Precedence"] = "bulk"
    if message.is_about_incident and message.severity == "critical" and not message.is_resolved:
        content["Importance"] = "high"
    content.set_content("\n\n".join(["\n\n".join(line for line in message.lines if line), *_links(message)]) + "\n")
    return Email(sender, to, content.as_bytes())


def _links(message: OutgoingMessage) -> list[str]:
    links = "\n".join(f"{title}: {url}" for title, url in message.buttons())
    return [links] if links else []


EMAIL = ReceiverTraits(label="E-mail", example="mailto:oncall@example.com", check=check)
