"""The ways to deliver a message, by the scheme of a receiver's URL: one try, its outcome, and what is done after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final, Protocol

from rankwatch_service.access.secret_key import SecretKey
from rankwatch_service.notify.receiver_types.base import Target


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
            senders: by the scheme of the URLs that each delivers to: https, mailto.
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


RETRY_DELAYS_S: Final = (5, 15, 30, 60, 120, 300, 1_800, 7_200, 18_000, 36_000)
"""Delays between tries; the last one repeats. The first ones are short, so that a page arrives while it still helps."""

GIVE_UP_AFTER_S: Final = 3 * 86_400
"""Age at which an undelivered message is given up (state `failed`): nobody acts on an older page."""

RETRY_AFTER_MAX_S: Final = 3_600
"""Longest delay that a receiver can ask for with Retry-After."""

JITTER_RATIO: Final = 0.1
"""Retries are delayed by up to this share more, so that messages that failed together are not retried together."""

GONE: Final = 410
"""HTTP status of a receiver that wants no more messages."""


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """What happens to the message after a try."""

    state: str
    """delivered, waiting (for the next try) or failed."""
    next_try_unix_ns: int
    receiver_gone: bool = False
    """Whether to disable its receiver."""


def after_try(outcome: TryOutcome, tries: int, now_unix_ns: int, jitter: float) -> RetryDecision:
    """Decide what to do after a try.

    Args:
        outcome: how the try ended.
        tries: number of tries so far, including this one.
        now_unix_ns: when it ended.
        jitter: a random number between 0 and 1.
    """
    if outcome.delivered:
        return RetryDecision("delivered", now_unix_ns)
    if outcome.status == GONE:
        return RetryDecision("failed", now_unix_ns, receiver_gone=True)
    if outcome.is_final:
        return RetryDecision("failed", now_unix_ns)
    delay_s = RETRY_DELAYS_S[min(tries, len(RETRY_DELAYS_S)) - 1] * (1 + JITTER_RATIO * jitter)
    if outcome.retry_after_s is not None:
        delay_s = max(delay_s, outcome.retry_after_s)
    return RetryDecision("waiting", now_unix_ns + int(delay_s * 1e9))


def retry_after_s(header: str | None, now_unix_s: float) -> float | None:
    """Parse a Retry-After header (seconds or a date) as seconds from now; None if it is absent or malformed."""
    if header is None:
        return None
    try:
        delay_s = float(header) if header.strip().isdigit() else parsedate_to_datetime(header).timestamp() - now_unix_s
    except (ValueError, OverflowError):
        return None
    return min(max(delay_s, 0.0), RETRY_AFTER_MAX_S)
