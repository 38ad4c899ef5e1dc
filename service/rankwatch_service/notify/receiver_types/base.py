"""What a type of receiver is: a request from a message, and a reading of the reply. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
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
