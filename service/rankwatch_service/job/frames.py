"""Frames of one family of one attempt: rows of many ranks' messages become one array of each metric for each step.

A frame closes when every expected rank has reported, or when it is late; frames close in step order, once. After that
its missing values are unknown, and what still comes for it changes nothing. Pure: time is the stream's, handed in.

The rows of many batches can be put in together where it is certain that the outcome is that of one after the other;
it costs a tenth.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rankwatch_detectors.base import Frame, Ints
from rankwatch_service.job.open_frame import Chosen, OpenFrame
from rankwatch_service.telemetry.columns import Records

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

Plan = list[tuple[int, Chosen]]
"""Steps in ascending order, and which rows belong to each."""


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
        self._open: dict[int, OpenFrame] = {}
        self._steps: list[int] = []
        self._late_frames: list[Frame] = []
        self._waited_for = 0
        self._misses = np.zeros(world_size, dtype=np.int64)
        self._gone = np.zeros(world_size, dtype=bool)
        self._streak: NDArray[np.uint8] = np.zeros((0, world_size), dtype=np.uint8)
        self._expect()

    def add(self, rows: Records, now_s: float) -> None:
        """Put one batch's rows into their frames. Repeated and late rows, unknown ranks, too many names are counted."""
        if len(rows.step) == 0:
            return
        known = rows.rank < self._ranks
        if not known.all():
            self.counts["rank"] += int((~known).sum())
            rows = rows.rows(np.flatnonzero(known))
            if len(rows.step) == 0:
                return
        places = self._places(rows.names)
        for step, chosen in _by_step(rows.step):
            if step > self.last_closed:
                self._put(self._frame(step, now_s), rows, chosen, places)
            else:
                self.counts["late"] += len(rows.rank[chosen])
                frame = OpenFrame.empty(step, now_s, len(self._names), self._ranks)
                self._put(frame, rows, chosen, places)
                self._late_frames.append(frame.closed(self.attempt, self.family, self._names, now_s, late=True))

    def plan(self, rows: Records, now_s: float) -> Plan | None:
        """How the rows of several batches can be put in together, with the outcome of one batch after the other.

        They can where every row is the first of its rank for an open or a new step, from a rank that is waited for,
        and frames close by being complete only: then `next_complete` tells by which batch. Changes nothing.

        Returns:
            None where the outcome might be another.
        """
        if len(rows.step) == 0:
            return []
        if int(rows.step.min()) <= self.last_closed or int(rows.rank.max()) >= self._ranks:
            return None
        if self._expected_count < self._ranks and not self._expected[rows.rank].all():
            return None
        if any(now_s - frame.opened_s >= LATE_S for frame in self._open.values()):
            return None
        plan = _in_order(rows.step, rows.rank, self._ranks)
        if plan is None:
            return None
        names = len(self._names) + sum(name not in self._index for name in rows.names)
        frames = len(self._steps) + sum(step not in self._open for step, _ in plan)
        if names > NAMES_MAX or self._too_many(frames, names):
            return None
        for step, chosen in plan:
            frame = self._open.get(step)
            if frame is not None and frame.reported[rows.rank[chosen]].any():
                return None
        return plan

    def add_together(self, plan: Plan, rows: Records, batch: Ints, now_s: float) -> None:
        """Put the rows of several batches into their frames.

        Args:
            plan: what `plan` gave for these rows.
            rows: of all batches.
            batch: the number of each row's batch, ascending.
            now_s: stream time.
        """
        places, self._waited_for = self._places(rows.names), 0
        for frame in self._open.values():
            frame.newest = 0
        for step, chosen in plan:
            frame = self._frame(step, now_s)
            frame.add(rows, chosen, places)
            frame.newest = int(batch[chosen].max())

    def late_frames(self) -> list[Frame]:
        """Rows that came after their frame had closed, as frames of their own; each is returned once."""
        late, self._late_frames = self._late_frames, []
        return late

    def ready(self, now_s: float, step_time_s: float | None) -> list[Frame]:
        """Close and return, in step order, the frames that are complete or late."""
        closed: list[Frame] = []
        while self._steps:
            head = self._open[self._steps[0]]
            if not self._complete(head):
                full = self._too_many(len(self._steps), len(self._names))
                if not full and not self._late(head, now_s, step_time_s):
                    break
                self.counts["pushed" if full else "incomplete"] += 1
            closed += self._close_head(now_s)
        return closed

    def next_complete(self) -> int | None:
        """By which of the batches last put in together the oldest open frame became complete; None if it is not."""
        if not self._steps or not self._complete(head := self._open[self._steps[0]]):
            return None
        # Complete before the one before it, it had to wait for that.
        self._waited_for = max(self._waited_for, head.newest)
        return self._waited_for

    def close_next(self, now_s: float) -> list[Frame]:
        """Close and return the oldest open frame."""
        return self._close_head(now_s)

    def flush(self, now_s: float) -> list[Frame]:
        """Close and return every open frame as it is: the attempt is over."""
        closed: list[Frame] = []
        while self._steps:
            closed += self._close_head(now_s)
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
            frame.resize(more)
        self._expect()

    # ---- filling ---------------------------------------------------------------------------------------------------

    def _places(self, names: Sequence[str]) -> NDArray[np.intp]:
        """The number of each of these metrics in a frame; -1 where there is no more room for names."""
        for name in names:
            if name not in self._index and len(self._names) < NAMES_MAX:
                self._index[name] = len(self._names)
                self._names.append(name)
        if len(self._names) > len(self._streak):
            more = len(self._names) - len(self._streak)
            self._streak = np.pad(self._streak, ((0, more), (0, 0)))
        return np.array([self._index.get(name, -1) for name in names], dtype=np.intp)

    def _frame(self, step: int, now_s: float) -> OpenFrame:
        frame = self._open.get(step)
        if frame is None:
            frame = self._open[step] = OpenFrame.empty(step, now_s, len(self._names), self._ranks)
            insort(self._steps, step)
        else:
            frame.widen(len(self._names))
        return frame

    def _put(self, frame: OpenFrame, rows: Records, chosen: Chosen, places: NDArray[np.intp]) -> None:
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
                chosen = np.arange(len(rows.rank))[chosen][fresh]
            if fresh.any():
                self._count_names(places, int(fresh.sum()))
                frame.add(rows, chosen, places)
        else:
            # Several records may add different values for the same rank and step: one after the other.
            these = np.arange(len(rows.rank))[chosen]
            for index in _one_by_one(ranks):
                self._count_names(places, len(index))
                frame.merge(rows, these[index], places)

    def _count_names(self, places: NDArray[np.intp], ranks: int) -> None:
        """Count the values that are left out because their names have no place."""
        left_out = int(np.count_nonzero(places < 0))
        if left_out:
            self.counts["names"] += left_out * ranks

    # ---- closing ---------------------------------------------------------------------------------------------------

    def _expect(self) -> None:
        self._expected = ~self._gone & (self._misses < MISSES_MAX)
        self._expected_count = int(np.count_nonzero(self._expected))

    def _complete(self, frame: OpenFrame) -> bool:
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
        frame_bytes = max(names * self._ranks * 9, 1)
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


def _by_step(steps: Ints) -> Plan:
    """Rows of each step, in step order; rows keep their order."""
    low = int(steps.min())
    since = steps - low
    if not since.any():
        return [(low, slice(None))]
    # numpy sorts two bytes by counting, eight by comparing.
    narrow = since.astype(np.uint16) if int(since.max()) < 2**16 else since
    order = np.argsort(narrow, kind="stable")
    return _cut(steps, order)


def _in_order(steps: Ints, ranks: Ints, world_size: int) -> Plan | None:
    """Rows of each step, in step order, each step's by rank; None where a rank stands twice in a step."""
    low, high = int(steps.min()), int(steps.max())
    if (high - low + 1) * world_size < 2**31:
        # One number to sort by, as short as possible, is three times faster than two.
        keys = ((steps - low) * world_size + ranks).astype(np.int32)
        order = np.argsort(keys)
        keys = keys[order]
        repeated = keys[1:] == keys[:-1]
    else:
        order = np.lexsort((ranks, steps))
        of_step, of_rank = steps[order], ranks[order]
        repeated = (of_step[1:] == of_step[:-1]) & (of_rank[1:] == of_rank[:-1])
    return None if repeated.any() else _cut(steps, order)


def _cut(steps: Ints, order: NDArray[np.intp]) -> Plan:
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
