"""Frames of one family of one attempt: rows of many ranks' messages become one array of each metric for each step.

A frame closes when every expected rank has reported, or when it is late; frames close in step order, once. After that
its missing values are unknown, and what still comes for it changes nothing. Pure: time is the stream's, handed in.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankwatch_detectors.base import Bools, Floats, Frame, Ints, StepKind
from rankwatch_service.stream.columns import Records

LATE_STEPS: Final = 8
LATE_S: Final = 2.0
"""A frame is late after LATE_STEPS steps or LATE_S, whichever is longer."""

LATE_UNKNOWN_S: Final = 10.0
"""The same while nobody knows how long a step of this job takes and no newer ones come."""

MISSES_MAX: Final = 16
"""A rank that was missing from so many frames in a row is not waited for until it reports again."""

STREAK: Final = 4
"""A late value that a rank sent in so many frames in a row is waited for in the next."""

OPEN_MAX: Final = 1_024
OPEN_BYTES_MAX: Final = 256 * 1024 * 1024
"""Open frames of one family, whichever is less: beyond it the oldest closes as it is (`pushed`). 16,384 ranks x 16
metrics are 2.4 MB a frame, so 108 frames."""

NAMES_MAX: Final = 160
"""Metric names of one family and attempt; values of further ones are dropped and counted (`names`)."""

PARTS_MAX: Final = 16
"""Values records for one rank and step in one message: 16 x 16 values are more than a recorder has names for."""

FAR_STEPS: Final = 1_024
"""A step so far ahead, reported by less than half of the ranks, is a wrong number, not progress: dropped (`far`)."""

_KINDS: Final = tuple(StepKind)


@dataclass(slots=True)
class _Open:
    """A frame that is being filled."""

    step: int
    opened_s: float
    values: Floats
    present: Bools
    exact: dict[str, Ints]
    exact_present: dict[str, Bools]
    reported: Bools
    count: int = 0
    kind: int = 0


class FrameWindow:
    """The open frames of one family. `counts` says what was dropped and why, since the attempt began."""

    def __init__(self, attempt: str, family: str, world_size: int) -> None:
        self.attempt = attempt
        self.family = family
        self.counts: Counter[str] = Counter()
        self.last_closed = -1
        self._ranks = world_size
        self._names: list[str] = []
        self._index: dict[str, int] = {}
        self._open: dict[int, _Open] = {}
        self._steps: list[int] = []
        self._late_frames: list[Frame] = []
        self._misses = np.zeros(world_size, dtype=np.int64)
        self._gone = np.zeros(world_size, dtype=bool)
        self._streak: NDArray[np.uint8] = np.zeros((0, world_size), dtype=np.uint8)
        self._expect()

    def add(self, rows: Records, now_s: float) -> None:
        """Put rows into their frames. Repeated and late rows, unknown ranks and too many names are counted."""
        if len(rows.step) == 0:
            return
        known = rows.rank < self._ranks
        if not known.all():
            self.counts["rank"] += int((~known).sum())
            rows = rows.rows(np.flatnonzero(known))
            if len(rows.step) == 0:
                return
        names = self._positions(rows)
        for step, chosen in _by_step(rows.step):
            if step > self.last_closed:
                self._put(self._frame(step, now_s), rows, chosen, names)
            else:
                self.counts["late"] += len(chosen)
                frame = self._new(step, now_s)
                self._put(frame, rows, chosen, names)
                self._late_frames.append(self._closed(frame, now_s))

    def late_frames(self) -> list[Frame]:
        """Rows that came too late to count, as frames of their own, for the charts; each is returned once."""
        late, self._late_frames = self._late_frames, []
        return late

    def ready(self, now_s: float, step_time_s: float | None) -> list[Frame]:
        """Close and return, in step order, the frames that are complete or late."""
        closed: list[Frame] = []
        while self._steps:
            head = self._open[self._steps[0]]
            if not self._complete(head):
                if not self._late(head, now_s, step_time_s) and not self._full():
                    break
                self.counts["pushed" if self._full() else "incomplete"] += 1
            self._close_head(head, now_s, closed)
        return closed

    def flush(self, now_s: float) -> list[Frame]:
        """Close and return every open frame as it is: the attempt is over."""
        closed: list[Frame] = []
        while self._steps:
            self._close_head(self._open[self._steps[0]], now_s, closed)
        return closed

    def depart(self, rank: int) -> None:
        """This rank will report no more."""
        if rank < self._ranks and not self._gone[rank]:
            self._gone[rank] = True
            self._expect()

    def blind(self, seconds: float) -> None:
        """Nothing could have come for so long, for a reason of ours: it makes no frame late."""
        for frame in self._open.values():
            frame.opened_s += seconds

    def resize(self, world_size: int) -> None:
        """The attempt turned out to have more ranks."""
        more = world_size - self._ranks
        assert more >= 0
        if more == 0:
            return
        self._ranks = world_size
        self._misses = np.pad(self._misses, (0, more))
        self._gone = np.pad(self._gone, (0, more))
        self._streak = np.pad(self._streak, ((0, 0), (0, more)))
        for frame in self._open.values():
            frame.values = np.pad(frame.values, ((0, 0), (0, more)))
            frame.present = np.pad(frame.present, ((0, 0), (0, more)))
            frame.exact = {name: np.pad(column, (0, more)) for name, column in frame.exact.items()}
            frame.exact_present = {name: np.pad(column, (0, more)) for name, column in frame.exact_present.items()}
            frame.reported = np.pad(frame.reported, (0, more))
        self._expect()

    # ---- filling ---------------------------------------------------------------------------------------------------

    def _positions(self, rows: Records) -> NDArray[np.intp]:
        """Where each of the rows' metrics lies in a frame; -1 where there is no more room for names."""
        for name in rows.names:
            if name not in self._index and len(self._names) < NAMES_MAX:
                self._index[name] = len(self._names)
                self._names.append(name)
        if len(self._names) > len(self._streak):
            more = len(self._names) - len(self._streak)
            self._streak = np.pad(self._streak, ((0, more), (0, 0)))
        return np.array([self._index.get(name, -1) for name in rows.names], dtype=np.intp)

    def _frame(self, step: int, now_s: float) -> _Open:
        frame = self._open.get(step)
        if frame is None:
            frame = self._open[step] = self._new(step, now_s)
            insort(self._steps, step)
        elif len(frame.values) < len(self._names):
            more = ((0, len(self._names) - len(frame.values)), (0, 0))
            frame.values, frame.present = np.pad(frame.values, more), np.pad(frame.present, more)
        return frame

    def _new(self, step: int, now_s: float) -> _Open:
        shape = (len(self._names), self._ranks)
        reported = np.zeros(self._ranks, dtype=bool)
        return _Open(step, now_s, np.zeros(shape), np.zeros(shape, dtype=bool), {}, {}, reported)

    def _put(self, frame: _Open, rows: Records, chosen: NDArray[np.intp], names: NDArray[np.intp]) -> None:
        ranks = rows.rank[chosen]
        if self.family == "steps":
            # One record for each rank and step: of several the first one counts.
            fresh = ~frame.reported[ranks]
            if not (np.diff(ranks) > 0).all():
                first = np.zeros(len(ranks), dtype=bool)
                first[np.unique(ranks, return_index=True)[1]] = True
                fresh &= first
            if not fresh.all():
                self.counts["repeated"] += int((~fresh).sum())
                chosen, ranks = chosen[fresh], ranks[fresh]
                if len(chosen) == 0:
                    return
            self._write(frame, rows, chosen, ranks, names, new=True)
        else:
            # Several records may add different values for the same rank and step: one after the other.
            for index in _one_by_one(ranks):
                self._write(frame, rows, chosen[index], ranks[index], names, new=False)
        frame.kind = max(frame.kind, int(rows.kind[chosen].max()))
        frame.reported[ranks] = True
        frame.count = int(np.count_nonzero(frame.reported))

    def _write(
        self, frame: _Open, rows: Records, chosen: NDArray[np.intp], ranks: Ints, names: NDArray[np.intp], new: bool
    ) -> None:
        """Put the chosen rows, each of another rank, into a frame; `new` = nothing of these ranks is there yet."""
        if len(names) and names.min() < 0:
            known = np.flatnonzero(names >= 0)
            self.counts["names"] += (len(names) - len(known)) * len(ranks)
            names = names[known]
            values, present = rows.values[known], None if rows.present is None else rows.present[known]
        else:
            values, present = rows.values, rows.present
        cells = (names[:, None], ranks)
        here = np.True_ if present is None else present[:, chosen]
        if not new:
            here = here & ~frame.present[cells]
            frame.values[cells] = np.where(here, values[:, chosen], frame.values[cells])
            frame.present[cells] |= here
        else:
            frame.values[cells] = values[:, chosen]
            frame.present[cells] = here
        for name, column in rows.exact.items():
            if name not in frame.exact:
                frame.exact[name] = np.zeros(self._ranks, dtype=np.int64)
                frame.exact_present[name] = np.zeros(self._ranks, dtype=bool)
            fresh = ~frame.exact_present[name][ranks]
            if column.present is not None:
                fresh &= column.present[chosen]
            frame.exact[name][ranks[fresh]] = column.values[chosen[fresh]]
            frame.exact_present[name][ranks[fresh]] = True

    # ---- closing ---------------------------------------------------------------------------------------------------

    def _expect(self) -> None:
        self._expected = ~self._gone & (self._misses < MISSES_MAX)
        self._expected_count = int(np.count_nonzero(self._expected))

    def _complete(self, frame: _Open) -> bool:
        if frame.count < self._expected_count or not bool(np.all(frame.reported | ~self._expected)):
            return False
        if self.family == "steps" or frame.count == 0:
            return True
        usual = self._streak[: len(frame.present)] >= STREAK
        return not bool(np.any(usual & ~frame.present & self._expected))

    def _late(self, frame: _Open, now_s: float, step_time_s: float | None) -> bool:
        age_s = now_s - frame.opened_s
        if age_s < LATE_S:
            return False
        limit_s = LATE_UNKNOWN_S if step_time_s is None else LATE_STEPS * step_time_s
        return len(self._steps) > LATE_STEPS or age_s >= limit_s

    def _full(self) -> bool:
        frame_bytes = max(len(self._names) * self._ranks * 9, 1)
        return len(self._steps) > min(OPEN_MAX, max(OPEN_BYTES_MAX // frame_bytes, LATE_STEPS))

    def _close_head(self, frame: _Open, now_s: float, closed: list[Frame]) -> None:
        del self._open[self._steps.pop(0)]
        far = self.last_closed >= 0 and frame.step > self.last_closed + FAR_STEPS
        if far and 2 * frame.count < self._expected_count:
            self.counts["far"] += frame.count
            return
        self.last_closed = frame.step
        if frame.count < self._ranks or self._misses.any():
            self._misses = np.where(frame.reported, 0, self._misses + 1)
            self._expect()
        if self.family != "steps":
            size = len(frame.present)
            self._streak[size:] = 0
            self._streak[:size] = np.where(frame.present, np.minimum(self._streak[:size], STREAK) + 1, 0)
        closed.append(self._closed(frame, now_s))

    def _closed(self, frame: _Open, now_s: float) -> Frame:
        for array in (frame.values, frame.present, *frame.exact.values(), *frame.exact_present.values()):
            array.flags.writeable = False
        used = np.flatnonzero(frame.present.any(axis=1))
        values = {self._names[index]: frame.values[index] for index in used}
        present = {self._names[index]: frame.present[index] for index in used} | frame.exact_present
        kind = _KINDS[frame.kind]
        return Frame(self.attempt, self.family, frame.step, kind, now_s, values, present, frame.exact)

    # ---- snapshot --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that decides the future: JSON types and arrays."""
        frames = [
            {
                "step": frame.step,
                "opened_s": frame.opened_s,
                "values": frame.values,
                "present": frame.present,
                "exact": frame.exact,
                "exact_present": frame.exact_present,
                "reported": frame.reported,
                "kind": frame.kind,
            }
            for frame in (self._open[step] for step in self._steps)
        ]
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
            "open": frames,
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
            frame = _Open(**saved, count=int(np.count_nonzero(saved["reported"])))
            window._open[frame.step] = frame
            window._steps.append(frame.step)
        window._expect()
        return window


def _by_step(steps: Ints) -> list[tuple[int, NDArray[np.intp]]]:
    """Rows of each step, in step order; rows keep their order."""
    if (steps == steps[0]).all():
        return [(int(steps[0]), np.arange(len(steps)))]
    order = np.argsort(steps, kind="stable")
    found = steps[order]
    bounds = [0, *(np.flatnonzero(found[1:] != found[:-1]) + 1).tolist(), len(found)]
    return [(int(found[low]), order[low:high]) for low, high in pairwise(bounds)]


def _one_by_one(ranks: Ints) -> list[NDArray[np.intp]]:
    """Split indices so that no part names a rank twice; earlier rows lie in earlier parts."""
    rest: NDArray[np.intp] = np.arange(len(ranks))
    parts: list[NDArray[np.intp]] = []
    while len(rest) and len(parts) < PARTS_MAX:
        first = np.sort(np.unique(ranks[rest], return_index=True)[1])
        parts.append(rest[first])
        rest = np.delete(rest, first)
    return parts
