"""Buffers what is fetched of one partition of Kafka until it is read."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from rankwatch_service.log.base import READ_BYTES_MAX, LogError, Record

_LOG_APPEND_TIME: Final = 1


class Buffer:
    """The records of one partition from `position` to `fetched`."""

    def __init__(self, partition: int, position: int, now_s: float) -> None:
        self.position = position
        self.fetched = position
        self.bytes = 0
        self.paused = False
        """Whether the consumer does not fetch the partition."""
        self.moved_s = now_s
        """When a record last arrived, or none was outstanding; seconds of the monotonic clock."""
        self._partition = partition
        self._records: deque[Record] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def take(self, messages: Sequence[Any], now_unix_ns: int, now_s: float) -> None:
        """Add what was fetched.

        Raises:
            LogError: the client went back to the oldest record, because our position does not exist.
        """
        for message in messages:
            if message.offset < self.fetched:
                raise LogError(f"partition {self._partition} ends before position {self.fetched}: it is another log")
            key, value = (message.key or b"").decode(errors="replace"), message.value or b""
            at = appended_unix_ns(message, now_unix_ns)
            self._records.append(Record(self._partition, message.offset, key, value, at))
            self.bytes += len(value)
            self.fetched = message.offset + 1
        self.moved_s = now_s

    def give(self, limit: int) -> list[Record]:
        """Remove and return the first records: at least one, and at most `limit` and `READ_BYTES_MAX`."""
        records: list[Record] = []
        total = 0
        while self._records and len(records) < limit:
            size = len(self._records[0].value)
            if records and total + size > READ_BYTES_MAX:
                break
            total += size
            records.append(self._records.popleft())
        if records:
            self.bytes -= total
            self.position = records[-1].position + 1
        return records


def appended_unix_ns(message: Any, now_unix_ns: int) -> int:
    """When the broker appended a message; if the topic keeps the sender's time, when the message is read."""
    # A sender's clock decides nothing: ticks take these times.
    return message.timestamp * 1_000_000 if message.timestamp_type == _LOG_APPEND_TIME else now_unix_ns
