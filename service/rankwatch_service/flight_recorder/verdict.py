"""Who a hang waits for: ranks that did not launch a collective that others of their group wait in. Pure.

A rank that waits may itself be waited for: in another group, or for a message. So the wait is followed to the ranks
that wait for nobody.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rankwatch_service.flight_recorder.record import FlightEntry, RankDump

_MESSAGE: Final = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)")
_UNEVEN: Final = re.compile(r":(alltoall|all_to_all|allgather|all_gather|gather|scatter|broadcast|barrier)(_v|v)?$")
"""Collectives whose ranks may have different sizes; not their forms for one flat tensor (`_all_gather_base`)."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A collective that some ranks of its group have launched and others have not."""

    group: str
    sequence: int
    operation: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    created_ns: int
    """When the first rank launched it."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A collective that ranks have launched in different forms."""

    group: str
    sequence: int
    usual: str
    others: Mapping[int, str]
    """Another operation, size or type, by rank."""


@dataclass(frozen=True, slots=True)
class WaitVerdict:
    """What dumps say of a hang."""

    awaited: tuple[int, ...]
    """The ranks that the others wait for, and that wait for nobody themselves; empty: nobody waits."""
    waiting: tuple[Waiting, ...]
    """In the order in which they were launched."""
    mismatches: tuple[Mismatch, ...]
    without_dump: tuple[int, ...]
    """Ranks of the groups that gave no dump; they count as ranks that have launched nothing."""


def judge(dumps: Sequence[RankDump]) -> WaitVerdict:
    """Find out who the others wait for."""
    members = {name: ranks for dump in dumps for name, ranks in dump.members.items()}
    told = {dump.rank for dump in dumps}
    launched: dict[tuple[str, int], dict[int, FlightEntry]] = defaultdict(dict)
    newest: dict[tuple[str, int], int] = {}
    for dump in dumps:
        for entry in dump.entries:
            if not entry.is_message:
                launched[entry.group, entry.sequence][dump.rank] = entry
                newest[entry.group, dump.rank] = max(newest.get((entry.group, dump.rank), -1), entry.sequence)
    waiting: list[Waiting] = []
    mismatches: list[Mismatch] = []
    waits_for: dict[int, set[int]] = defaultdict(set)
    for (group, sequence), entries in launched.items():
        if differs := _mismatch(entries, sequence):
            mismatches.append(differs)
        open_on = sorted(rank for rank, entry in entries.items() if not entry.is_done)
        # A rank whose newest number is higher has launched this one too: its ring holds it no more.
        missing = [
            rank for rank in members.get(group, ()) if rank not in entries and newest.get((group, rank), -1) < sequence
        ]
        if not (open_on and missing):
            continue
        first = min(entries.values(), key=lambda entry: entry.created_ns)
        waiting.append(
            Waiting(first.group_text, sequence, first.operation, tuple(open_on), tuple(missing), first.created_ns)
        )
        for rank in open_on:
            waits_for[rank].update(missing)
    _follow_messages(dumps, members, waits_for)
    everybody = {rank for ranks in members.values() for rank in ranks}
    waiting.sort(key=lambda one: one.created_ns)
    return WaitVerdict(
        _awaited(waits_for, waiting),
        tuple(waiting),
        tuple(sorted(mismatches, key=lambda one: (one.group, one.sequence))),
        tuple(sorted(everybody - told)),
    )


def _awaited(waits_for: Mapping[int, set[int]], waiting: Sequence[Waiting]) -> tuple[int, ...]:
    awaited = {rank for ranks in waits_for.values() for rank in ranks}
    free = sorted(rank for rank in awaited if not waits_for.get(rank))
    # Where each of them waits for another one, the first collective that was left out began it.
    return tuple(free) if free or not waiting else waiting[0].missing


def _follow_messages(
    dumps: Sequence[RankDump], members: Mapping[str, tuple[int, ...]], waits_for: dict[int, set[int]]
) -> None:
    """Add the waits for messages whose other end has not been launched.

    Sends and receives between two ranks are counted, done or not. Where one ring reaches further back than the other,
    an open message may count although its other end was launched.
    """
    opened: Counter[tuple[str, str, int, int]] = Counter()
    launched: Counter[tuple[str, str, int, int]] = Counter()
    for dump in dumps:
        for entry in dump.entries:
            found = _MESSAGE.search(entry.operation) if entry.is_message else None
            ranks = members.get(entry.group, ())
            if found is None or max(int(found[2]), int(found[3])) >= len(ranks):
                continue
            end = entry.group, found[1], ranks[int(found[2])], ranks[int(found[3])]
            launched[end] += 1
            opened[end] += 0 if entry.is_done else 1
    for (group, way, own, other), count in opened.items():
        opposite = group, "recv" if way == "send" else "send", other, own
        if count and launched[group, way, own, other] > launched[opposite]:
            waits_for[own].add(other)


def _mismatch(entries: Mapping[int, FlightEntry], sequence: int) -> Mismatch | None:
    first = next(iter(entries.values()))
    names = Counter(entry.operation for entry in entries.values())
    uneven = len(names) == 1 and _UNEVEN.search(first.operation) is not None
    forms = {rank: (entry.operation,) if uneven else entry.form for rank, entry in entries.items()}
    counts = Counter(forms.values())
    if len(counts) == 1:
        return None
    usual = counts.most_common(1)[0][0]
    others = {rank: " ".join(map(str, form)) for rank, form in sorted(forms.items()) if form != usual}
    return Mismatch(first.group_text, sequence, " ".join(map(str, usual)), others)
