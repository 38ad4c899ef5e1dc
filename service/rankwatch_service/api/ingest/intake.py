"""Where accepted telemetry goes: into the database's log by way of a `Batcher`, or to Kafka."""

from __future__ import annotations

from typing import Protocol

from rankwatch_service.log.base import Entry


class NotNowError(Exception):
    """It cannot be stored now, and the text says why; the same batch may come again."""


class Intake(Protocol):
    """Stores entries, many at a time."""

    def start(self) -> None:
        """Begin; called inside the running loop."""
        ...

    async def put(self, item: Entry, size_bytes: int) -> None:
        """Return once the entry is durable in the log.

        Raises:
            NotNowError: see there; after a bounded wait.
            BadBatchError: it can never be stored.
            StoreError: of the database.
        """
        ...

    async def stop(self) -> None:
        """Finish what is under way, then end."""
        ...
