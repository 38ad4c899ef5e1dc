"""An open frame: takes rows of single ranks and gives arrays over all ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankwatch_detectors.base import Bools, Floats, Frame, Ints, StepKind
from rankwatch_service.telemetry.columns import Exact, Records

_KINDS: Final = tuple(StepKind)

Chosen = NDArray[np.intp]
"""Indices of rows of a table."""

SPARSE_SHARE: Final = 8
"""Until one of so many ranks has reported, a frame has its rows as they came: whoever sends one rank's rows of a
thousand steps ahead has no arrays over all ranks made for each of them."""


@dataclass(slots=True)
class OpenFrame:
    """One step's values so far. Arrays have one entry for each rank, in the last axis."""

    step: int
    opened_s: float
    names: int
    reported: Bools
    filled: Floats | None = None
    """[name, rank]; the window numbers the names. None while rows wait in `waiting`; `values` puts them there."""
    waiting: list[tuple[Records, Chosen, NDArray[np.intp]]] = field(default_factory=list)
    """What `add` was given, in order."""
    present: Bools | None = None
    """[name, rank]; None, which is the usual case: every rank that has reported has exactly the names in `brought`."""
    brought: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    """Numbers of names, in the order of the rows' columns; meaningful while `present` is None."""
    exact: dict[str, Ints] = field(default_factory=dict)
    exact_present: dict[str, Bools] = field(default_factory=dict)
    count: int = 0
    """Ranks that have reported."""
    kind: int = 0

    @classmethod
    def empty(cls, step: int, opened_s: float, names: int, ranks: int) -> OpenFrame:
        """A frame without rows, with room for this many names and ranks."""
        return cls(step, opened_s, names, np.zeros(ranks, dtype=bool))

    @property
    def values(self) -> Floats:
        """[name, rank]; the window numbers the names."""
        if self.filled is None:
            self.filled = np.zeros((self.names, len(self.reported)))
            waiting, self.waiting = self.waiting, []
            self.reported[:], self.count = False, 0
            for rows, chosen, places in waiting:
                self.add(rows, chosen, places)
        return self.filled

    def widen(self, names: int) -> None:
        """Make room for this many names in all."""
        more = names - self.names
        if more > 0:
            self.names = names
            if self.filled is not None:
                self.filled = np.pad(self.filled, ((0, more), (0, 0)))
            if self.present is not None:
                self.present = np.pad(self.present, ((0, more), (0, 0)))

    def resize(self, more: int) -> None:
        """Make room for this many more ranks."""
        if self.filled is not None:
            self.filled = np.pad(self.filled, ((0, 0), (0, more)))
        self.reported = np.pad(self.reported, (0, more))
        if self.present is not None:
            self.present = np.pad(self.present, ((0, 0), (0, more)))
        self.exact = {name: np.pad(column, (0, more)) for name, column in self.exact.items()}
        self.exact_present = {name: np.pad(column, (0, more)) for name, column in self.exact_present.items()}

    def add(self, rows: Records, chosen: Chosen, places: NDArray[np.intp]) -> None:
        """Add rows of different ranks, none of which has reported yet.

        Args:
            rows: a table.
            chosen: indices of its rows to add.
            places: the number of each of the table's names in this frame; -1: it is left out.
        """
        ranks = rows.rank[chosen]
        if self.filled is None and SPARSE_SHARE * (self.count + len(ranks)) < len(self.reported):
            self.waiting.append((rows, chosen, places))
            self._report(rows, chosen, ranks)
            self.count += len(ranks)
            return
        cells = self.values
        values, present, places = _kept(rows, chosen, places)
        same_names = self.count == 0 or np.array_equal(places, self.brought)
        if self.present is None and (present is not None or not same_names):
            self.present = self.measured()
        at = _span(ranks)
        lines = _span(places)
        if isinstance(lines, slice) or isinstance(at, slice):
            cells[lines, at] = values
        else:
            cells[places[:, None], ranks] = values
        if self.present is None:
            self.brought = places
        else:
            self.present[places[:, None], ranks] = np.True_ if present is None else present
        self._add_exact(rows.exact, chosen, ranks, at)
        self._report(rows, chosen, at)
        self.count += len(ranks)

    def merge(self, rows: Records, chosen: Chosen, places: NDArray[np.intp]) -> None:
        """Merge rows of different ranks into what these ranks have reported. Values that are present stay."""
        ranks, held = rows.rank[chosen], self.values
        values, present, places = _kept(rows, chosen, places)
        if self.present is None:
            self.present = self.measured()
        cells = (places[:, None], ranks)
        here = ~self.present[cells]
        if present is not None:
            here &= present
        held[cells] = np.where(here, values, held[cells])
        self.present[cells] |= here
        self._add_exact(rows.exact, chosen, ranks, ranks)
        self._report(rows, chosen, ranks)
        self.count = int(np.count_nonzero(self.reported))

    def measured(self) -> Bools:
        """[name, rank]: whether there is a value."""
        values = self.values  # first, since it puts in place what `present` and `brought` tell of
        if self.present is not None:
            return self.present
        present = np.zeros(values.shape, dtype=bool)
        present[self.brought] = self.reported
        return present

    def closed(self, attempt: str, family: str, names: Sequence[str], time_s: float, *, late: bool = False) -> Frame:
        """Close the frame as it is. This object must not be used afterwards."""
        # Detectors and series take the arrays without a copy, so nobody may write to them.
        cells = self.values
        for array in (cells, self.reported, *self.exact.values(), *self.exact_present.values()):
            array.flags.writeable = False
        if self.present is None:
            used = sorted(self.brought.tolist()) if self.count else []
            present = {names[index]: self.reported for index in used}
        else:
            self.present.flags.writeable = False
            used = np.flatnonzero(self.present.any(axis=1)).tolist()
            present = {names[index]: self.present[index] for index in used}
        values = {names[index]: cells[index] for index in used}
        with np.errstate(over="ignore", invalid="ignore"):
            # A sum is finite only if all its terms are.
            finite = math.isfinite(np.add.reduce(cells, axis=None))
        kind = _KINDS[self.kind]
        present |= self.exact_present
        return Frame(attempt, family, self.step, kind, time_s, values, present, self.exact, finite, late)

    def _report(self, rows: Records, chosen: Chosen, at: Ints | slice) -> None:
        self.kind = max(self.kind, int(rows.kind[chosen].max()))
        self.reported[at] = True

    def _add_exact(self, exact: Mapping[str, Exact], chosen: Chosen, ranks: Ints, at: Ints | slice) -> None:
        for name, column in exact.items():
            here = None if column.present is None else column.present[chosen]
            if here is not None and not here.any():
                continue
            if name not in self.exact:
                self.exact[name] = np.zeros(len(self.reported), dtype=np.int64)
                self.exact_present[name] = np.zeros(len(self.reported), dtype=bool)
            fresh = ~self.exact_present[name][at]
            if here is not None:
                fresh &= here
            if fresh.all():
                self.exact[name][at] = column.values[chosen]
                self.exact_present[name][at] = True
            else:
                self.exact[name][ranks[fresh]] = column.values[chosen][fresh]
                self.exact_present[name][ranks[fresh]] = True

    # ---- snapshot --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that decides the future: JSON types and arrays."""
        return {
            "step": self.step,
            "opened_s": self.opened_s,
            "values": self.values,
            "present": self.measured(),
            "exact": self.exact,
            "exact_present": self.exact_present,
            "reported": self.reported,
            "kind": self.kind,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> OpenFrame:
        """The frame that gave this state."""
        values = state["values"]
        known = {name: value for name, value in state.items() if name != "values"}
        return cls(**known, names=len(values), filled=values, count=int(np.count_nonzero(state["reported"])))


def _kept(rows: Records, chosen: Chosen, places: NDArray[np.intp]) -> tuple[Floats, Bools | None, NDArray[np.intp]]:
    """Values, presence and places of the chosen rows, without the names beyond the limit."""
    values, present = _columns(rows.values, chosen), None if rows.present is None else _columns(rows.present, chosen)
    if len(places) == 0 or places.min() >= 0:
        return values, present, places
    known = np.flatnonzero(places >= 0)
    return values[known], None if present is None else present[known], places[known]


def _columns(table: NDArray[Any], chosen: Chosen) -> NDArray[Any]:
    return np.take(table, chosen, axis=1)


def _span(indices: NDArray[np.intp] | Ints) -> NDArray[np.intp] | Ints | slice:
    """Consecutive indices as a slice, with which NumPy copies five times faster than with indices."""
    if len(indices) and indices[-1] - indices[0] == len(indices) - 1 and (indices[1:] > indices[:-1]).all():
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices
