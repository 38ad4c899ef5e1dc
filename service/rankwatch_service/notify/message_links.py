"""Signed links in messages: each permits its holder one action, once, until it expires, without a login."""

from __future__ import annotations

import hmac
import json
from base64 import urlsafe_b64encode
from datetime import datetime, timedelta
from enum import StrEnum
from hashlib import sha256
from typing import Any, Final

from rankwatch_service.notify.sender import MessageSender, TryOutcome
from rankwatch_service.policy.notification import encoded

PURPOSE: Final = "message links"
"""What the key is derived for."""

VALID_S: Final = 86_400
"""How long a link works from the time of its message; what lasts longer is repeated with new links."""

LINKED_TYPES: Final = ("incident.opened", "incident.updated")
"""Messages about something that is open."""


class LinkAction(StrEnum):
    """What a link does with the open incidents of its message."""

    ACKNOWLEDGE = "acknowledge"
    SILENCE = "silence"


class LinkError(Exception):
    """The link cannot be used; the text says why."""


class SignedLinks:
    """Makes links and checks them."""

    def __init__(self, key: bytes, public_url: str) -> None:
        """Do no I/O.

        Args:
            key: 32 bytes, the same in all processes.
            public_url: where people reach the service.
        """
        self._key = key
        self._public_url = public_url

    def added(self, message_id: str, body: bytes) -> bytes:
        """The body of a message with its links in `data.links`: the same bytes in every try."""
        message: dict[str, Any] = json.loads(body)
        if message.get("type") not in LINKED_TYPES:
            return body
        until = datetime.fromisoformat(message["timestamp"]) + timedelta(seconds=VALID_S)
        links = {str(action): self.url(action, message_id, int(until.timestamp())) for action in LinkAction}
        message["data"]["links"] = {**(message["data"].get("links") or {}), **links}
        return encoded(message)

    def url(self, action: LinkAction, message_id: str, until_unix_s: int) -> str:
        """The link of one message for one action."""
        signature = self._signature(action, message_id, until_unix_s)
        return f"{self._public_url}/act/{action}/{message_id}?until={until_unix_s}&signature={signature}"

    def check(self, action: LinkAction, message_id: str, until: str, signature: str, now_unix_s: float) -> None:
        """Check the parts of a link.

        Raises:
            LinkError: it was not made here, or has expired.
        """
        until_unix_s = int(until) if until.isascii() and until.isdecimal() and len(until) <= 12 else 0
        expected = self._signature(action, message_id, until_unix_s)
        if not hmac.compare_digest(expected.encode(), signature.encode()):
            raise LinkError("This link was not made by this service, or not copied in full.")
        if now_unix_s >= until_unix_s:
            raise LinkError("This link has expired.")

    def _signature(self, action: LinkAction, message_id: str, until_unix_s: int) -> str:
        digest = hmac.digest(self._key, f"{action}\n{message_id}\n{until_unix_s}".encode(), sha256)
        return urlsafe_b64encode(digest).decode().rstrip("=")


class LinkSender:
    """Sends messages with links in them."""

    def __init__(self, links: SignedLinks, sender: MessageSender) -> None:
        self._links = links
        self._sender = sender

    async def send(self, url: str, secret: str, message_id: str, body: bytes) -> TryOutcome:
        """See `MessageSender.send`."""
        return await self._sender.send(url, secret, message_id, self._links.added(message_id, body))
