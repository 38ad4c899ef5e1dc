"""The owners of a job's ranks, and the attempts that wait to take over. Pure.

Who carries a job's ranks: the agents, or where none has enrolled the hosts, whose batches bring them: infos, rows or
progress of them.

In a job whose agents have enrolled, a rank of the running attempt belongs to the agent that brought it first. Another
agent may bring it only once that one has been silent. Every right follows from the ranks that an agent carries: who
carries none reports nothing of the attempt, does not keep it alive, and lets no other one take over. A newer attempt
takes over when one of those who carry the running one brings it, or when the running one has ended or nobody brings its
ranks any more.

Attempts that wait to take over: somebody brings them who does not carry the running attempt.

Honest ones wait for seconds: the hosts of a restart on other nodes, until those of the attempt before have ended or
fallen silent; the new host of a restart, until another brings the same attempt. One that goes on beside the running
attempt is another job of this name, or a forgery.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankwatch import wire
from rankwatch.signed import host_of
from rankwatch_detectors.base import Ints
from rankwatch_service.job.admission import BundleRefused, CellCount
from rankwatch_service.job.event_owners import OWNERS, Owner, is_of_a_rank
from rankwatch_service.job.topology_state import TopologyState
from rankwatch_service.policy.checkpoint_ledger import Ledger
from rankwatch_service.telemetry.bundle import Bundle, read_bundle
from rankwatch_service.telemetry.envelope import WORLD_SIZE_MAX, Envelope, Reason, decode_envelope

RANK_FREE_S: Final = 10.0
"""Silence of an agent after which another may bring its ranks, as it may enrol in its place."""

ATTEMPT_FREE_S: Final = 5.0
"""Silence of all who carry an attempt after which any other attempt takes over; agents report every second."""

EARLIER_MAX: Final = 4_096
"""Carriers of earlier launches that are remembered: what they still report of these is accepted."""

_NOBODY: Final = -1

AGENTS_MIN: Final = 64
"""Number of owners, or two for each rank if that is more, from which on those without a rank are forgotten."""

AHEAD_MAX: Final = 16
"""Largest step from one attempt number to the next: rollbacks in quick succession skip numbers."""


class Launch(StrEnum):
    """Launch of a bundle, relative to the running attempt."""

    RUNNING = "running"
    EARLIER = "earlier"
    LATER = "later"


@dataclass(frozen=True, slots=True)
class OwnTelemetry:
    """The part of a bundle that its senders may report."""

    bundle: Bundle
    """The bundle without the rest, and with distinct names for hosts of one name."""
    rankless_events: Mapping[tuple[str, str, str], int]
    """Number of events that need a rank, name none and were left out, by host, agent and kind."""
    strange_checkpoints: int
    """Reports left out that a checkpoint is gone, by who saved no part of it: honest where ranks have moved."""


class RankOwners:
    """Which sender owns each rank of the running launch. Memory: 4 bytes for each rank, 100 for each sender."""

    def __init__(self) -> None:
        self.signed = False
        """Whether an agent of this job has enrolled: from then on unsigned batches are forged."""
        self._numbers: dict[str, int] = {}
        self._received_s: list[float] = []
        """When it last brought a rank that it carries, by number."""
        self._ranks: list[int] = []
        """How many ranks it carries, by number."""
        self._of_rank: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._earlier: dict[str, None] = {}
        """Owners of ranks of earlier launches, the newest last."""
        self._host_names = HostNames()

    def begin(self, *, new_launch: bool) -> None:
        """An attempt begins; in a new launch the ranks are others."""
        if new_launch:
            self._begin_anew()
            self._host_names = HostNames()

    def _begin_anew(self) -> None:
        """Nobody carries a rank any more; who did is remembered."""
        for name in self._numbers:
            self._earlier.pop(name, None)
            self._earlier[name] = None
        for name in [*self._earlier][:-EARLIER_MAX]:
            del self._earlier[name]
        self._numbers, self._received_s, self._ranks = {}, [], []
        self._of_rank = np.zeros(0, dtype=np.int32)

    def refusal(self, bundle: Bundle, launch: Launch, topology: TopologyState, now_s: float) -> BundleRefused | None:
        """Why a bundle is forged, or which sender has no rank of its attempt; None if it is accepted. Changes nothing.

        Of several batches also why they must be taken one by one: one of them may decide on a later one.

        Args:
            bundle: of any attempt.
            launch: of its attempt.
            topology: of the running attempt.
            now_s: stream time.
        """
        agents = [batch.agent for batch in bundle.batches]
        if not self.signed:
            if not any(agents):
                return None
            if len(agents) > 1:
                return BundleRefused(Reason.FORGED, "the first signed batch")
        elif not all(agents):
            host = bundle.batches[agents.index("")].host
            why = f"a batch of host {host!r} is not signed, and agents of this job have enrolled"
            return BundleRefused(Reason.FORGED, why)
        named = _named(bundle)
        if self.signed and launch is Launch.RUNNING and (why := self._forgery_reason(bundle, named, now_s)):
            return BundleRefused(Reason.FORGED, why)
        # Of an earlier launch it is enough to name a rank: the host that reports first when it is over is honest.
        brought = named.batches if launch is Launch.EARLIER else named.brought(_world_size(launch, topology))[1]
        bringing = set(brought.tolist())
        for number, batch in enumerate(bundle.batches):
            if number not in bringing and not self.may_report(batch, launch):
                why = f"agent {batch.agent} of host {batch.host!r} has no rank of attempt {batch.attempt}"
                return BundleRefused(Reason.NO_RANK, why)
        return None

    def _forgery_reason(self, bundle: Bundle, named: _Named, now_s: float) -> str:
        """Names a rank that another agent carries; empty if the bundle names none."""
        mine = self._numbers_of(bundle)[named.batches]
        owners = np.append(self._of_rank, np.int32(_NOBODY))[np.minimum(named.ranks, len(self._of_rank))]
        several = len(bundle.batches) > 1
        silent = np.array([now_s - received_s > RANK_FREE_S for received_s in self._received_s] + [not several])
        others = np.flatnonzero((owners != mine) & ~silent[owners])
        if not len(others):
            return ""
        batch, rank = bundle.batches[int(named.batches[others[0]])], int(named.ranks[others[0]])
        return f"agent {batch.agent} of host {batch.host!r} brings rank {rank}, which another agent carries"

    def may_report(self, batch: Envelope, launch: Launch) -> bool:
        """Whether its sender may report on a launch without a rank of it."""
        name = _name(batch)
        return self._carries(name) or (launch is not Launch.RUNNING and name in self._earlier)

    def add(
        self, bundle: Bundle, launch: Launch, topology: TopologyState, ledger: Ledger, now_s: float, *, is_older: bool
    ) -> OwnTelemetry:
        """Accept a bundle that is not refused; arguments as of `refusal`.

        Of an older attempt only events count: who brings them says nothing of the running one.
        """
        if not is_older:
            self._take_ranks(bundle, launch, topology, now_s)
        bundle = self.disambiguate_hosts(bundle, launch, topology)
        return self._own(bundle, launch, ledger) if self.signed else OwnTelemetry(bundle, {}, 0)

    def _take_ranks(self, bundle: Bundle, launch: Launch, topology: TopologyState, now_s: float) -> None:
        if not self.signed and any(batch.agent for batch in bundle.batches):
            self._begin_anew()  # hosts without an agent carry nothing any more
            self.signed = True
        world_size = _world_size(launch, topology)
        ranks, batches = _named(bundle).brought(world_size)
        if not len(ranks):
            return
        for number in np.unique(batches).tolist():
            owner = self._numbers.setdefault(_name(bundle.batches[number]), len(self._numbers))
            self._received_s[owner : owner + 1] = [now_s]
        if world_size is not None and len(self._of_rank) > world_size:  # brought before its size was known
            self._of_rank = self._of_rank[:world_size]
            self._count()
        if missing := max(0, int(ranks.max()) + 1 - len(self._of_rank)):
            self._of_rank = np.pad(self._of_rank, (0, missing), constant_values=_NOBODY)
        mine = self._numbers_of(bundle)[batches]
        if len(self._ranks) < len(self._numbers) or (self._of_rank[ranks] != mine).any():
            self._of_rank[ranks] = mine
            self._count()
        if len(self._numbers) > max(AGENTS_MIN, 2 * len(self._of_rank)):
            self._drop_others()

    def disambiguate_hosts(self, bundle: Bundle, launch: Launch, topology: TopologyState) -> Bundle:
        """A bundle under the names by which its hosts are known."""
        runs = launch is not Launch.EARLIER
        batches = [self._host_names.disambiguate_hosts(batch, topology.ranks_of, runs=runs) for batch in bundle.batches]
        return _with_batches(bundle, batches)

    def _own(self, bundle: Bundle, launch: Launch, ledger: Ledger) -> OwnTelemetry:
        """Remove what its senders may not report.

        From who never carried a rank only events of ranks are taken: how those of an earlier launch ended.
        """
        batches, rankless, strange = list[Envelope](), Counter[tuple[str, str, str]](), 0
        for batch in bundle.batches:
            if not self.may_report(batch, launch):
                events = tuple(filter(is_of_a_rank, batch.events))
                batches.append(msgspec.structs.replace(batch, events=events, devices=(), host_devices=()))
                continue
            own = []
            for event in batch.events:
                if OWNERS.get(event.kind) is Owner.RANK and not is_of_a_rank(event):
                    rankless[batch.host, batch.agent, event.kind] += 1
                elif event.kind == "checkpoint_gone" and not self._has_saved(batch, event, ledger):
                    strange += 1
                else:
                    own.append(event)
            is_whole = len(own) == len(batch.events)
            batches.append(batch if is_whole else msgspec.structs.replace(batch, events=tuple(own)))
        return OwnTelemetry(_with_batches(bundle, batches), rankless, strange)

    def _has_saved(self, batch: Envelope, event: wire.Event, ledger: Ledger) -> bool:
        """Whether the sender of a batch carries a rank that saved a part of the checkpoint that an event names."""
        savers = ledger.savers(event.fields.get("checkpoint"))
        return savers is None or not self.ranks_of(batch).isdisjoint(savers)

    def ranks_of(self, batch: Envelope) -> set[int]:
        """The ranks that the sender of this batch carries."""
        number = self._numbers.get(_name(batch))
        return set() if number is None else set(np.flatnonzero(self._of_rank == number).tolist())

    def has(self, batch: Envelope) -> bool:
        """Whether whoever sent this batch carries a rank of the running attempt."""
        return self._carries(_name(batch))

    def silent(self, now_s: float) -> bool:
        """Whether nobody has brought a rank of the running attempt for `ATTEMPT_FREE_S`."""
        received_s = [received_s for received_s, ranks in zip(self._received_s, self._ranks, strict=True) if ranks]
        return now_s - max(received_s, default=-np.inf) > ATTEMPT_FREE_S

    def _carries(self, name: str) -> bool:
        return name in self._numbers and self._ranks[self._numbers[name]] > 0

    def _numbers_of(self, bundle: Bundle) -> NDArray[np.int32]:
        return np.array([self._numbers.get(_name(batch), _NOBODY) for batch in bundle.batches], dtype=np.int32)

    def _count(self) -> None:
        held = self._of_rank[self._of_rank != _NOBODY]
        self._ranks = np.bincount(held, minlength=len(self._numbers)).tolist()

    def _drop_others(self) -> None:
        """Forget whoever carries no rank any more."""
        kept = [number for number, ranks in enumerate(self._ranks) if ranks]
        names = list(self._numbers)
        new = np.full(len(names) + 1, _NOBODY, dtype=np.int32)  # the last one is of `_NOBODY`
        new[kept] = np.arange(len(kept))
        self._of_rank = new[self._of_rank]
        self._numbers = {names[number]: place for place, number in enumerate(kept)}
        self._received_s = [self._received_s[number] for number in kept]
        self._count()

    def discount_outage(self, seconds: float) -> None:
        """Discount time in which the service could not receive anything."""
        self._received_s = [received_s + seconds for received_s in self._received_s]

    def state(self) -> dict[str, Any]:
        """Everything: JSON types and an array."""
        return {
            "signed": self.signed,
            "names": list(self._numbers),
            "received_s": list(self._received_s),
            "of_rank": self._of_rank,
            "earlier": list(self._earlier),
            "host_names": self._host_names.state(),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> RankOwners:
        """The object that gave this state."""
        owners = cls()
        owners.signed = state["signed"]
        owners._numbers = {name: number for number, name in enumerate(state["names"])}
        owners._received_s, owners._of_rank = list(state["received_s"]), state["of_rank"]
        owners._earlier = dict.fromkeys(state["earlier"])
        owners._host_names = HostNames(state["host_names"])
        owners._count()
        return owners


class HostNames:
    """The names of the hosts of the running launch: of two that report the same, the first keeps it.

    The other is called NAME/ID, so that reports of the two hosts are not mixed up.
    """

    def __init__(self, ids: Mapping[str, str] | None = None) -> None:
        """Know these ids by name."""
        self._ids = dict(ids or {})

    def disambiguate_hosts(self, batch: Envelope, ranks_of: Callable[[str], Sequence[int]], *, runs: bool) -> Envelope:
        """A batch under the name by which its host is known.

        Args:
            batch: of who carries a rank of its launch.
            ranks_of: the ranks of the running attempt on a host.
            runs: it is of the running launch, of which alone the names are.
        """
        mine = host_of(batch.agent)
        if not mine or self._ids.get(batch.host, mine) == mine:
            if mine and runs:
                self._ids[batch.host] = mine
            return batch
        if runs and batch.ranks and {info.rank for info in batch.ranks}.issuperset(ranks_of(batch.host)):
            self._ids[batch.host] = mine  # the other has no rank any more
            return batch
        name = f"{batch.host}/{mine}"
        ranks = tuple(msgspec.structs.replace(info, host=name) for info in batch.ranks)
        return msgspec.structs.replace(batch, host=name, ranks=ranks)

    def state(self) -> dict[str, str]:
        """Everything: the id of a host by its name."""
        return dict(self._ids)


@dataclass(frozen=True, slots=True)
class _Named:
    """The ranks that a bundle names, and the number of the batch of each."""

    ranks: Ints
    batches: Ints
    in_events: int
    """How many of them, the last ones, only events name."""

    def brought(self, world_size: int | None) -> tuple[Ints, Ints]:
        """The ranks that it introduces, or has rows or progress of."""
        end = len(self.ranks) - self.in_events
        ranks, batches = self.ranks[:end], self.batches[:end]
        inside = (ranks >= 0) & (ranks < (WORLD_SIZE_MAX if world_size is None else world_size))
        return ranks[inside], batches[inside]


def _world_size(launch: Launch, topology: TopologyState) -> int | None:
    """Ranks of an attempt; None where they are not known, or it is not of the running launch."""
    return topology.world_size if launch is Launch.RUNNING and topology.has_rank_infos else None


def _with_batches(bundle: Bundle, batches: Sequence[Envelope]) -> Bundle:
    return bundle if batches == list(bundle.batches) else Bundle(batches, bundle.tables)


def _named(bundle: Bundle) -> _Named:
    ranks = [table.rows.rank for table in bundle.tables.values()]
    batches = [table.batch for table in bundle.tables.values()]
    in_events = 0
    for of_events in (False, True):
        for number, batch in enumerate(bundle.batches):
            if of_events:
                named = [event.rank for event in batch.events if event.rank is not None]
                in_events += len(named)
            else:
                named = [info.rank for info in batch.ranks] + [block.rank for block in batch.progress]
            if named:
                ranks.append(np.array(named, dtype=np.int64))
                batches.append(np.full(len(named), number))
    if not ranks:
        return _Named(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0)
    return _Named(np.concatenate(ranks), np.concatenate(batches), in_events)


def _name(batch: Envelope) -> str:
    """The name of a batch's sender. No agent's id equals that of a host: a host's name has no slash."""
    return batch.agent or f"host/{batch.host}"


BESIDE_S: Final = 10.0
"""After this long beside the running attempt, an attempt is reported, and its rows are not kept any more."""

ATTEMPTS_MAX: Final = 8
"""Attempts that wait at a time; the one with the oldest newest message makes room."""

BATCHES_MAX: Final = 4_096
"""Batches of one attempt that wait, as many as of an attempt that starts; later ones are dropped."""

BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes that wait, of one attempt; later batches wait without their tables, and in the end not at all."""

ITEM_BYTES: Final = 512
"""What a rank info, an event or a progress block counts for."""


@dataclass(slots=True)
class PendingAttempt:
    """One attempt that waits."""

    attempt: str
    since_s: float
    host: str
    """The host that reported it first."""
    cells: CellCount
    """Cells of all its bundles, including dropped ones."""
    received_s: float = 0.0
    reported: bool = False
    size: int = 0
    bundles: list[Bundle] = field(default_factory=list)


class PendingAttempts:
    """The attempts that wait. Memory: `ATTEMPTS_MAX` x (`BYTES_MAX` and `BATCHES_MAX` headers)."""

    def __init__(self) -> None:
        self._waiting: dict[str, PendingAttempt] = {}

    def cells(self, attempt: str) -> CellCount | None:
        """The count of an attempt that waits; None if it does not."""
        waiting = self._waiting.get(attempt)
        return waiting.cells if waiting else None

    def add(self, bundle: Bundle, count: CellCount, now_s: float) -> int:
        """Keep a bundle of one batch until its attempt takes over; returns how many batches were dropped instead.

        Args:
            bundle: of an attempt.
            count: for its cells, if it does not wait yet.
            now_s: stream time.
        """
        batch = bundle.batches[0]
        waiting = self._waiting.pop(batch.attempt, None) or PendingAttempt(batch.attempt, now_s, batch.host, count)
        waiting.cells.add(bundle)
        dropped = 0
        if len(self._waiting) >= ATTEMPTS_MAX:
            dropped += len(self._waiting.pop(next(iter(self._waiting))).bundles)
        self._waiting[batch.attempt] = waiting
        waiting.received_s = now_s
        if len(waiting.bundles) >= BATCHES_MAX:
            return dropped + 1
        size = _size(bundle)
        if waiting.reported or waiting.size + size > BYTES_MAX:
            bundle = _without_tables(bundle)
            size = _size(bundle)
            if not (batch.ranks or batch.events) or waiting.size + size > BYTES_MAX:
                return dropped + 1
        waiting.bundles.append(bundle)
        waiting.size += size
        return dropped

    def pop(self, attempt: str) -> list[Bundle]:
        """The bundles of an attempt that takes over, oldest first; nothing of it waits afterwards."""
        waiting = self._waiting.pop(attempt, None)
        return waiting.bundles if waiting else []

    def newest(self) -> str:
        """The attempt with the newest telemetry; empty if none waits."""
        return next(reversed(self._waiting), "")

    def beside(self, now_s: float) -> list[PendingAttempt]:
        """Return attempts that have waited for `BESIDE_S`, each once, and drop their tables."""
        old = [one for one in self._waiting.values() if not one.reported and one.received_s - one.since_s >= BESIDE_S]
        for waiting in old:
            waiting.reported = True
            waiting.bundles = [_without_tables(bundle) for bundle in waiting.bundles]
            waiting.size = sum(map(_size, waiting.bundles))
        for attempt in [name for name, one in self._waiting.items() if now_s - one.received_s > BESIDE_S]:
            del self._waiting[attempt]
        return old

    def state(self) -> list[dict[str, Any]]:
        """Everything: JSON types and bytes."""
        return [
            {
                "attempt": one.attempt,
                "since_s": one.since_s,
                "host": one.host,
                "received_s": one.received_s,
                "reported": one.reported,
                "cells": one.cells.state(),
                "batches": [wire.encode(bundle.batches[0]) for bundle in one.bundles],
            }
            for one in self._waiting.values()
        ]

    @classmethod
    def restored(cls, state: list[Mapping[str, Any]]) -> PendingAttempts:
        """The object that gave this state."""
        pending = cls()
        for saved in state:
            bundles = [read_bundle([decode_envelope(body)]) for body in saved["batches"]]
            pending._waiting[saved["attempt"]] = PendingAttempt(
                saved["attempt"],
                saved["since_s"],
                saved["host"],
                CellCount.restored(saved["cells"]),
                saved["received_s"],
                saved["reported"],
                sum(map(_size, bundles)),
                bundles,
            )
        return pending


def _size(bundle: Bundle) -> int:
    batch = bundle.batches[0]
    items = len(batch.ranks) + len(batch.events) + len(batch.progress)
    return len(batch.steps) + len(batch.values) + ITEM_BYTES * items


def _without_tables(bundle: Bundle) -> Bundle:
    bare = msgspec.structs.replace(bundle.batches[0], steps=msgspec.Raw(), values=msgspec.Raw(), progress=())
    return read_bundle([bare])
