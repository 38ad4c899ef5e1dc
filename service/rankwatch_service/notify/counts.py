"""Counts of notifications by receiver, for metrics. They are stored, so they go on when the lease moves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Final

import msgspec
from sqlalchemy import Connection, select

from rankwatch_service.store.engine import upsert
from rankwatch_service.store.models import Receiver, Setting

SETTING: Final = "notification_counts"
"""Setting with {receiver: fields of `ReceiverCounts`}."""

LATENCIES_S: Final = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1_800.0, 7_200.0)
"""Bounds of the buckets of latencies: a first try takes up to 15 s, the next ones follow within minutes and hours."""


class ReceiverCounts(msgspec.Struct):
    """What became of the notifications to one receiver since it was added."""

    delivered: int = 0
    refused: int = 0
    """Tries that the receiver answered with an error."""
    unanswered: int = 0
    """Tries that it did not answer."""
    failed: int = 0
    """Notifications given up."""
    latency_s: float = 0.0
    """From the commit to the delivery, summed over all deliveries."""
    latencies: list[int] = msgspec.field(default_factory=lambda: [0] * (len(LATENCIES_S) + 1))
    """Deliveries by latency, not cumulated; the last number is of those beyond `LATENCIES_S`."""

    def add_delivery(self, latency_s: float) -> None:
        """Count a delivery.

        Args:
            latency_s: from the commit of the notification to its delivery.
        """
        self.delivered += 1
        self.latency_s += latency_s
        self.latencies[bisect_left(LATENCIES_S, latency_s)] += 1

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Deliveries up to each bound, as a histogram has them."""
        total = 0
        for bound, count in zip((*map(str, LATENCIES_S), "+Inf"), self.latencies, strict=True):
            total += count
            yield bound, total


class NotificationCounts:
    """The counts of all receivers within one transaction."""

    def __init__(self, connection: Connection) -> None:
        """Read them. Those of receivers that were removed are left out."""
        stored = connection.scalar(select(Setting.value).where(Setting.name == SETTING)) or {}
        names = connection.scalars(select(Receiver.name).order_by(Receiver.name)).all()
        self._connection = connection
        self.by_receiver = {name: msgspec.convert(stored.get(name, {}), ReceiverCounts) for name in names}

    def of(self, receiver: str) -> ReceiverCounts:
        """The counts of a receiver; of one that was removed they are not stored."""
        return self.by_receiver.get(receiver) or ReceiverCounts()

    def store(self, now_unix_ns: int) -> None:
        """Write them in this transaction."""
        row = {"name": SETTING, "value": msgspec.to_builtins(self.by_receiver), "updated_unix_ns": now_unix_ns}
        self._connection.execute(upsert(self._connection, Setting, row), row)
