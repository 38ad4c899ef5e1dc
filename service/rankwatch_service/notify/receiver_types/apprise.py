"""Apprise: the lines of a message, for the plugin that the scheme of the URL names."""

from __future__ import annotations

import re
from typing import Any, Final

from rankwatch_service.notify.receiver_types.base import without_secret
from rankwatch_service.notify.receiver_types.message import OutgoingMessage

_URL: Final = re.compile(r"[a-z0-9]{1,32}://[^\s]+")


def check(url: str, secret: str) -> None:
    """Check that a receiver has the form of an Apprise URL, and no secret besides.

    Raises:
        ValueError: it has not.
    """
    if not _URL.fullmatch(url) or not url.isprintable():
        raise ValueError("the target of apprise is one Apprise URL without spaces, such as ntfys://ntfy.example/oncall")
    without_secret(url, secret)


def scheme(url: str) -> str:
    """What may be shown of an Apprise URL: anything behind its scheme may be a secret, the host too.

    >>> scheme("tgram://123456:ABC/chat")
    'tgram://…'
    """
    return f"{url.partition('://')[0]}://…"


def notification(message: OutgoingMessage) -> dict[str, Any]:
    """Title, body and type of an Apprise notification."""
    first, *others = message.lines
    links = "\n".join(f"{title}: {url}" for title, url in message.buttons())
    return {
        "title": first,
        "body": "\n\n".join(filter(None, [*others, links])) or first,
        "notify_type": _type(message),
    }


def _type(message: OutgoingMessage) -> str:
    if message.is_resolved:
        return "success"
    return {"critical": "failure", "warning": "warning"}.get(message.severity, "info")
