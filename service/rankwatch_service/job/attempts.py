"""Who carries a job's ranks, and the attempts that wait to take over. Pure.

Who carries a job's ranks: the agents, or where none has enrolled the hosts, whose batches bring them.

In a job whose agents have enrolled, a rank of the running attempt belongs to the agent that brought it first. Another
agent may bring it only once that one has been silent. A newer attempt takes over when one of those who carry the
running one brings it, or when the running one has ended or nobody carries it any more.

Attempts that wait to take over: somebody brings them who does not carry the running attempt.

Honest ones wait for seconds: the hosts of a restart on other nodes, until those of the attempt before have ended or
fallen silent; the new host of a restart, until another brings the same attempt. One that goes on beside the running
attempt is another job of this name, or a forgery.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankwatch import wire
from rankwatch_detectors.base import Ints
from rankwatch_service.job.allowance import CellCount
from rankwatch_service.telemetry.bundle import Bundle, read_bundle
from rankwatch_service.telemetry.envelope import Envelope, decode_envelope

RANK_FREE_S: Final = 10.0
"""Silence of an agent after which another may bring its ranks, as it may enrol in its place."""

ATTEMPT_FREE_S: Final = 5.0
"""Silence of all who carry an attempt after which any other attempt takes over; agents report every second."""

CARRIERS_MIN: Final = 64
"""Carriers of an attempt: so many, or two for each of its ranks if that is more. Further hosts without an agent carry
nothing: whoever makes up names of hosts takes no more memory."""

_NOBODY: Final = -1


class Carriers:
    """Who carries which rank of the running attempt. Memory: 4 bytes for each rank, 100 for each carrier."""

    def __init__(self) -> None:
        self.signed = False
        """Whether an agent of this job has enrolled: from then on unsigned batches are forged."""
        self._numbers: dict[str, int] = {}
        self._heard_s: list[float] = []
        self._of_rank: NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def begin(self, *, new_launch: bool) -> None:
        """An attempt begins; in a new launch the ranks are others."""
        if new_launch:
            self._numbers, self._heard_s = {}, []
            self._of_rank = np.zeros(0, dtype=np.int32)

    def objection(self, bundle: Bundle, now_s: float, *, same_ranks: bool) -> str:
        """Why a bundle is forged; empty if it is not. Changes nothing.

        Of several batches also why they must be taken one by one: one of them may decide on a later one.

        Args:
            bundle: of any attempt.
            now_s: stream time.
            same_ranks: whether its ranks are those of the running attempt: it is of the same launch.
        """
        unsigned = next((batch for batch in bundle.batches if not batch.agent), None)
        several = len(bundle.batches) > 1
        if not self.signed:
            return "the first signed batch" if several and any(batch.agent for batch in bundle.batches) else ""
        if unsigned is not None:
            return f"a batch of host {unsigned.host!r} is not signed, and agents of this job have enrolled"
        if not same_ranks:
            return ""
        ranks, mine = self._brought(bundle)
        owners = np.append(self._of_rank, np.int32(_NOBODY))[np.minimum(ranks, len(self._of_rank))]
        silent = np.array([now_s - heard_s > RANK_FREE_S for heard_s in self._heard_s] + [not several])
        others = np.flatnonzero((owners != mine) & ~silent[owners])
        if not len(others):
            return ""
        batch, rank = bundle.batches[0], int(ranks[others[0]])
        return f"agent {batch.agent} of host {batch.host!r} brings rank {rank}, which another agent carries"

    def take(self, bundle: Bundle, now_s: float, ranks: int) -> None:
        """Take a bundle of the running attempt, which has so many ranks, to which there is no objection."""
        for batch in bundle.batches:
            self.signed |= bool(batch.agent)
            full = len(self._numbers) >= max(CARRIERS_MIN, 2 * ranks)
            if full and not batch.agent and _name(batch) not in self._numbers:
                continue
            number = self._numbers.setdefault(_name(batch), len(self._numbers))
            self._heard_s[number : number + 1] = [now_s]
        if not self.signed:
            return
        brought, mine = self._brought(bundle)
        missing = int(brought.max(initial=-1)) + 1 - len(self._of_rank)
        if missing > 0:
            self._of_rank = np.pad(self._of_rank, (0, missing), constant_values=_NOBODY)
        self._of_rank[brought] = mine

    def _brought(self, bundle: Bundle) -> tuple[Ints, Ints]:
        """The ranks that a bundle names, and who brings each: its number, or `_NOBODY` for a new one."""
        numbers = np.array([self._numbers.get(_name(batch), _NOBODY) for batch in bundle.batches])
        ranks, batches = [], []
        for table in bundle.tables.values():
            ranks.append(table.rows.rank)
            batches.append(table.batch)
        for number, batch in enumerate(bundle.batches):
            named = [info.rank for info in batch.ranks] + [block.rank for block in batch.progress]
            named += [event.rank for event in batch.events if event.rank is not None]
            if named:
                ranks.append(np.array(named, dtype=np.int64))
                batches.append(np.full(len(named), number))
        if not ranks:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        return np.concatenate(ranks), numbers[np.concatenate(batches)]

    def has(self, batch: Envelope) -> bool:
        """Whether whoever sent this batch carries the running attempt."""
        return _name(batch) in self._numbers

    def silent(self, now_s: float) -> bool:
        """Whether nobody has brought the running attempt for `ATTEMPT_FREE_S`."""
        return now_s - max(self._heard_s, default=-np.inf) > ATTEMPT_FREE_S

    def blind(self, seconds: float) -> None:
        """Discount time in which the service could not receive anything."""
        self._heard_s = [heard_s + seconds for heard_s in self._heard_s]

    def state(self) -> dict[str, Any]:
        """Everything: JSON types and an array."""
        return {
            "signed": self.signed,
            "names": list(self._numbers),
            "heard_s": list(self._heard_s),
            "of_rank": self._of_rank,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Carriers:
        """The object that gave this state."""
        carriers = cls()
        carriers.signed = state["signed"]
        carriers._numbers = {name: number for number, name in enumerate(state["names"])}
        carriers._heard_s, carriers._of_rank = list(state["heard_s"]), state["of_rank"]
        return carriers


def _name(batch: Envelope) -> str:
    """Of who sent a batch. No agent's id is that of a host: a name holds no slash."""
    return batch.agent or f"host/{batch.host}"


BESIDE_S: Final = 10.0
"""After this long beside the running attempt, an attempt is reported, and its rows are not kept any more."""

ATTEMPTS_MAX: Final = 8
"""Attempts that wait at a time; the one that was heard longest ago makes room."""

BATCHES_MAX: Final = 4_096
"""Batches of one attempt that wait, as many as of an attempt that starts; later ones are dropped."""

BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes that wait, of one attempt; later batches wait without their tables, and in the end not at all."""

ITEM_BYTES: Final = 512
"""What a rank info, an event or a progress block counts for."""


@dataclass(slots=True)
class Newcomer:
    """One attempt that waits."""

    attempt: str
    since_s: float
    host: str
    """That brought it first."""
    cells: CellCount
    """Of all its bundles, those included that were dropped."""
    heard_s: float = 0.0
    reported: bool = False
    size: int = 0
    bundles: list[Bundle] = field(default_factory=list)


class Newcomers:
    """The attempts that wait. Memory: `ATTEMPTS_MAX` x (`BYTES_MAX` and `BATCHES_MAX` headers)."""

    def __init__(self) -> None:
        self._waiting: dict[str, Newcomer] = {}

    def cells(self, attempt: str) -> CellCount | None:
        """The count of an attempt that waits; None if it does not."""
        newcomer = self._waiting.get(attempt)
        return newcomer.cells if newcomer else None

    def add(self, bundle: Bundle, count: CellCount, now_s: float) -> int:
        """Keep a bundle of one batch until its attempt takes over; returns how many batches were dropped instead.

        Args:
            bundle: of an attempt.
            count: for its cells, if it does not wait yet.
            now_s: stream time.
        """
        batch = bundle.batches[0]
        newcomer = self._waiting.pop(batch.attempt, None) or Newcomer(batch.attempt, now_s, batch.host, count)
        newcomer.cells.take(bundle)
        dropped = 0
        if len(self._waiting) >= ATTEMPTS_MAX:
            dropped += len(self._waiting.pop(next(iter(self._waiting))).bundles)
        self._waiting[batch.attempt] = newcomer
        newcomer.heard_s = now_s
        if len(newcomer.bundles) >= BATCHES_MAX:
            return dropped + 1
        size = _size(bundle)
        if newcomer.reported or newcomer.size + size > BYTES_MAX:
            bundle = _without_tables(bundle)
            size = _size(bundle)
            if not (batch.ranks or batch.events) or newcomer.size + size > BYTES_MAX:
                return dropped + 1
        newcomer.bundles.append(bundle)
        newcomer.size += size
        return dropped

    def take(self, attempt: str) -> list[Bundle]:
        """The bundles of an attempt that takes over, oldest first; nothing of it waits afterwards."""
        newcomer = self._waiting.pop(attempt, None)
        return newcomer.bundles if newcomer else []

    def newest(self) -> str:
        """The attempt that was heard last; empty if none waits."""
        return next(reversed(self._waiting), "")

    def beside(self, now_s: float) -> list[Newcomer]:
        """Those that have become `BESIDE_S` old, each once. Their tables are dropped."""
        old = [one for one in self._waiting.values() if not one.reported and one.heard_s - one.since_s >= BESIDE_S]
        for newcomer in old:
            newcomer.reported = True
            newcomer.bundles = [_without_tables(bundle) for bundle in newcomer.bundles]
            newcomer.size = sum(map(_size, newcomer.bundles))
        for attempt in [name for name, one in self._waiting.items() if now_s - one.heard_s > BESIDE_S]:
            del self._waiting[attempt]
        return old

    def state(self) -> list[dict[str, Any]]:
        """Everything: JSON types and bytes."""
        return [
            {
                "attempt": one.attempt,
                "since_s": one.since_s,
                "host": one.host,
                "heard_s": one.heard_s,
                "reported": one.reported,
                "cells": one.cells.state(),
                "batches": [wire.encode(bundle.batches[0]) for bundle in one.bundles],
            }
            for one in self._waiting.values()
        ]

    @classmethod
    def restored(cls, state: list[Mapping[str, Any]]) -> Newcomers:
        """The object that gave this state."""
        newcomers = cls()
        for told in state:
            bundles = [read_bundle([decode_envelope(body)]) for body in told["batches"]]
            newcomers._waiting[told["attempt"]] = Newcomer(
                told["attempt"],
                told["since_s"],
                told["host"],
                CellCount.restored(told["cells"]),
                told["heard_s"],
                told["reported"],
                sum(map(_size, bundles)),
                bundles,
            )
        return newcomers


def _size(bundle: Bundle) -> int:
    batch = bundle.batches[0]
    items = len(batch.ranks) + len(batch.events) + len(batch.progress)
    return len(batch.steps) + len(batch.values) + ITEM_BYTES * items


def _without_tables(bundle: Bundle) -> Bundle:
    bare = msgspec.structs.replace(bundle.batches[0], steps=msgspec.Raw(), values=msgspec.Raw(), progress=())
    return read_bundle([bare])
