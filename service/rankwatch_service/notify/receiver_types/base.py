"""What a type of receiver is: a request from a message, and a reading of the reply. Nothing here does I/O."""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Final

from rankwatch_service.notify.receiver_types.message import OutgoingMessage

RETRIED_4XX: Final = frozenset({408, 425, 429})
"""Statuses below 500 after which another try may succeed."""

JSON_HEADERS: Final[Mapping[str, str]] = {"content-type": "application/json"}


class ReceiverType(StrEnum):
    """What a receiver speaks."""

    WEBHOOK = "webhook"
    ALERTMANAGER = "alertmanager"
    ALERTMANAGER_WEBHOOK = "alertmanager-webhook"
    PAGERDUTY = "pagerduty"
    SLACK = "slack"
    TEAMS = "teams"
    DISCORD = "discord"
    GOOGLE_CHAT = "google-chat"
    EMAIL = "email"


@dataclass(frozen=True, slots=True)
class SendContext:
    """What a request depends on besides its message."""

    url: str
    """URL of the receiver."""
    secret: str
    """Its signing secret, key or token; empty: it has none."""
    unix_ns: int
    """Time of this try."""
    public_url: str = ""
    """Where people reach this service."""
    thread: str = ""
    """What the receiver calls the thread of the message's group; empty: it has none yet, or knows no threads."""


@dataclass(frozen=True, slots=True)
class WebRequest:
    """One POST."""

    url: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=lambda: JSON_HEADERS)


@dataclass(frozen=True, slots=True)
class ReplyReading:
    """What a reply means."""

    error: str = ""
    """Why the message is not delivered; empty: it is."""
    is_final: bool = False
    """Another try would fail in the same way: the message is given up."""
    thread: str = ""
    """What the receiver calls the thread that the message has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverTraits:
    """What a type of receiver declares of itself; pages, help and checks derive from it."""

    label: str
    """Its name on pages."""
    example: str
    """A URL, or an address, as it looks."""
    key_help: str | None = None
    """What its secret is, for people; None: it has none."""
    check: Callable[[str, str], None]
    """Raises ValueError, with what to do, for a URL and a secret that can never work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebType(ReceiverTraits):
    """A type of receiver that is reached by a POST."""

    request: Callable[[OutgoingMessage, SendContext], WebRequest]
    read: Callable[[int, str], ReplyReading]
    """Reads status and body of a reply."""
    reads_body: bool = True
    """Whether the body of a reply says more than its status; else only its head is read."""


def read_status(status: int, body: str) -> ReplyReading:
    """Any 2xx is a delivery; a reply that blames the request itself is final."""
    if 200 <= status < 300:
        return ReplyReading()
    is_final = 400 <= status < 500 and status not in RETRIED_4XX
    return ReplyReading(f"answered {status}" + (f": {body.strip()[:200]}" if body.strip() else ""), is_final)


def without_secret(url: str, secret: str) -> None:
    """Check that a receiver whose URL is its secret has no other one.

    Raises:
        ValueError: it has.
    """
    del url
    if secret:
        raise ValueError("this type of receiver has no secret: its URL is one")


@dataclass(frozen=True, slots=True)
class Target:
    """The URL and the type of a receiver."""

    type: ReceiverType
    url: str

    def stored(self) -> str:
        """The text to store; of a webhook it is the URL alone."""
        return self.url if self.type is ReceiverType.WEBHOOK else f"{self.type}+{self.url}"

    @classmethod
    def read(cls, stored: str) -> Target:
        """The inverse of `stored`.

        >>> Target.read("slack+https://hooks.slack.com/services/T00").type
        <ReceiverType.SLACK: 'slack'>
        """
        name, plus, url = stored.partition("+")
        if plus and name in set(ReceiverType):
            return cls(ReceiverType(name), url)
        return cls(ReceiverType.WEBHOOK, stored)


SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - the public marker, not a secret
SECRET_BYTES_MIN: Final = 24
SECRET_BYTES_MAX: Final = 64


def new_secret() -> str:
    """Generate a secret for a receiver: whsec_ and 32 random bytes in base64."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def signing_key(secret: str) -> bytes:
    """Decode one secret.

    Raises:
        ValueError: it does not begin with whsec_, is not base64, or does not have 24 to 64 bytes.
    """
    if not secret.startswith(SECRET_PREFIX):
        raise ValueError("a receiver's secret must begin with whsec_")
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError("a receiver's secret must be whsec_ followed by base64") from error
    if not SECRET_BYTES_MIN <= len(key) <= SECRET_BYTES_MAX:
        raise ValueError(f"a receiver's secret must have {SECRET_BYTES_MIN}-{SECRET_BYTES_MAX} bytes, not {len(key)}")
    return key


def signed_headers(secret: str, message_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """The three headers that authenticate a message.

    Args:
        secret: one secret, or two with a space between while the receiver rotates them; each gives a signature.
        message_id: the same in all tries of one message.
        timestamp_s: Unix seconds of this try.
        body: the exact bytes that are sent.

    Raises:
        ValueError: a secret is malformed.
    """
    content = f"{message_id}.{timestamp_s}.".encode() + body
    digests = [hmac.digest(signing_key(one), content, sha256) for one in secret.split()]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join("v1," + base64.b64encode(digest).decode() for digest in digests),
    }
