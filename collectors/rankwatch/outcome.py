"""What became of a message that was to be published."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accepted:
    """It is taken, durably."""


@dataclass(frozen=True, slots=True)
class Refused:
    """It will never be taken; `reason` is short and bounded, it becomes a label."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Later:
    """Not now. `after_s`: how long it was asked to wait, None if nothing was said."""

    reason: str
    after_s: float | None = None
    for_a_person: bool = False
    """Waiting alone mends nothing: a wrong token, another job's token, no service named."""


Outcome = Accepted | Refused | Later
