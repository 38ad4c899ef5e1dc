"""Decides what to do after one try to deliver a notification. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

from rankwatch_service.notify.sender import TryOutcome

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
