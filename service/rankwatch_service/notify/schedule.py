"""What follows from one try to deliver a message. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

RETRY_DELAYS_S: Final = (5, 15, 30, 60, 120, 300, 1_800, 7_200, 18_000, 36_000)
"""Seconds from one try to the next; the last repeats. The first ones are faster than a person gives up on a page."""

GIVE_UP_AFTER_S: Final = 3 * 86_400
"""A message that was not delivered for this long is given up (state failed): nobody acts on an older page."""

RETRY_AFTER_MAX_S: Final = 3_600
"""Longest pause that a receiver's Retry-After is believed."""

JITTER_RATIO: Final = 0.1
"""Retries come up to this much later, so that messages that failed together do not come back together."""

GONE: Final = 410


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one try ended. `status` is None where no answer came; `error` is "" only for 2xx."""

    status: int | None
    error: str
    seconds: float
    retry_after_s: float | None = None

    @property
    def delivered(self) -> bool:
        """The receiver took it: any 2xx. A redirect is a failure like any other."""
        return self.status is not None and 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Next:
    """What to do with the message: its new state, when to try again, and whether its receiver is gone for good."""

    state: str
    next_try_unix_ns: int
    receiver_gone: bool = False


def after_try(outcome: Outcome, tries: int, now_unix_ns: int, jitter: float) -> Next:
    """Decide what follows.

    Args:
        outcome: how the try ended.
        tries: tries so far, this one included (1 after the first).
        now_unix_ns: when it ended.
        jitter: a random number from 0 to 1.
    """
    if outcome.delivered:
        return Next("delivered", now_unix_ns)
    if outcome.status == GONE:
        return Next("failed", now_unix_ns, receiver_gone=True)
    delay_s = RETRY_DELAYS_S[min(tries, len(RETRY_DELAYS_S)) - 1] * (1 + JITTER_RATIO * jitter)
    if outcome.retry_after_s is not None:
        delay_s = max(delay_s, outcome.retry_after_s)
    return Next("waiting", now_unix_ns + int(delay_s * 1e9))


def retry_after_s(header: str | None, now_unix_s: float) -> float | None:
    """Read a Retry-After header, seconds or a date, as seconds from now; None where it is absent or unreadable."""
    if header is None:
        return None
    try:
        delay_s = float(header) if header.strip().isdigit() else parsedate_to_datetime(header).timestamp() - now_unix_s
    except (ValueError, OverflowError):
        return None
    return min(max(delay_s, 0.0), RETRY_AFTER_MAX_S)
