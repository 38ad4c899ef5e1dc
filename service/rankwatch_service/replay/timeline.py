"""The time of each row of a file: as recorded, or counted step by step without times."""

from __future__ import annotations

from typing import Final

import numpy as np

from rankwatch_detectors.base import Bools, Floats
from rankwatch_service.replay.rows import RowBlock

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
        times = _on_time(rows, self._told(rows.time_s)) if rows.time_s is not None else self._counted(rows)
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
            told = records.values[index][begins]
            usable = _usable(rows, index)[begins]
            measured = np.concatenate((self._measured_s, told[usable]))
            # A step that took ten times as long is no estimate for a step without a step time.
            typical = np.nan_to_num(np.fmin(measured[1:], measured[:-1]), nan=STEP_S)
            told = np.where(usable, told, typical[np.cumsum(usable)])
            self._measured_s = measured[-2:]
            seconds[begins] = np.minimum(told, STEP_S_MAX)
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
