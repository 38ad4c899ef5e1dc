"""Records of the log of telemetry, which is a table of the store or a topic of Kafka, and of the control log.

`api.ingest` appends telemetry and `stream.sources` reads it, in either form. The control log has what people, policy
and orders decide, and is always in the store (`log.control_log`). Also how far the stream has read. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

READ_BYTES_MAX: Final = 32 * 1024 * 1024
"""Values returned by one read, unless the first alone is larger: four batches of the largest accepted size."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record to append. The key is the job's name; the value of telemetry is a `rankwatch.wire.Batch` as msgpack."""

    key: str
    value: bytes


class Record(NamedTuple):
    """An entry with its position. `appended_unix_ns` is the service's or broker's clock, never an agent's."""

    partition: int
    position: int
    key: str
    value: bytes
    appended_unix_ns: int


class LogError(Exception):
    """The log does not answer, or is another log than before. Nothing was read; a later start may succeed."""


@dataclass(frozen=True, slots=True)
class Control:
    """A record of the control log with its position.

    The key is a job's name, or `ALL_JOBS`; the value is a `ControlRecord` as JSON.
    """

    position: int
    key: str
    value: bytes
    appended_unix_ns: int


class Controls(Protocol):
    """A reader of control records."""

    def read(self, position: int, limit: int) -> list[Control]:
        """Up to `limit` records from `position` on, in order; positions may be missing: those records were removed."""
        ...


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
