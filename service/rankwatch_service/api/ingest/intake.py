"""Where accepted telemetry goes: through a `Batcher` into the log of the store, or to Kafka."""

from __future__ import annotations

from typing import Protocol

from rankwatch_service.log.base import Entry


class NotNowError(Exception):
    """It cannot be stored now; the text says why. The same batch may be sent again."""


class Intake(Protocol):
    """Stores entries of the log; many requests may call it at the same time."""

    def start(self) -> None:
        """Start; called inside the running loop."""
        ...

    async def put(self, item: Entry, size_bytes: int) -> None:
        """Return once the entry is durable in the log.

        Raises:
            NotNowError: it cannot be stored now; raised after a bounded wait.
            BadBatchError: it can never be stored.
            StoreError: the database failed.
        """
        ...

    async def stop(self) -> None:
        """Finish the entries that are being stored, then end."""
        ...
