"""What a job answers to a bundle, and how much state it may have for it, in cells: ranks times metrics. Pure.

What a job declares costs nothing; what it makes the stream remember does. A cell takes about 1 KB, most of it the 128
steps of its chart that are open; a rank by itself takes as much as `RANK_CELLS` cells. A job is allowed the cells of an
attempt when one of its records needs them, and keeps them until the next attempt or until it is idle. The decision
depends on what other jobs of the partition have at that moment, so it is stored (`Grant`), and a replay repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rankwatch_service.job.frames import NAMES_MAX
from rankwatch_service.telemetry.bundle import FAMILIES, Bundle
from rankwatch_service.telemetry.envelope import Reason

RANK_CELLS: Final = 4
"""Cells that a rank counts for besides its metrics: infos, progress and the state of detectors are 3 to 4 KB."""

CELLS_MAX: Final = 3 * 1024 * 1024
"""Cells of all jobs of one partition: 3 GB, or nine jobs of 16,384 ranks and 16 metrics each."""

SMALL_CELLS: Final = 2_048
"""A job of at most so many cells is small: 64 ranks with 28 metrics."""

RESERVED_CELLS: Final = 512 * 1024
"""Cells that only small jobs may have: 256 of them, whatever large jobs have taken. Large ones have the others, which
suffices for one job of 131,072 ranks and 16 metrics."""

REPORTING_SHARE: Final = 64
"""A job counts as reporting once one of so many of its ranks has reported: of 16,384 ranks on hosts of eight, 32
hosts."""

SILENT_CELLS_MAX: Final = 512 * 1024
"""Cells of all larger jobs together that are not reporting yet: the first host of 131,072 ranks may introduce itself,
and a job of 16,384 ranks may be watched on one of them alone."""


CELL_CHARS: Final = 1_024
"""Characters of parameter names that count as one cell."""


@dataclass(frozen=True, slots=True)
class BundleAccepted:
    """The bundle was accepted."""


@dataclass(frozen=True, slots=True)
class BundleSplit:
    """Its batches must be added one by one for the right outcome; nothing of it was accepted."""


@dataclass(frozen=True, slots=True)
class BundleRefused:
    """A batch was not accepted, and never will be."""

    reason: Reason
    detail: str


Admission = BundleAccepted | BundleSplit | BundleRefused


@dataclass(frozen=True, slots=True)
class CellDemand:
    """The cells that a job is allowed, or would have with a bundle added."""

    cells: int
    is_reporting: bool = True
    """Whether enough of its ranks have reported (`REPORTING_SHARE`)."""

    @property
    def is_small(self) -> bool:
        """Whether the job is small."""
        return self.cells <= SMALL_CELLS


NOTHING: Final = CellDemand(0)
"""Demand of a bundle that needs no state."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A job was allowed more cells, at one of its records."""

    job: str
    position: int
    """Position of the record."""
    cells: int


@dataclass(frozen=True, slots=True)
class CellQuota:
    """What a job may have at one of its records: what other jobs leave it or, in a replay, what it was granted then."""

    job: str
    position: int
    """Position of the record."""
    others: Callable[[], Iterable[CellDemand]] = tuple
    """What the other jobs of the partition are allowed; called only when this one demands more than it is."""
    replayed_cells: int | None = None
    """In a replay: the cells that were granted at this record, 0 if none were."""

    def grant(self, demand: CellDemand) -> Grant | None:
        """The grant of a demand; None if the job may not have that."""
        if self.replayed_cells is None:
            return Grant(self.job, self.position, demand.cells) if has_room(demand, self.others()) else None
        return Grant(self.job, self.position, self.replayed_cells) if self.replayed_cells >= demand.cells else None


@dataclass(frozen=True, slots=True)
class LimitExceeded:
    """A limit that a job would exceed."""

    what: str
    """There may be only so many of what."""
    limit: int
    """How many, of all jobs of the partition together."""
    figure: int
    """How many the job alone would have."""

    def __str__(self) -> str:
        return f"{self.figure} {self.what}; all jobs of a partition may have {self.limit}"


def has_room(demand: CellDemand, others: Iterable[CellDemand]) -> bool:
    """Whether a job may have what it demands beside what the other jobs of the partition are allowed."""
    allowed = list(others)
    limit = CELLS_MAX if demand.is_small else CELLS_MAX - RESERVED_CELLS
    if demand.cells + sum(other.cells for other in allowed) > limit:
        return False
    if demand.is_small or demand.is_reporting:
        return True
    silent = sum(other.cells for other in allowed if not (other.is_small or other.is_reporting))
    return demand.cells + silent <= SILENT_CELLS_MAX


def limit_of(demand: CellDemand) -> LimitExceeded:
    """The limit for a job, by its size, and by whether it counts as reporting."""
    if demand.is_small:
        return LimitExceeded("cells (ranks times metrics)", CELLS_MAX, demand.cells)
    if demand.is_reporting:
        what = "cells (ranks times metrics) of large jobs"
        return LimitExceeded(what, CELLS_MAX - RESERVED_CELLS, demand.cells)
    what = "cells (ranks times metrics) of jobs of which few ranks have reported"
    return LimitExceeded(what, SILENT_CELLS_MAX, demand.cells)


class CellCount:
    """Counts the cells of one attempt: its world size, metric names and, while they are few, the ranks that have
    reported.

    Memory: the names, and one of `HEARD_SHARE` ranks.
    """

    def __init__(self) -> None:
        self._declared = 0
        """The world size that infos declare; 0: none has come."""
        self._ranks = 0
        """World size."""
        self._extra = 0
        self._names: dict[str, set[str]] = {family: set() for family in FAMILIES}
        self._reported: set[int] = set()

    def next_attempt(self) -> CellCount:
        """The count of the next attempt of the same launch: its ranks are the same."""
        after = CellCount()
        after._declared, after._ranks, after._extra = self._declared, self._ranks, self._extra
        after._reported = set(self._reported)
        return after

    @property
    def is_reporting(self) -> bool:
        """Whether enough of its ranks have reported."""
        return REPORTING_SHARE * len(self._reported) >= self._ranks

    def names(self, family: str) -> int:
        """How many metric names of a family there are."""
        return len(self._names[family])

    def demand(self, bundle: Bundle) -> CellDemand:
        """The demand of the attempt with this bundle added. Changes nothing."""
        _, ranks, extra = self._sizes(bundle)
        names = 0
        for family, known in self._names.items():
            table = bundle.tables.get(family)
            fresh = 0 if table is None else sum(name not in known for name in table.rows.names)
            names += min(len(known) + fresh, NAMES_MAX)
        has_reported = len(self._reported)
        if REPORTING_SHARE * has_reported < ranks:
            has_reported = len(self._reported.union(_ranks(bundle)))
        return CellDemand(ranks * (RANK_CELLS + names) + extra, REPORTING_SHARE * has_reported >= ranks)

    def add(self, bundle: Bundle) -> None:
        """Count an accepted bundle."""
        self._declared, self._ranks, self._extra = self._sizes(bundle)
        for family, table in bundle.tables.items():
            self._names[family].update(table.rows.names)
        if not self.is_reporting:
            self._reported.update(_ranks(bundle))

    def _sizes(self, bundle: Bundle) -> tuple[int, int, int]:
        """Declared and actual world size, and cells of parameter names, with this bundle."""
        declared, extra = self._declared, self._extra
        for batch in bundle.batches:
            for info in batch.ranks:
                declared = declared or info.world_size
                extra = extra or sum(map(len, info.parameters)) // CELL_CHARS
        return declared, max(declared, self._ranks, 0 if declared else highest_rank(bundle) + 1), extra

    # ---- snapshot --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            "declared": self._declared,
            "ranks": self._ranks,
            "extra": self._extra,
            "names": {family: sorted(names) for family, names in self._names.items()},
            "has_reported": sorted(self._reported),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> CellCount:
        """The count that gave this state."""
        count = cls()
        count._declared, count._ranks, count._extra = state["declared"], state["ranks"], state["extra"]
        count._names = {family: set(state["names"][family]) for family in FAMILIES}
        count._reported = set(state["has_reported"])
        return count


def highest_rank(bundle: Bundle) -> int:
    """The highest rank with a row or a progress block; -1 if there is none."""
    highest = max((block.rank for batch in bundle.batches for block in batch.progress), default=-1)
    for table in bundle.tables.values():
        highest = max(highest, int(table.rows.rank.max()) if len(table) else -1)
    return highest


def _ranks(bundle: Bundle) -> Iterator[int]:
    for batch in bundle.batches:
        yield from (info.rank for info in batch.ranks)
        yield from (block.rank for block in batch.progress)
    for table in bundle.tables.values():
        yield from table.rows.rank.tolist()
