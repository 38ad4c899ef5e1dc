"""Records what a log says as the steps of one rank, which an agent sends as any other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from rankwatch import layout
from rankwatch.follow.rows import LoggedStep
from rankwatch.watch import Watch

UNREPORTED: Final = "unreported"
"""The phase by which detectors know that only finished steps are reported, and nothing of what is between them."""


class FollowedRank:
    """The rank of a log. What it cannot know, such as waits and busy time, is recorded as the step itself."""

    def __init__(self, watch: Watch, now: Callable[[], int] = time.monotonic_ns) -> None:
        """Declare that nothing can be ordered.

        Args:
            watch: started for this rank, with no step begun.
            now: monotonic nanoseconds.
        """
        self._meter = watch._meter
        self._recorder = watch._recorder
        self._now = now
        self._step = -1
        self._interval = 1
        """Steps from one row to the next."""
        self._k = 0
        self._rows = 0
        self._read_ns: int | None = None
        """When rows were last read that were as new as they can be; None: not yet, or older ones were read since."""
        self._row_s = 0.0
        """Seconds between two rows of the newest reading; 0 if unknown."""
        self._time_s: float | None = None
        self._step_s = 0.0
        self._recorder.declare({"can": [], "followed": True})
        self._recorder.words[layout.PHASE] = self._recorder.phase(UNREPORTED)

    def reading(self, rows: int, *, behind: bool) -> None:
        """Begin a reading. Its rows share the time since the reading before, since writers and file systems buffer.

        Args:
            rows: how many it has; without any it is none.
            behind: more rows are there already, so that the time between this reading and the next is not theirs.
        """
        if rows:
            now_ns = self._now()
            self._row_s = (now_ns - self._read_ns) * 1e-9 / rows if self._read_ns is not None else 0.0
            self._read_ns = None if behind else now_ns

    def take(self, row: LoggedStep) -> None:
        """Record a step. One that was recorded already adds nothing; an earlier one begins a new attempt."""
        if row.step == self._step:
            self.values_of_newest(row.values)
            return
        now_ns = self._now()
        if row.step < self._step and self._k < layout.K_MAX:
            self._k, self._step, self._time_s = self._k + 1, -1, None
        took_s = self._took_s(row)
        self._step, self._time_s = row.step, row.time_s
        self._rows += 1
        took_ns = int(took_s * 1e9)
        mask = self._put(row.values)
        self._recorder.write_step(
            step=row.step,
            k=self._k,
            kind=0,
            relative_step=self._rows,
            end_ns=now_ns,
            step_ns=took_ns,
            busy_ns=took_ns,
            busy_cpu_ns=took_ns,
            wait_ns=0,
            phases_ns=[],
            mask=mask,
        )
        words = self._recorder.words
        words[layout.STEP_ENTERED] = words[layout.PHASE_ENTERED] = now_ns
        words[layout.POSITION] = self._k << 48 | row.step + 2

    def values_of_newest(self, values: Mapping[str, float]) -> None:
        """Record values of the newest step."""
        if self._rows:
            put = {self._meter.metric(name): value for name, value in values.items()}
            put = {index: value for index, value in put.items() if not self._recorder.is_exact(index)}
            self._recorder.write_values(self._step, self._k, self._now(), put)

    def _put(self, values: Mapping[str, float]) -> int:
        for name, value in values.items():
            index = self._meter.metric(name)
            if not self._recorder.is_exact(index):
                self._meter.put(index, value)
        mask, self._meter.mask = self._meter.mask, 0
        return mask

    def _took_s(self, row: LoggedStep) -> float:
        """Seconds of one step: as the log says, between two of its times, else between two rows; 0 if unknown."""
        if self._step >= 0:
            self._interval = max(row.step - self._step, 1)
        if row.step_time_s is not None:
            self._step_s = row.step_time_s
        elif row.time_s is None:
            self._step_s = self._row_s / self._interval
        elif self._time_s is not None and row.time_s > self._time_s:
            self._step_s = (row.time_s - self._time_s) / self._interval
        return self._step_s
