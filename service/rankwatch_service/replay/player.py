"""Turns rows into the observations that the stream would have made: attempts, frames, and a tick each second.

Frames are assembled as the stream assembles them. Each tick carries the presence that the rows imply: a rank that has
written its row of a step is in the next one, for as long as no further row comes. One whose rows stop while its peers
go on has ended. A row of an evaluation or a checkpoint that bears the number of the train step before it is a phase
after that step: it takes its time, and is no row of the step.
Times are as recorded, or counted step by step where a file has none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import (
    UNREPORTED,
    AttemptStart,
    Bools,
    Floats,
    Frame,
    Ints,
    Observation,
    Occurrence,
    Presence,
    StepKind,
    Tick,
)
from rankwatch_detectors.ends.teardown import RECORDING
from rankwatch_service.job.frames import FrameWindow
from rankwatch_service.job.topology_state import TopologyState
from rankwatch_service.replay.layout import PLACES, ReplayError
from rankwatch_service.replay.rows import RowBlock, part_of
from rankwatch_service.telemetry.bundle import table_of
from rankwatch_service.telemetry.columns import Records

SKEW_S: Final = 5.0
"""Hosts' clocks differ by less. A time further back comes from a clock that was set back, as after a restart; time
continues from there."""

STEP_S: Final = 1.0
"""Seconds of a step without a step time."""

STEP_S_MAX: Final = 3_600.0
"""Limit of the time by which one step moves the clock."""


class Timeline:
    """Times of rows in file order; they never go back."""

    def __init__(self) -> None:
        self._now_s: float | None = None
        self._offset_s = 0.0
        self._newest: dict[str, int] = {}
        """The newest step of each attempt, in files without times."""
        self._measured_s = np.full(2, np.nan)
        """The two newest step times reported."""

    def of(self, rows: RowBlock) -> Floats:
        """Seconds of each row, from the file's own origin where it has times, otherwise from 0."""
        times = _on_time(rows, self._reported(rows.time_s)) if rows.time_s is not None else self._counted(rows)
        self._now_s = float(times[-1])
        return times

    def _reported(self, time_s: Floats) -> Floats:
        here = np.isfinite(time_s)
        index = np.maximum.accumulate(np.where(here, np.arange(len(time_s)), -1))
        start = 0.0 if self._now_s is None else self._now_s - self._offset_s
        times = np.where(index >= 0, time_s[np.maximum(index, 0)], start) + self._offset_s
        before = times[0] if self._now_s is None else self._now_s
        back = np.diff(times, prepend=before) < -SKEW_S
        for start_of in np.flatnonzero(back).tolist():
            previous = float(times[start_of - 1]) if start_of else before
            lost = previous - float(times[start_of])
            if lost > SKEW_S:
                self._offset_s += lost
                times[start_of:] += lost
        return np.maximum(np.maximum.accumulate(times), before)

    def _counted(self, rows: RowBlock) -> Floats:
        """Each new step of an attempt takes the step time of its first row, or the shorter of the two newest ones."""
        names, records = rows.records.names, rows.records
        new = np.zeros(len(records.step), dtype=np.bool_)
        ends = [*(start for _, start in rows.attempts[1:]), len(new)]
        for (attempt, start), end in zip(rows.attempts, ends, strict=True):
            before = self._newest.get(attempt, -1)
            steps = np.maximum.accumulate(np.maximum(records.step[start:end], before))
            new[start:end] = np.diff(steps, prepend=before) > 0
            self._newest[attempt] = int(steps[-1])
        begins = np.flatnonzero(new)
        seconds = np.zeros(len(new))
        if "step_time_s" in names and len(begins):
            index = names.index("step_time_s")
            reported = records.values[index][begins]
            usable = _usable(rows, index)[begins]
            measured = np.concatenate((self._measured_s, reported[usable]))
            # A step that took ten times as long is no estimate for a step without a step time.
            typical = np.nan_to_num(np.fmin(measured[1:], measured[:-1]), nan=STEP_S)
            reported = np.where(usable, reported, typical[np.cumsum(usable)])
            self._measured_s = measured[-2:]
            seconds[begins] = np.minimum(reported, STEP_S_MAX)
        else:
            seconds[begins] = STEP_S
        return (self._now_s or 0.0) + np.cumsum(seconds)


def _usable(rows: RowBlock, index: int) -> Bools:
    """Where a metric is present and a positive number."""
    values, present = rows.records.values[index], rows.records.present
    usable: Bools = np.isfinite(values) & (values > 0)
    return usable if present is None else usable & present[index]


def _on_time(rows: RowBlock, times: Floats) -> Floats:
    """Times at which steps ended, where a log wrote lines late: the next step says how long before its line it began.

    So the seconds of a stall are those of the step that stalled. No line is moved beyond the one before it.
    """
    records = rows.records
    if "step_time_s" not in records.names or len(times) < 3:
        return times
    index = records.names.index("step_time_s")
    follows = (np.diff(records.step) == 1) & (np.diff(records.rank) == 0) & _usable(rows, index)[1:]
    began = np.where(follows, times[1:] - np.where(follows, records.values[index][1:], 0.0), np.inf)
    ended = times.copy()
    ended[1:-1] = np.maximum(np.minimum(times[1:-1], began[1:]), times[:-2])
    return ended


TICK_S: Final = 1.0
GAP_S_MAX: Final = 3_600.0
"""The longest gap between rows that is played second by second; the rest of a longer gap is skipped."""

DISORDER_STEPS: Final = 64
"""A row further behind the newest step is not late: the file is not in step order."""

ENDED_STEPS: Final = 256
"""A rank that has no row of so many steps which its peers have finished (and of four times the longest stretch that it
ever left out) has ended. At the end of an attempt, when no row can come any more, `DISORDER_STEPS` are enough."""

_PHASES: Final = {StepKind.TRAIN: "", StepKind.EVAL: "eval", StepKind.CHECKPOINT: "checkpoint_save"}
_PHASE_OF: Final = tuple(_PHASES[kind] for kind in StepKind)


class Player:
    """Plays the rows of one job. `counts` has the number of rows and values left out of the frames, by reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.topology_state = TopologyState()
        self.timeline = Timeline()
        self.rows = 0
        self.frames = 0
        self.first_step: int | None = None
        self.last_step = -1
        self._attempt: str | None = None
        self._attempts: dict[str, str] = {}
        self._left: set[str] = set()
        """Attempts that were followed by another one; later rows of them are counted and left out."""
        self._window: FrameWindow | None = None
        self._next_tick_s = 0.0
        self._steps: Ints = np.zeros(0, dtype=np.int64)
        """The newest step that each rank has finished; -1 before its first row."""
        self._row_s: Floats = np.zeros(0)
        self._stretch: Ints = np.zeros(0, dtype=np.int64)
        """The longest distance in steps between two rows of a rank."""
        self._ended: Bools = np.zeros(0, dtype=np.bool_)
        self._top = -1
        self._kind = 0
        self._places: dict[int, dict[str, Any]] = {}

    def play(self, rows: RowBlock) -> Iterator[Observation]:
        """Play the next rows, in file order.

        Raises:
            ReplayError: the steps are not in order.
        """
        times = self.timeline.of(rows)
        ends = [*(start for _, start in rows.attempts[1:]), len(times)]
        for (text, start), end in zip(rows.attempts, ends, strict=True):
            if self._named(text) != self._attempt:
                if self._named(text) in self._left:
                    self.counts["old_attempt_rows"] += end - start
                    continue
                yield from self.end(float(times[start]))
                self._begin(text, float(times[start]))
            yield from self._meet(rows, start, end, float(times[start]))
            ordered = self._ordered(rows, start, end)
            yield from self._pass(rows, times, start, ordered)
            if ordered < end:
                step = rows.records.step[ordered]
                what = (
                    f"{step} after {self._top}: rows must come in the order of steps; "
                    "sort them by step, not by rank; a restart needs another 'attempt'"
                )
                raise ReplayError(rows.path, what, rows.first_row + ordered, "step")

    def end(self, now_s: float | None = None) -> Iterator[Observation]:
        """End the attempt: close its open frames as they are."""
        if self._window is not None:
            now_s = self.now_s if now_s is None else now_s
            yield from self._closed(self._window.flush(now_s))
            yield from self._left_behind(DISORDER_STEPS)
            self.counts.update(self._window.counts)
            self._window = None

    @property
    def now_s(self) -> float:
        """The time of the newest row, in seconds."""
        return float(self._row_s.max()) if self._row_s.size else 0.0

    @property
    def ranks(self) -> int:
        """The number of ranks of this attempt with rows."""
        return int(np.count_nonzero(self._steps >= 0))

    # ---- attempts and ranks ----------------------------------------------------------------------------------------

    def _named(self, text: str) -> str:
        """The attempt's name as LAUNCH.k; a name of another form is a launch of its own."""
        if text not in self._attempts:
            _, dot, number = text.rpartition(".")
            self._attempts[text] = text if dot and number.isdecimal() else f"{text or 'file'}.0"
        return self._attempts[text]

    def _begin(self, text: str, now_s: float) -> None:
        if self._attempt is not None:
            self._left.add(self._attempt)
        self._attempt = self._named(text)
        self.topology_state, self._places = TopologyState(), {}
        self._steps, self._row_s, self._top = np.zeros(0, dtype=np.int64), np.zeros(0), -1
        self._stretch, self._ended = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.bool_)
        self._next_tick_s = math.floor(now_s / TICK_S) * TICK_S + TICK_S

    def _meet(self, rows: RowBlock, start: int, end: int, now_s: float) -> Iterator[AttemptStart]:
        """Add ranks seen for the first time to the attempt."""
        ranks = rows.records.rank[start:end]
        highest = int(ranks.max())
        size = self._steps.size
        if highest < size and bool((self._steps[ranks] >= 0).all()):
            return
        found, first = np.unique(ranks, return_index=True)
        fresh = {rank: start + index for rank, index in zip(found.tolist(), first.tolist(), strict=True)}
        fresh = {rank: index for rank, index in fresh.items() if rank not in self._places}
        self._places |= {rank: _place(rows, rank, index) for rank, index in fresh.items()}
        size = max(size, highest + 1)
        more = size - self._steps.size
        self._steps = np.pad(self._steps, (0, more), constant_values=-1)
        self._row_s = np.pad(self._row_s, (0, more))
        self._stretch, self._ended = np.pad(self._stretch, (0, more)), np.pad(self._ended, (0, more))
        self.topology_state = TopologyState()
        self.topology_state.learn(
            wire.RankInfo(rank, size, replicated=True, **place) for rank, place in self._places.items()
        )
        if self._window is None:
            assert self._attempt is not None
            self._window = FrameWindow(self._attempt, "steps", size)
        self._window.resize(size)
        yield AttemptStart(self._window.attempt, self.topology_state.topology(), now_s)

    def _ordered(self, rows: RowBlock, start: int, end: int) -> int:
        """The index of the first row whose step goes back; `end` if there is none."""
        steps, ranks = rows.records.step[start:end], rows.records.rank[start:end]
        newest = np.maximum.accumulate(np.maximum(steps, self._top))
        behind = newest - steps > DISORDER_STEPS
        if steps[0] < self._top or (np.diff(steps) < 0).any():
            # Only then can a rank have gone back; in the usual case this is not looked at.
            order = np.argsort(ranks, kind="stable")
            sorted_steps, sorted_ranks = steps[order], ranks[order]
            begins = np.flatnonzero(np.diff(sorted_ranks, prepend=-1) != 0)
            before = np.concatenate(([-1], sorted_steps[:-1]))
            before[begins] = self._steps[sorted_ranks[begins]]
            behind[order[sorted_steps < before]] = True
        count = int(behind.argmax()) if behind.any() else len(steps)
        if count:
            self._top = int(newest[count - 1])
        return start + count

    # ---- time ------------------------------------------------------------------------------------------------------

    def _pass(self, rows: RowBlock, times: Floats, start: int, end: int) -> Iterator[Observation]:
        """Feed rows to the frame window second by second, in the order of writing."""
        assert self._window is not None
        while start < end:
            until = start + int(np.searchsorted(times[start:end], self._next_tick_s, side="right"))
            if until > start:
                now_s = float(times[until - 1])
                part = part_of(rows.records, start, until)
                self.rows += until - start
                self._kind = int(part.kind[-1])
                self._row_s[part.rank] = times[start:until]
                part = self._without_phases(part)
                before = self._steps[part.rank]
                stretch = np.where(before >= 0, part.step - before, 0)
                self._stretch[part.rank] = np.maximum(self._stretch[part.rank], stretch)
                self._steps[part.rank] = np.maximum(before, part.step)
                self._window.add(table_of(part), now_s)
                yield from self._closed(self._window.ready(now_s, None))
                yield from self._left_behind(ENDED_STEPS)
                start = until
            if start < end:
                yield from self._tick(rows, float(times[start]), start)

    def _without_phases(self, part: Records) -> Records:
        """The rows without those of evaluations and checkpoints that follow their rank's own row of the same step."""
        others = np.flatnonzero(part.kind != 0)
        if not others.size:
            return part
        keep = np.ones(len(part.step), dtype=np.bool_)
        for index in others.tolist():
            mine = (part.rank[:index] == part.rank[index]) & (part.kind[:index] == 0)
            trained = max(int(self._steps[part.rank[index]]), int(part.step[:index][mine].max(initial=-1)))
            keep[index] = part.step[index] > trained
        return part if keep.all() else part.rows(np.flatnonzero(keep))

    def _left_behind(self, steps: int) -> Iterator[Occurrence]:
        """The ends of ranks whose rows stopped so many steps before those of their peers."""
        assert self._window is not None
        here = (self._steps >= 0) & ~self._ended
        if np.count_nonzero(here) < 2:
            return
        lag = int(self._steps.max()) - self._steps
        for rank in np.flatnonzero(here & (lag > steps + 4 * self._stretch)).tolist():
            self._ended[rank] = True
            host, last = str(self._places[rank].get("host", "")), int(self._steps[rank])
            fields = {"how": RECORDING}
            yield Occurrence(
                "process_exit", self._window.attempt, host, float(self._row_s[rank]), rank, last + 1, fields
            )

    def _tick(self, rows: RowBlock, next_s: float, index: int) -> Iterator[Tick | Frame]:
        """Close a second; the next row is `index`."""
        now_s, self._next_tick_s = self._next_tick_s, self._next_tick_s + TICK_S
        if now_s - self.now_s > GAP_S_MAX:
            self._next_tick_s = math.ceil(next_s / TICK_S) * TICK_S
            self.counts["gap_s"] += math.floor(next_s - now_s)
        assert self._window is not None
        yield from self._closed(self._window.ready(now_s, None))
        # A pause before or after an evaluation's row belongs to it: some write it when it begins, some when it ends.
        if rows.time_s is None and "step_time_s" not in rows.records.names:
            # Without times nothing can take too long.
            return
        phase = _PHASE_OF[int(rows.records.kind[index]) or self._kind]
        yield Tick(now_s, self._presence(now_s, phase, int(rows.records.step[index])))

    def _closed(self, frames: Iterable[Frame]) -> Iterator[Frame]:
        for frame in frames:
            self.frames += 1
            self.first_step = frame.step if self.first_step is None else self.first_step
            self.last_step = max(self.last_step, frame.step)
            yield frame

    def _presence(self, now_s: float, phase: str, next_step: int) -> Presence:
        """The presence that agents would have reported. The step under way is the next one that the file has."""
        assert self._window is not None
        ranks = self._steps.size
        # One row for each step of a job is a log: it says nothing of what is done between its lines.
        phase = phase or (UNREPORTED if ranks == 1 else "")
        newest = int(self._steps.max())
        has_reported: Bools = self._steps >= 0
        age = np.maximum(now_s - self._row_s, 0.0)
        return Presence(
            attempt=self._window.attempt,
            has_reported=has_reported,
            received_s=np.full(ranks, now_s),
            sent_s=np.full(ranks, now_s),
            step=np.where(self._steps == newest, max(next_step, newest + 1), self._steps + 1),
            phase=(phase,) * ranks,
            phase_age_s=age,
            step_age_s=age,
            collective_seq=np.zeros(ranks, dtype=np.int64),
            state=tuple("exited" if ended else "running" for ended in self._ended.tolist()),
            os_state=("",) * ranks,
            cpu_s=np.zeros(ranks),
            outside_s=np.full(ranks, -1.0),
            doing=("",) * ranks,
        )


def _place(rows: RowBlock, rank: int, index: int) -> dict[str, Any]:
    """The place of this row's rank. Without places every rank is a replica of its own, with equal work."""
    hardware = {name: known[codes[index]] for name, (known, codes) in rows.hardware.items()}
    return {"dp": rank, **hardware} | {name: int(rows.places[name][index]) for name in PLACES if name in rows.places}
