"""Turns rows of single ranks into one array over all ranks for each step and metric. Pure.

A frame closes when every expected rank has reported, or when it is late. Frames close in step order, each once. Values
that are missing then stay unknown, and rows that arrive afterwards do not change the frame.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankwatch_detectors.base import Bools, Floats, Frame, Ints, StepKind
from rankwatch_service.telemetry.bundle import BundleTable
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
    finite: bool | None = None
    """Whether all values are finite; None: not known."""

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
        self.finite = None
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
        self.finite = None
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
        finite = bool(_finite(cells[np.newaxis])[0]) if self.finite is None else self.finite
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


def _finite(cells: Floats) -> Bools:
    """Of each of several [name, rank], whether all its values are known to be finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        # A sum is finite only if all its terms are.
        finite: Bools = np.isfinite(np.add.reduce(cells, axis=(1, 2)))
    return finite


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


LATE_STEPS: Final = 8
LATE_S: Final = 2.0
"""A frame is late after LATE_STEPS steps or LATE_S, whichever is longer."""

LATE_UNKNOWN_S: Final = 10.0
"""Replaces LATE_STEPS while the step time of the job is unknown."""

MISSES_MAX: Final = 16
"""Frames stop waiting for a rank that was missing from this many in a row, until it reports again."""

STREAK: Final = 4
"""A frame waits for a late value of a rank that came in this many frames in a row."""

LEFT_OUT: Final = "device_busy_s"
"""A late value that is never waited for: ranks leave it out in steps that say nothing about their device, and send
others beside it."""

OPEN_MAX: Final = 1_024
OPEN_BYTES_MAX: Final = 256 * 1024 * 1024
"""Limits on the open frames of one family, and on the late frames of one bundle. Beyond either, the oldest open frame
closes as it is and is counted (`pushed`), and further late rows are only counted (`late`). A frame of 16,384 ranks x 16
metrics takes 2.4 MB, so there are at most 108 of them."""

NAMES_MAX: Final = 160
"""Metric names of one family and attempt; values of further names are dropped and counted (`names`)."""

PARTS_MAX: Final = 16
"""Value rows of one rank and step in one bundle, which is enough: 16 rows of 16 values exceed the 64 names of a
recorder."""

FAR_STEPS: Final = 1_024
"""A frame this far ahead with less than half of the ranks has a wrong step number. It is dropped and counted (`far`),
or every later row of the attempt would be late."""


class FrameWindow:
    """The open frames of one family. `counts` counts what was dropped in this attempt, by reason."""

    def __init__(self, attempt: str, family: str, world_size: int) -> None:
        self.attempt = attempt
        self.family = family
        self.counts: Counter[str] = Counter()
        self.last_closed = -1
        self.names_max = NAMES_MAX
        """Metric names that it takes; the allowance of the job may leave room for fewer than `NAMES_MAX`."""
        self._ranks = world_size
        self._names: list[str] = []
        self._index: dict[str, int] = {}
        self._open: dict[int, OpenFrame] = {}
        self._steps: list[int] = []
        self._misses = np.zeros(world_size, dtype=np.int64)
        self._gone = np.zeros(world_size, dtype=bool)
        self._streak: NDArray[np.uint8] = np.zeros((0, world_size), dtype=np.uint8)
        self._expect()

    @property
    def names(self) -> Sequence[str]:
        """The metric names so far."""
        return self._names

    def fits(self, table: BundleTable, now_s: float) -> bool:
        """Whether adding rows of several batches at once and batch by batch has the same outcome. Changes nothing.

        True if every row is the first of its rank in an open or a new frame, every such rank is expected, and frames
        close only because they are complete.
        """
        if len(table) == 0:
            return True
        ranks = table.rows.rank
        if table.repeats or table.by_step[0][0] <= self.last_closed or int(ranks.max()) >= self._ranks:
            return False
        if self._expected_count < self._ranks and not self._expected[ranks].all():
            return False
        if any(now_s - frame.opened_s >= LATE_S for frame in self._open.values()):
            return False
        names = len(self._names) + sum(name not in self._index for name in table.rows.names)
        frames = len(self._steps) + sum(step not in self._open for step, _ in table.by_step)
        if names > NAMES_MAX or self._too_many(frames, names):
            return False
        reported = ((self._open[step].reported, chosen) for step, chosen in table.by_step if step in self._open)
        return not any(before[ranks[chosen]].any() for before, chosen in reported)

    def add(self, table: BundleTable, now_s: float) -> list[Frame]:
        """Add rows to their frames. Repeated and late rows, unknown ranks and names beyond the limit are counted.

        Returns:
            Late frames: the rows that came after their frame had closed, by step.
        """
        table = self._of_known_ranks(table)
        places = self._places(table.rows.names) if len(table) else np.zeros(0, dtype=np.intp)
        if self._is_whole(table, places):
            self._open_whole(table, places, now_s)
            return []
        late: list[Frame] = []
        for step, chosen in table.by_step:
            if step > self.last_closed:
                self._put(self._frame(step, now_s), table, chosen, places)
            else:
                self.counts["late"] += len(chosen)
                if self._too_many(len(late) + 1, len(self._names)):
                    continue
                frame = OpenFrame.empty(step, now_s, len(self._names), self._ranks)
                self._put(frame, table, chosen, places)
                late.append(frame.closed(self.attempt, self.family, self._names, now_s, late=True))
        return late

    def ready(self, now_s: float, step_time_s: float | None, unfinished: Collection[int] = ()) -> Iterator[Frame]:
        """Close, in step order, the frames that are complete or late: each when the one before it has been taken.

        Args:
            now_s: stream time.
            step_time_s: how long a step of this job takes; None if it is not known.
            unfinished: steps of which a later batch of the bundle has rows; frames from the first of them on stay open.
        """
        while self._steps and self._steps[0] not in unfinished:
            head = self._open[self._steps[0]]
            if not self._complete(head):
                full = self._too_many(len(self._steps), len(self._names))
                if not full and not self._late(head, now_s, step_time_s):
                    break
                self.counts["pushed" if full else "incomplete"] += 1
            yield from self._close_head(now_s)

    def flush(self, now_s: float) -> Iterator[Frame]:
        """Close every open frame as it is: the attempt is over."""
        while self._steps:
            yield from self._close_head(now_s)

    def depart(self, rank: int) -> None:
        """Stop waiting for this rank: it will not report again."""
        if rank < self._ranks and not self._gone[rank]:
            self._gone[rank] = True
            self._expect()

    def discount_outage(self, seconds: float) -> None:
        """Discount time in which the service could not receive anything, so that it makes no frame late."""
        for frame in self._open.values():
            frame.opened_s += seconds

    def resize(self, world_size: int) -> None:
        """Enlarge the frames to the ranks of a larger world size; it never shrinks."""
        more = world_size - self._ranks
        assert more >= 0
        if more == 0:
            return
        self._ranks = world_size
        self._misses = np.pad(self._misses, (0, more))
        self._gone = np.pad(self._gone, (0, more))
        self._streak = np.pad(self._streak, ((0, 0), (0, more)))
        for frame in self._open.values():
            frame.resize(more)
        self._expect()

    # ---- filling ---------------------------------------------------------------------------------------------------

    def _of_known_ranks(self, table: BundleTable) -> BundleTable:
        known = table.rows.rank < self._ranks
        if known.all():
            return table
        self.counts["rank"] += int((~known).sum())
        return table.chosen(np.flatnonzero(known))

    def _places(self, names: Sequence[str]) -> NDArray[np.intp]:
        """The row of each metric in a frame's values; -1 for names beyond the limit."""
        for name in names:
            if name not in self._index and len(self._names) < self.names_max:
                self._index[name] = len(self._names)
                self._names.append(name)
        if len(self._names) > len(self._streak):
            more = len(self._names) - len(self._streak)
            self._streak = np.pad(self._streak, ((0, more), (0, 0)))
        return np.array([self._index.get(name, -1) for name in names], dtype=np.intp)

    def _is_whole(self, table: BundleTable, places: NDArray[np.intp]) -> bool:
        """Whether a table has all ranks' rows of each of its steps, which are beyond all open ones: the usual case."""
        if len(table) == 0 or table.repeats or len(table) != self._ranks * len(table.by_step):
            return False
        first, newest = table.by_step[0][0], self._steps[-1] if self._steps else self.last_closed
        return first > newest and not table.rows.exact and (len(places) == 0 or int(places.min()) >= 0)

    def _open_whole(self, table: BundleTable, places: NDArray[np.intp], now_s: float) -> None:
        """Open the frames of all steps of a table at once."""
        rows, steps = table.rows, [step for step, _ in table.by_step]
        shape, order = (len(steps), self._ranks), np.concatenate([chosen for _, chosen in table.by_step])

        def by_step(cells: NDArray[Any]) -> NDArray[Any]:
            filled = np.zeros((shape[0], len(self._names), shape[1]), dtype=cells.dtype)
            filled[:, places] = cells[:, order].reshape(-1, *shape).transpose(1, 0, 2)
            return filled

        values, reported = by_step(rows.values), np.ones(shape, dtype=np.bool_)
        present = [None] * len(steps) if rows.present is None else by_step(rows.present)
        kinds, finite = rows.kind[order].reshape(shape).max(axis=1).tolist(), _finite(values).tolist()
        for at, step in enumerate(steps):
            self._open[step] = OpenFrame(
                step,
                now_s,
                len(self._names),
                reported[at],
                filled=values[at],
                present=present[at],
                brought=places,
                count=self._ranks,
                kind=kinds[at],
                finite=finite[at],
            )
        self._steps += steps

    def _frame(self, step: int, now_s: float) -> OpenFrame:
        frame = self._open.get(step)
        if frame is None:
            frame = self._open[step] = OpenFrame.empty(step, now_s, len(self._names), self._ranks)
            insort(self._steps, step)
        else:
            frame.widen(len(self._names))
        return frame

    def _put(self, frame: OpenFrame, table: BundleTable, chosen: NDArray[np.intp], places: NDArray[np.intp]) -> None:
        rows, ranks = table.rows, table.rows.rank[chosen]
        if not table.repeats and not frame.reported[ranks].any():
            self._count_names(places, len(ranks))
            frame.add(rows, chosen, places)
        elif self.family == "steps":
            # A rank has one row for each step: the first one counts, whichever bundle brings it.
            fresh = ~frame.reported[ranks] & np.append(True, ranks[1:] != ranks[:-1])
            self.counts["repeated"] += int((~fresh).sum())
            if fresh.any():
                self._count_names(places, int(fresh.sum()))
                frame.add(rows, chosen[fresh], places)
        else:
            # Several rows of a rank and step may bring different values, so they are merged in order.
            for index in _one_by_one(ranks):
                self._count_names(places, len(index))
                frame.merge(rows, chosen[index], places)

    def _count_names(self, places: NDArray[np.intp], ranks: int) -> None:
        """Count the values that are dropped because there are too many names."""
        left_out = int(np.count_nonzero(places < 0))
        if left_out:
            self.counts["names"] += left_out * ranks

    # ---- closing ---------------------------------------------------------------------------------------------------

    def _expect(self) -> None:
        self._expected = ~self._gone & (self._misses < MISSES_MAX)
        self._expected_count = int(np.count_nonzero(self._expected))

    def _complete(self, frame: OpenFrame) -> bool:
        # Counts decide most frames without a look at each rank.
        if frame.count < self._expected_count:
            return False
        if frame.count < self._ranks and not bool(np.all(frame.reported | ~self._expected)):
            return False
        if self.family == "steps" or frame.count == 0:
            return True
        frame.widen(len(self._names))
        return not bool(np.any((self._streak >= STREAK) & ~frame.measured() & self._expected))

    def _late(self, frame: OpenFrame, now_s: float, step_time_s: float | None) -> bool:
        age_s = now_s - frame.opened_s
        if age_s < LATE_S:
            return False
        limit_s = LATE_UNKNOWN_S if step_time_s is None else LATE_STEPS * step_time_s
        return len(self._steps) > LATE_STEPS or age_s >= limit_s

    def _too_many(self, frames: int, names: int) -> bool:
        frame_bytes = max(names * self._ranks * 9, 1)  # 8 bytes for a value and 1 for its presence
        return frames > min(OPEN_MAX, max(OPEN_BYTES_MAX // frame_bytes, LATE_STEPS))

    def _close_head(self, now_s: float) -> list[Frame]:
        frame = self._open.pop(self._steps.pop(0))
        far = self.last_closed >= 0 and frame.step > self.last_closed + FAR_STEPS
        if far and 2 * frame.count < self._expected_count:
            self.counts["far"] += frame.count
            return []
        self.last_closed = frame.step
        if frame.count < self._ranks or self._misses.any():
            self._misses = np.where(frame.reported, 0, self._misses + 1)
            self._expect()
        if self.family != "steps":
            size = len(frame.values)
            self._streak[size:] = 0
            self._streak[:size] = np.where(frame.measured(), np.minimum(self._streak[:size], STREAK) + 1, 0)
            if (left_out := self._index.get(LEFT_OUT)) is not None:
                self._streak[left_out] = 0
        return [frame.closed(self.attempt, self.family, self._names, now_s)]

    # ---- snapshot --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that decides the future: JSON types and arrays."""
        for frame in self._open.values():
            frame.widen(len(self._names))
        return {
            "attempt": self.attempt,
            "family": self.family,
            "ranks": self._ranks,
            "counts": dict(self.counts),
            "last_closed": self.last_closed,
            "names": self._names,
            "misses": self._misses,
            "gone": self._gone,
            "streak": self._streak,
            "open": [self._open[step].state() for step in self._steps],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> FrameWindow:
        """The window that gave this state."""
        window = cls(state["attempt"], state["family"], state["ranks"])
        window.counts.update(state["counts"])
        window.last_closed = state["last_closed"]
        window._names = list(state["names"])
        window._index = {name: index for index, name in enumerate(window._names)}
        window._misses, window._gone, window._streak = state["misses"], state["gone"], state["streak"]
        for saved in state["open"]:
            frame = OpenFrame.restored(saved)
            window._open[frame.step] = frame
            window._steps.append(frame.step)
        window._expect()
        return window


def _one_by_one(ranks: Ints) -> list[NDArray[np.intp]]:
    """Split row indices into parts in which each rank occurs once; earlier rows are in earlier parts."""
    rest: NDArray[np.intp] = np.arange(len(ranks))
    parts: list[NDArray[np.intp]] = []
    while len(rest) and len(parts) < PARTS_MAX:
        first = np.sort(np.unique(ranks[rest], return_index=True)[1])
        parts.append(rest[first])
        rest = np.delete(rest, first)
    return parts
