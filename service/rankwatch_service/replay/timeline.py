"""When each row of a file happened: as it says, or step after step where it does not say."""

from __future__ import annotations

from typing import Final

import numpy as np

from rankwatch_detectors.base import Floats
from rankwatch_service.replay.rows import Rows

SKEW_S: Final = 5.0
"""Hosts' clocks differ by less. A time that lies further back comes from a clock that was set anew, as after a restart
of the job: time is counted on from there."""

STEP_S_MAX: Final = 3_600.0
"""A step that claims to be longer does not move time by more."""


class Timeline:
    """Times of rows in file order; they never go back."""

    def __init__(self) -> None:
        self.clock_restarts = 0
        self._now_s: float | None = None
        self._offset_s = 0.0
        self._step = -1
        self._step_s = 1.0

    def of(self, rows: Rows) -> Floats:
        """Seconds of each row, from the file's own origin where it has times, else from 0."""
        times = self._told(rows.time_s) if rows.time_s is not None else self._counted(rows)
        self._now_s = float(times[-1])
        return times

    def _told(self, time_s: Floats) -> Floats:
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
                self.clock_restarts += 1
                self._offset_s += lost
                times[start_of:] += lost
        return np.maximum(np.maximum.accumulate(times), before)

    def _counted(self, rows: Rows) -> Floats:
        """Each new step takes as long as its first row says, or as the step before."""
        steps = np.maximum.accumulate(np.maximum(rows.records.step, self._step))
        new = np.diff(steps, prepend=self._step) > 0
        names, records = rows.records.names, rows.records
        begins = np.flatnonzero(new)
        seconds = np.zeros(len(steps))
        if "step_time_s" in names and len(begins):
            index = names.index("step_time_s")
            told = records.values[index][begins]
            usable = np.isfinite(told) & (told > 0)
            if records.present is not None:
                usable &= records.present[index][begins]
            last = np.maximum.accumulate(np.where(usable, np.arange(len(told)), -1))
            told = np.where(last >= 0, told[np.maximum(last, 0)], self._step_s)
            self._step_s = float(told[-1])
            seconds[begins] = np.minimum(told, STEP_S_MAX)
        else:
            seconds[begins] = 1.0
        self._step = int(steps[-1])
        return (self._now_s or 0.0) + np.cumsum(seconds)
