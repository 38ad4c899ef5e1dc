"""Adds links to messages on their way to people."""

from __future__ import annotations

from rankwatch_service.notify.links.signed_links import SignedLinks
from rankwatch_service.notify.receivers import TOPIC_URL
from rankwatch_service.notify.sender import MessageSender, TryOutcome


class LinkSender:
    """Hands messages on with links in them; the incidents topic, which many may read, gets none."""

    def __init__(self, links: SignedLinks, others: MessageSender) -> None:
        self._links = links
        self._others = others

    async def send(self, url: str, secret: str, message_id: str, body: bytes) -> TryOutcome:
        """See `MessageSender.send`."""
        linked = body if url == TOPIC_URL else self._links.added(message_id, body)
        return await self._others.send(url, secret, message_id, linked)
