"""What a network does to batches: some come twice, some late, clocks disagree, collectors start anew. Seeded."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count

import msgspec
import numpy as np

from rankwatch_service.simulate.batches import Message
from rankwatch_service.simulate.injected import Transit


def disturbed(messages: Iterable[Message], transit: Transit, seed: int) -> Iterator[Message]:
    """The messages as the service gets them, in the order in which they arrive."""
    random = np.random.default_rng([seed, 1])
    waiting: list[tuple[float, int, Message]] = []
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


def _at(entry: tuple[float, int, Message]) -> Message:
    return replace(entry[2], time_s=entry[0])


def _rebooted(message: Message, transit: Transit, since_boot: Counter[str]) -> Message:
    host = message.batch.host
    if message.time_s < transit.boots.get(host, float("inf")):
        return message
    seq = since_boot[host]
    since_boot[host] += 1
    batch = msgspec.structs.replace(message.batch, boot=f"{message.batch.boot}-again", seq=seq)
    return replace(message, batch=batch)


def _skewed(message: Message, transit: Transit) -> Message:
    batch = message.batch
    ahead_ns = round(transit.skews.get(batch.host, 0.0) * 1e9)
    if not ahead_ns:
        return message
    events = tuple(msgspec.structs.replace(event, time_unix_ns=event.time_unix_ns + ahead_ns) for event in batch.events)
    return replace(
        message, batch=msgspec.structs.replace(batch, sent_unix_ns=batch.sent_unix_ns + ahead_ns, events=events)
    )
