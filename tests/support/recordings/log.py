"""A log of one partition in memory, with the times at which its records were appended."""

from rankwatch_service.log.base import Entry, Record


class RecordedLog:
    """What a stream needs of `rankwatch_service.stream.sources.Source`."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    def record(self, entry: Entry, appended_unix_ns: int) -> None:
        self._records.append(Record(0, len(self._records), entry.key, entry.value, appended_unix_ns))

    @property
    def partitions(self) -> int:
        return 1

    def partition_of(self, key: str) -> int:
        return 0

    def read(self, partition: int, position: int, limit: int, wait_s: float = 0.0) -> list[Record]:
        return self._records[position : position + limit]

    def drained(self, partition: int, position: int) -> bool:
        return position >= len(self._records)

    def end(self, partition: int) -> int:
        return len(self._records)

    def begin(self, partition: int) -> int:
        return 0

    def processed(self, partition: int, committed: int, needed: int) -> None:
        """It keeps everything."""
