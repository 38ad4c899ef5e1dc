"""Disturbances of batches in transit: some arrive twice or late, clocks differ, collectors restart. Seeded."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec
import numpy as np

from rankwatch_service.simulate.batches import TimedBatch


@dataclass(frozen=True, slots=True)
class Transit:
    """Disturbances between hosts and the service."""

    doubled: float = 0.0
    """Probability that a batch is sent twice."""
    late: float = 0.0
    """Probability that a batch is late, and arrives after its successors."""
    late_s: float = 0.0
    skews_s: Mapping[str, float] = field(default_factory=dict)
    """How far its clock is ahead, by host."""
    collector_restarts_s: Mapping[str, float] = field(default_factory=dict)
    """The job's time at which its collector restarts and numbers its batches from 0, by host."""


def disturbed(messages: Iterable[TimedBatch], transit: Transit, seed: int) -> Iterator[TimedBatch]:
    """The messages as the service gets them, in the order in which they arrive."""
    random = np.random.default_rng([seed, 1])
    waiting: list[tuple[float, int, TimedBatch]] = []
    order = count()
    since_boot: Counter[str] = Counter()
    for message in messages:
        sent = _skewed(_rebooted(message, transit, since_boot), transit)
        while waiting and waiting[0][0] <= sent.time_s:
            yield _at(heapq.heappop(waiting))
        if random.random() < transit.late:
            heapq.heappush(waiting, (sent.time_s + transit.late_s, next(order), sent))
        else:
            yield sent
        if random.random() < transit.doubled:
            heapq.heappush(waiting, (sent.time_s + 1.0, next(order), sent))
    while waiting:
        yield _at(heapq.heappop(waiting))


def _at(entry: tuple[float, int, TimedBatch]) -> TimedBatch:
    return replace(entry[2], time_s=entry[0])


def _rebooted(message: TimedBatch, transit: Transit, since_boot: Counter[str]) -> TimedBatch:
    host = message.batch.host
    if message.time_s < transit.collector_restarts_s.get(host, float("inf")):
        return message
    seq = since_boot[host]
    since_boot[host] += 1
    batch = msgspec.structs.replace(message.batch, boot=f"{message.batch.boot}-again", seq=seq)
    return replace(message, batch=batch)


def _skewed(message: TimedBatch, transit: Transit) -> TimedBatch:
    batch = message.batch
    ahead_ns = round(transit.skews_s.get(batch.host, 0.0) * 1e9)
    if not ahead_ns:
        return message
    events = tuple(msgspec.structs.replace(event, time_unix_ns=event.time_unix_ns + ahead_ns) for event in batch.events)
    return replace(
        message, batch=msgspec.structs.replace(batch, sent_unix_ns=batch.sent_unix_ns + ahead_ns, events=events)
    )
