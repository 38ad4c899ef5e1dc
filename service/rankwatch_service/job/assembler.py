"""Assembles the bundles and ticks of one job into observations for its detectors. Pure and deterministic.

Only the newest attempt has open frames. When a newer attempt appears, the frames of the old one close as they are, and
its later rows are dropped and counted. Events of old attempts are passed on, because which rank died still matters.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import SERVICE_KINDS, AttemptStart, Frame, Observation, Occurrence, Tick
from rankwatch_service.job.admission import NOTHING, RANK_CELLS, CellCount, CellDemand, highest_rank
from rankwatch_service.job.frames import NAMES_MAX, FrameWindow
from rankwatch_service.job.gaps import Arrival, GapTracker
from rankwatch_service.job.progress_board import LockstepCheck, ProgressBoard
from rankwatch_service.job.topology_state import TopologyState
from rankwatch_service.names import launch_of
from rankwatch_service.telemetry.bundle import Bundle, read_bundle
from rankwatch_service.telemetry.envelope import decode_envelope

START_WAIT_S: Final = 2.0
"""An attempt starts when the infos of all ranks are known, or this long after its first batch."""

PENDING_MAX: Final = 4_096
PENDING_ROWS_MAX: Final = 1_000_000
"""Batches, and rows in them, that wait for an attempt to start. Beyond either, it starts with the known ranks."""

LAUNCHES_MAX: Final = 64
"""Earlier launches remembered, so that a message from one of them does not begin a new attempt."""

REASONS_MAX: Final = 64
"""Reasons in `counts`. Agents choose the names of theirs, so their number needs a limit."""

STEP_TIME_WEIGHT: Final = 0.1
"""Weight of the newest step in the running mean of step times, which spans about ten steps."""

_DEPARTURES: Final = {"rank_left": "left", "process_exit": "exited", "exception": "exited"}


class Assembler:
    """Assembles the frames, presence and events of one job. `counts` counts what was dropped, by reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.attempt: str | None = None
        self.topology_state = TopologyState()
        self.step_time_s: float | None = None
        self.last_step = -1
        """Step of the newest closed frame of this attempt; -1 before the first."""
        self.coming: deque[Frame] = deque()
        """Frames that closed together with the one just given, and are given next."""
        self.board: ProgressBoard | None = None
        self.cells = CellCount()
        self._lockstep = LockstepCheck()
        self._gaps = GapTracker()
        self._launches: list[str] = []
        self._windows: dict[str, FrameWindow] = {}
        self._pending: list[Bundle] = []
        self._pending_rows = 0
        self._began_s = 0.0
        self._ended = False

    @property
    def dropped(self) -> dict[str, int]:
        """What did not reach the detectors, counted by reason."""
        return dict(sorted(sum((window.counts for window in self._windows.values()), self.counts.copy()).items()))

    @property
    def ended(self) -> bool:
        """Whether every rank of the attempt has left or exited."""
        return self._ended

    @property
    def finished(self) -> bool:
        """Whether every rank has finished its training loop."""
        return self._ended and self.board is not None and self.board.left()

    def fits(self, bundle: Bundle, now_s: float) -> bool:
        """Whether adding several batches at once has the same outcome as adding them one by one. Changes nothing.

        Each of them has only rows, and progress of ranks that go on.
        """
        return (
            bundle.attempt == self.attempt
            and self.board is not None
            and self.topology_state.has_rank_infos
            and self._gaps.are_new(bundle.batches)
            and all(self._windows[family].fits(table, now_s) for family, table in bundle.tables.items())
        )

    def count_for(self, attempt: str) -> CellCount:
        """The count to which a bundle of this attempt belongs: the running one's, or a new one."""
        if attempt == self.attempt:
            return self.cells
        return self.cells.next_attempt() if self._is_of_launch(attempt) else CellCount()

    def introduction(self, bundle: Bundle) -> CellDemand:
        """What the job has once it knows who the ranks of a bundle are; nothing if it does not take that of it."""
        introduced = {info.rank for batch in bundle.batches for info in batch.ranks}
        if self.board is not None or self.attempt not in (None, bundle.attempt) or not introduced:
            return NOTHING
        return CellDemand(RANK_CELLS * len(introduced.union(info.rank for info in self.topology_state.infos)))

    def introduce(self, bundle: Bundle, now_s: float) -> None:
        """Store the rank infos of a bundle and nothing else of it, before its attempt may start."""
        if self.attempt is None:
            self._begin(bundle.attempt, now_s)
        self.topology_state.learn(info for batch in bundle.batches for info in batch.ranks)
        self.cells.add(Bundle(bundle.batches, {}))

    def add(self, bundle: Bundle, now_s: float, *, may_grow: bool = True) -> Iterator[Observation]:
        """Process the next bundle in log order; several batches must fit.

        Lazy: while the caller handles an observation, this object is in the state that belongs to it, so the caller may
        read `last_step`, `step_time_s` and `topology_state`. Iterate to the end.

        Args:
            bundle: of any attempt.
            now_s: stream time.
            may_grow: whether the job may have state for all of it; if not, its new metric names and ranks are left out.
        """
        ranks = self.topology_state.world_size
        arrivals = [self._gaps.arrive(batch.host, batch.boot, batch.seq, now_s, ranks) for batch in bundle.batches]
        if Arrival.REPEATED in arrivals:
            self.counts["repeated_batches"] += 1
            return
        if bundle.attempt != self.attempt:
            if not self.is_newer(bundle.attempt):
                self.counts["old_attempt_rows"] += bundle.row_count
                yield from self._occurrences(bundle, now_s)
                return
            yield from self._flush(now_s)
            self._begin(bundle.attempt, now_s)
        if may_grow:
            self.cells.add(bundle)
        changed = may_grow and self.topology_state.learn(info for batch in bundle.batches for info in batch.ranks)
        if self.board is None:
            self._pending.append(bundle)
            self._pending_rows += bundle.row_count
            full = len(self._pending) >= PENDING_MAX or self._pending_rows >= PENDING_ROWS_MAX
            if self.topology_state.complete or full:
                yield from self._start(now_s)
            return
        if changed:
            yield self._announce(now_s)
        yield from self._absorb(bundle, Arrival.LATE not in arrivals, now_s, may_grow=may_grow)

    def tick(self, now_s: float, outage_s: float) -> Iterator[Observation]:
        """Advance to `now_s`, lazily as `add`.

        Args:
            now_s: stream time.
            outage_s: for how much of the time since the last tick the service could not receive anything.
        """
        if self.attempt is None:
            return
        if outage_s > 0 and self.board is not None:
            self.board.discount_outage(outage_s)
            for window in self._windows.values():
                window.discount_outage(outage_s)
        # An attempt that has only introduced its ranks is not allowed to start.
        if self.board is None and self._pending and now_s - self._began_s >= START_WAIT_S:
            yield from self._start(now_s)
        yield from self._close(now_s)
        for gap in self._gaps.gaps(now_s):
            self.counts["missing_batches"] += gap.missing
            fields = {"missing": gap.missing, "boot": gap.boot}
            yield Occurrence("gap", self.attempt, gap.host, now_s, None, None, fields)
        seen = None if self.board is None else self.board.presence()
        if seen is not None and self.topology_state.lockstep and self._lockstep.has_failed(seen, now_s):
            self.topology_state.end_lockstep()
            yield self._announce(now_s)
        yield Tick(now_s, seen)

    # ---- attempts --------------------------------------------------------------------------------------------------

    def is_newer(self, attempt: str) -> bool:
        """Whether an attempt is newer than the running one: a launch that is not known, or a later rollback number."""
        if self.attempt is None:
            return True
        launch, _, k = attempt.rpartition(".")
        current, _, current_k = self.attempt.rpartition(".")
        return int(k) > int(current_k) if launch == current else launch not in self._launches

    def _is_of_launch(self, attempt: str) -> bool:
        """Whether an attempt is of the same launch as the newest one."""
        return self.attempt is not None and launch_of(self.attempt) == launch_of(attempt)

    def _begin(self, attempt: str, now_s: float) -> None:
        launch, self.cells = launch_of(attempt), self.count_for(attempt)
        if not self._is_of_launch(attempt):
            # A rollback inside the processes keeps the launch, and with it who the ranks are.
            self.topology_state = TopologyState()
        if launch not in self._launches:
            self._launches = [*self._launches, launch][-LAUNCHES_MAX:]
        self.attempt, self._began_s, self._ended = attempt, now_s, False
        self.board, self._windows, self.last_step = None, {}, -1
        self._lockstep = LockstepCheck()

    def _start(self, now_s: float) -> Iterator[Observation]:
        pending, self._pending, self._pending_rows = self._pending, [], 0
        for bundle in pending:
            self._see(bundle)
        yield self._announce(now_s)
        for bundle in pending:
            yield from self._absorb(bundle, True, now_s)

    def _announce(self, now_s: float) -> AttemptStart:
        """Announce the topology to the detectors. From here on, frames have its world size."""
        assert self.attempt is not None
        size = self.topology_state.world_size
        if self.board is None:
            self.board = ProgressBoard(self.attempt, size)
            self._windows = {family: FrameWindow(self.attempt, family, size) for family in ("steps", "values")}
        self.board.resize(size)
        for window in self._windows.values():
            window.resize(size)
        return AttemptStart(self.attempt, self.topology_state.topology(), now_s)

    def _see(self, bundle: Bundle) -> bool:
        if self.topology_state.has_rank_infos:
            return False
        return self.topology_state.see(highest_rank(bundle))

    def _flush(self, now_s: float) -> Iterator[Observation]:
        if self._pending:
            yield from self._start(now_s)
        for window in self._windows.values():
            yield from map(self.topology_state.whole_norm.of, window.flush(now_s))
            self.counts.update(window.counts)

    # ---- batches ---------------------------------------------------------------------------------------------------

    def _absorb(self, bundle: Bundle, newest: bool, now_s: float, *, may_grow: bool = True) -> Iterator[Observation]:
        assert self.board is not None
        if may_grow and self._see(bundle):
            yield self._announce(now_s)
        events = list(self._occurrences(bundle, now_s))
        yield from (event for event in events if event.kind == "declared")  # before the rows that it explains
        for family, table in bundle.tables.items():
            self._windows[family].names_max = min(self.cells.names(family), NAMES_MAX)
            yield from map(self.topology_state.whole_norm.of, self._windows[family].add(table, now_s))
        if newest:
            # The progress blocks of a late message are older than those on the board.
            for rank, state in self.board.apply(bundle.batches, now_s):
                self._depart(rank, state)
        # Before frames close, so that none of them waits for a rank that this bundle reports gone.
        for event in (event for batch in bundle.batches for event in batch.events):
            if event.kind in _DEPARTURES and event.rank is not None:
                self._depart(event.rank, _DEPARTURES[event.kind], broken_off=event.fields.get("left") is False)
            elif event.kind == "records_lost":
                self._lost(event)
        last = {} if len(bundle.batches) == 1 else bundle.tables
        yield from self._close(now_s, {family: table.last_batches() for family, table in last.items()})
        yield from (event for event in events if event.kind != "declared")

    def _occurrences(self, bundle: Bundle, now_s: float) -> Iterator[Occurrence]:
        for batch in bundle.batches:
            for event in batch.events:
                if event.kind in SERVICE_KINDS:
                    self.counts["reserved_events"] += 1
                    continue
                yield Occurrence(
                    event.kind,
                    batch.attempt,
                    batch.host,
                    now_s,
                    event.rank,
                    event.step,
                    event.fields,
                    event.time_unix_ns,
                )

    def _lost(self, event: wire.Event) -> None:
        reason, count = event.fields.get("reason"), event.fields.get("count")
        name = f"agent_{reason}"[:40]
        known = name in self.counts or len(self.counts) < REASONS_MAX
        if isinstance(reason, str) and isinstance(count, int) and count > 0 and known:
            self.counts[name] += count

    def _depart(self, rank: int, state: str, *, broken_off: bool = False) -> None:
        assert self.board is not None
        self.board.depart(rank, state, broken_off=broken_off)
        for window in self._windows.values():
            window.depart(rank)

    def _close(
        self, now_s: float, last_batches: Mapping[str, Mapping[int, int]] = MappingProxyType({})
    ) -> Iterator[Frame]:
        """Close the frames that are complete or late.

        Args:
            now_s: stream time.
            last_batches: by family and step, the number of the last batch in the bundle with rows of that frame. Frames
                close in the order in which they would if the batches were taken one after the other.
        """
        if self.board is None:
            return
        paces = list[tuple[int, float | None]]()
        for number in sorted({0, *(last for steps in last_batches.values() for last in steps.values())}):
            for family, window in self._windows.items():
                unfinished = {step for step, last in last_batches.get(family, {}).items() if last > number}
                for frame in map(self.topology_state.whole_norm.of, window.ready(now_s, self.step_time_s, unfinished)):
                    if family == "steps":
                        self.last_step = frame.step
                    self._learn_step_time(frame)
                    self.coming.append(frame)
                    paces.append((self.last_step, self.step_time_s))
        for pace in paces:
            self.last_step, self.step_time_s = pace
            yield self.coming.popleft()
        self._ended = self.board.departed()

    def _learn_step_time(self, frame: Frame) -> None:
        if "step_time_s" not in frame.values:
            return
        reported = frame.values["step_time_s"][frame.present["step_time_s"]]
        if not frame.finite:
            reported = reported[np.isfinite(reported)]
        if len(reported):
            newest = float(np.add.reduce(reported)) / len(reported)
            before = newest if self.step_time_s is None else self.step_time_s
            self.step_time_s = before + STEP_TIME_WEIGHT * (newest - before)

    def start(self, time_s: float) -> AttemptStart | None:
        """The start of the running attempt as of this time; None if there is none."""
        if self.attempt is None or self.board is None:
            return None
        return AttemptStart(self.attempt, self.topology_state.topology(), time_s)

    # ---- snapshot --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that decides the future: JSON types, bytes and arrays."""
        return {
            "counts": dict(self.counts),
            "cells": self.cells.state(),
            "attempt": self.attempt,
            "topology": self.topology_state.state(),
            "step_time_s": self.step_time_s,
            "board": None if self.board is None else self.board.state(),
            "lockstep": self._lockstep.state(),
            "gaps": self._gaps.state(),
            "launches": self._launches,
            "windows": {family: window.state() for family, window in self._windows.items()},
            "pending": [wire.encode(bundle.batches[0]) for bundle in self._pending],
            "began_s": self._began_s,
            "ended": self._ended,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Assembler:
        """The assembler that gave this state."""
        assembler = cls()
        assembler.counts.update(state["counts"])
        assembler.attempt = state["attempt"]
        assembler.topology_state = TopologyState.restored(state["topology"])
        assembler.step_time_s = state["step_time_s"]
        assembler.board = None if state["board"] is None else ProgressBoard.restored(state["board"])
        assembler._lockstep = LockstepCheck.restored(state["lockstep"])
        assembler._gaps.restore(state["gaps"])
        assembler._launches = list(state["launches"])
        assembler._windows = {family: FrameWindow.restored(saved) for family, saved in state["windows"].items()}
        assembler.last_step = assembler._windows["steps"].last_closed if assembler._windows else -1
        assembler.cells = CellCount.restored(state["cells"])
        assembler._pending = [read_bundle([decode_envelope(body)]) for body in state["pending"]]
        assembler._pending_rows = sum(bundle.row_count for bundle in assembler._pending)
        assembler._began_s, assembler._ended = state["began_s"], state["ended"]
        return assembler
