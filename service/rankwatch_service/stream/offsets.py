"""How far a partition is processed, and the values that are stored about it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Offsets:
    """How far a partition is processed.

    Every record below `position`, every tick up to `tick_number` and every control record below `control_position` is
    processed.
    """

    position: int
    tick_number: int
    control_position: int

    def is_later(self, other: Offsets) -> bool:
        """Whether more is processed here than at `other`, a position in the same log."""
        return (self.tick_number, self.position) > (other.tick_number, other.position)

    def is_within(self, other: Offsets) -> bool:
        """Whether all records and ticks that are processed here are processed at `other` too."""
        return self.position <= other.position and self.tick_number <= other.tick_number


def earliest(places: Sequence[Offsets]) -> Offsets:
    """The latest place from which a replay contains everything that came after each of the places."""
    return Offsets(
        min(offsets.position for offsets in places),
        min(offsets.tick_number for offsets in places),
        min(offsets.control_position for offsets in places),
    )


@dataclass(frozen=True, slots=True)
class StoredTick:
    """Before the record at `position` the time was `time_unix_ns`.

    By then the control records below `control_position` had been applied.
    """

    number: int
    position: int
    control_position: int
    time_unix_ns: int


@dataclass(frozen=True, slots=True)
class Claim:
    """The stored state of a partition when a process takes it over."""

    offsets: Offsets
    """What is committed."""
    epoch: int
    """Only the process that has the newest epoch can commit."""
    needed_position: int
    """Older records may be removed from the log: no start needs them."""
    needed_control: int
    """The same for the control log."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The readable snapshot of one job, or of the partition's settings (`ALL_JOBS`), as of `place`."""

    job: str
    offsets: Offsets
    state: Any
