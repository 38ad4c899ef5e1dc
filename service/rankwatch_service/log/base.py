"""What the log of telemetry is to its readers: partitions of records with positions that only grow. Two forms.

Records of one job lie in one partition, in the order in which they were appended. A record that has a position was
durable before anybody could read it, and no record with a smaller position appears later. Writing is another matter,
and each form's own: see `api.intake`. What people and the api decide is a sequence of its own, always in the store: see
`log.control`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

READ_BYTES_MAX: Final = 32 * 1024 * 1024
"""Values returned by one read, unless the first alone is larger: four batches of the largest accepted size."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Something to append. The key is the job's name; the value of telemetry is a `rankwatch.wire.Batch` as msgpack."""

    key: str
    value: bytes


class Record(NamedTuple):
    """An entry with its place. `appended_unix_ns` is the service's clock, never an agent's."""

    partition: int
    position: int
    key: str
    value: bytes
    appended_unix_ns: int


class LogError(Exception):
    """The log does not answer, or not as it did: nothing was read. Going on later, from what is committed, may help."""


class Log(Protocol):
    """An ordered, durable record of entries, to be read. Partitions are numbered from 0."""

    @property
    def partitions(self) -> int:
        """How many there are."""
        ...

    def partition_of(self, key: str) -> int:
        """The partition that holds the records of `key`."""
        ...

    def read(self, partition: int, position: int, limit: int, wait_s: float = 0.0) -> list[Record]:
        """Up to `limit` records from `position` on, in order; fewer than exist if they are large (`READ_BYTES_MAX`).

        Positions may be missing (trimmed). An empty list means that nothing is at hand; whether nothing lies there
        `drained` tells.

        Args:
            partition: whose.
            position: of the first record.
            limit: records at most.
            wait_s: how long to wait for records that lie there and are on their way.

        Raises:
            LogError: the log cannot be read now, or lies elsewhere now.
        """
        ...

    def drained(self, partition: int, position: int) -> bool:
        """Whether it is known, as of about now, that nothing lies at `position` or behind it."""
        ...

    def end(self, partition: int) -> int:
        """The position that the next record will have, or more."""
        ...

    def begin(self, partition: int) -> int:
        """The position of the oldest record kept; `end` where there is none."""
        ...

    def trim(self, partition: int, before: int, limit: int) -> int:
        """Forget up to `limit` of the oldest records with positions below `before`; returns how many went."""
        ...
