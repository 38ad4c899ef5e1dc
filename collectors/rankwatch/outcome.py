"""Outcomes of publishing a message."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accepted:
    """The message is stored durably."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The message will never be accepted. `reason` is short and from a bounded set, since it becomes a label."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Later:
    """Try again later. `after_s`: seconds that the service asked to wait, None if it did not."""

    reason: str
    after_s: float | None = None
    for_a_person: bool = False
    """True if waiting alone does not help: a wrong token, another job's token, no service configured."""


Outcome = Accepted | Refused | Later
