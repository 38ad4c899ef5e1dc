"""The ways to deliver a message, by the scheme of a receiver's URL: one try, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rankwatch_service.access.secret_key import SecretKey
from rankwatch_service.notify.receiver_types.target import Target


@dataclass(frozen=True, slots=True)
class TryOutcome:
    """How one try to deliver a message ended."""

    status: int | None
    """HTTP status, or reply code of a mail server; None if there was no answer."""
    error: str
    """Why the try failed, for people; empty if it succeeded."""
    seconds: float
    """How long the try took."""
    retry_after_s: float | None = None
    """How long the receiver asked us to wait, in seconds from the end of the try."""
    is_final: bool = False
    """Another try would fail in the same way, so the message is given up."""

    @property
    def delivered(self) -> bool:
        """Whether the receiver accepted the message: any 2xx without an error. A redirect is a failure."""
        return self.status is not None and 200 <= self.status < 300 and not self.error


class MessageSender(Protocol):
    """Delivers messages to receivers of one kind."""

    async def send(self, url: str, secret: str, message_id: str, body: bytes) -> TryOutcome:
        """Try once to deliver a message. Whatever the receiver does is an outcome and not an exception.

        Args:
            url: of the receiver, with its type: a `receiver_types.target.Target` as it is stored.
            secret: of the receiver. Of a webhook it signs the message: one, or two with a space between.
            message_id: the same in all tries of this message.
            body: the exact bytes to send, JSON.
        """
        ...


class SenderTable:
    """Decrypts a receiver's URL and secret, as the database holds them, and sends with the sender for the URL."""

    def __init__(self, secret_key: SecretKey, senders: Mapping[str, MessageSender]) -> None:
        """Send nothing yet.

        Args:
            secret_key: of the service.
            senders: by the scheme of the URLs that each delivers to: https, mailto, kafka.
        """
        self._secret_key = secret_key
        self._senders = senders

    async def send(self, url: str, secret: str, message_id: str, body: bytes) -> TryOutcome:
        """See `MessageSender.send`; URL and secret are encrypted."""
        try:
            url, secret = self._secret_key.decrypt(url), self._secret_key.decrypt(secret)
        except ValueError as error:
            return TryOutcome(None, f"cannot be sent: {error}", 0.0)
        scheme = Target.read(url).url.partition(":")[0].lower()
        sender = self._senders.get(scheme)
        if sender is None:
            return TryOutcome(None, f"cannot be sent: this service does not deliver to {scheme}:", 0.0)
        return await sender.send(url, secret, message_id, body)
