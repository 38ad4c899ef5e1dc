"""Records of the log of telemetry, which is a table of the store or a topic of Kafka, and of the control log.

`api.ingest` appends telemetry and `stream.sources` reads it, in either form. The control log has what people, policy
and orders decide, and is always in the store (`log.control_log`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

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
