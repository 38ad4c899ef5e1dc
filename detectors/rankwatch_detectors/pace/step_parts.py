"""What a step of the whole job is made of, and which part of it has grown: the cause class of a slowdown.

And summaries and evidence for a job that has become slower: a shift, a drift, or a wandering pace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np

from rankwatch_detectors.base import Frame, Severity
from rankwatch_detectors.dispatch import typical
from rankwatch_detectors.pace.peer_test import of_most
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.best_level import BestLevel
from rankwatch_detectors.statistics.peers import median
from rankwatch_detectors.statistics.shift import Crossing
from rankwatch_detectors.words import duration, more_than, percent, slower_than

PARTS: Final = ("communication", "device", "data", "own")
"""What a step is made of, in the order of `StepParts`."""
CAUSES: Final = PARTS[:3]
"""The parts that are cause classes. What the ranks' hosts do themselves has many causes."""
EXPLAINED_MIN: Final = 0.5
"""Share of what the step has grown by that a part must have grown by, to be its cause."""
ROWS_MAX: Final = 32
"""Newest rows that are kept: a slowdown is reported within some tens of its rows."""
LEARNED_ROWS: Final = 64
"""Rows over which the usual parts are averaged ..."""
LEARNED_ROWS_MIN: Final = 16
"""... and the fewest from which they are known."""


class StepParts(Stateful):
    """The parts of a step, in seconds: how long they usually are, and in the newest rows. Memory: constant.

    *communication* is the least wait of any rank for the others. The rank that comes last waits for nobody, so what it
    waits is what the collectives take. The others are the median rank's: work on its device, wait for data, and where
    ranks compute on their hosts, *own* time.
    """

    STATE: ClassVar[str] = "_usual _learned _rows"

    def __init__(self) -> None:
        self._usual: list[float] = []
        """Seconds of the step, then of each part; NaN where it is not measured."""
        self._learned = 0
        self._rows: list[list[float]] = []

    def clear(self) -> None:
        """Forget all: the steps that come are others."""
        self._usual, self._learned, self._rows = [], 0, []

    def push(self, frame: Frame, step_s: float, *, on_devices: bool) -> None:
        """Take the next row.

        Args:
            frame: the row.
            step_s: seconds of its step.
            on_devices: ranks compute on devices, so what the host waits for says nothing.
        """
        self._rows.append([step_s, *parts_of(frame, on_devices=on_devices)])
        del self._rows[:-ROWS_MAX]

    def learn(self) -> None:
        """The newest row is as usual; without effect if all was forgotten since."""
        if not self._rows:
            return
        row = self._rows[-1]
        self._learned += 1
        share = 1.0 / min(self._learned, LEARNED_ROWS)
        self._usual = [_moved(before, now, share) for before, now in zip(self._usual or row, row, strict=True)]

    def grown_s(self, rows: int) -> dict[str, float]:
        """Seconds by which the step and its measured parts exceed the usual ones, over the newest `rows`.

        Returns:
            `step` and the cause classes of `PARTS`; empty while it is not known what is usual.
        """
        if self._learned < LEARNED_ROWS_MIN:
            return {}
        newest = np.asarray(self._rows[-rows:])
        grown = {}
        for name, column, usual_s in zip(("step", *PARTS), newest.T, self._usual, strict=True):
            measured = column[np.isfinite(column)]
            if measured.size and math.isfinite(usual_s):
                grown[name] = median(measured) - usual_s
        return grown


def parts_of(frame: Frame, *, on_devices: bool) -> list[float]:
    """Seconds of each of `PARTS` in a row; NaN where it is not measured on most ranks."""
    wait_s = of_most(frame, "wait_s" if not on_devices else "device_wait_s")
    least_s = math.nan if wait_s is None else float(np.fmin.reduce(wait_s))
    own_s = math.nan if on_devices else _typical(frame, "busy_s")
    return [least_s, _typical(frame, "device_busy_s"), _typical(frame, "phase.data_wait"), own_s]


def cause_of(grown_s: Mapping[str, float]) -> str:
    """The cause class of a slowdown from `StepParts.grown_s`; "" where no part explains it."""
    longest = max((name for name in PARTS if name in grown_s), key=lambda name: grown_s[name], default="")
    explains = longest in CAUSES and grown_s[longest] >= EXPLAINED_MIN * grown_s["step"] > 0
    return longest if explains else ""


def _typical(frame: Frame, name: str) -> float:
    seconds = typical(frame, name)
    return math.nan if seconds is None else seconds


def _moved(before: float, now: float, share: float) -> float:
    """A mean that has come closer to a new value; NaN is no value."""
    if math.isnan(now):
        return before
    return now if math.isnan(before) else before + share * (now - before)


WAITING: Final = "waiting"
"""In place of a cause class: for what ranks wait is not known."""
LONGER: Final = {
    "communication": " Most of it is communication: even the rank that comes last waits longer in collectives.",
    "device": " Most of it is work of the devices, of all ranks alike.",
    "data": " Most of it is waiting for data, of all ranks alike.",
    "host": " Their CPU time has grown by far less: too many threads, or other processes, share the cores.",
    WAITING: " Their CPU time has grown by far less, and cores were free: all wait for a disk, the network or a timer.",
}
"""What has grown, by cause class."""


def shifted(
    crossing: Crossing,
    seconds: float,
    sigma: float,
    world_size: int,
    *,
    shared: bool,
    grown_s: Mapping[str, float],
    cause: str,
) -> dict[str, Any]:
    """Summary, evidence and cause of a step time that has changed at once.

    Args:
        crossing: the change.
        seconds: duration of a step now.
        sigma: noise of its logarithm.
        world_size: number of ranks that lose time.
        shared: CPU time was judged, since ranks share their cores with others.
        grown_s: see `StepParts.grown_s`.
        cause: cause class; "" if it is not known.
    """
    ratio = math.exp(crossing.effect)
    usual_s = seconds / ratio
    what = f"need {more_than(ratio, 'CPU time', 'before')}" if shared else f"are {slower_than(ratio, 'before')}"
    return {
        "score": crossing.effect / sigma * math.sqrt(crossing.rows),
        "confidence": 1.0 - math.exp(-crossing.evidence / 4),
        "summary": f"Steps {what} since step {crossing.onset_step} ({duration(seconds)}, usually {duration(usual_s)})."
        + LONGER.get(cause, ""),
        "cause": "" if cause == WAITING else cause,
        "evidence": {
            "ratio": ratio,
            "seconds": seconds,
            "usual_s": usual_s,
            "witness": "cpu" if shared else "wall",
            "rows": crossing.rows,
            "log_likelihood_ratio": crossing.evidence,
            "cost_gpu_hours_per_hour": world_size * (1 - 1 / ratio),
            **({"grown_s": grown_s} if grown_s else {}),
        },
    }


def drifted(best_level: BestLevel, sigma: float, world_size: int) -> dict[str, Any]:
    """Summary and evidence of a step time that has left its best level; other parameters as in `shifted`."""
    ratio = math.exp(best_level.excess)
    best_s = math.exp(best_level.best)
    since = f" since step {best_level.onset_step}" if best_level.onset_step is not None else ""
    times_s = f"{duration(math.exp(best_level.now))}, at best {duration(best_s)}"
    return {
        "score": best_level.excess / sigma,
        "summary": f"Steps have become {slower_than(ratio, 'at their best')} little by little{since} ({times_s}).",
        "evidence": {
            "ratio": ratio,
            "seconds": math.exp(best_level.now),
            "best_s": best_s,
            "usual_s": best_s,
            "least_ratio": math.exp(best_level.least),
            "witness": "wall",
            "cost_gpu_hours_per_hour": world_size * (1 - 1 / ratio),
        },
    }


def wanders(bouts: Sequence[float], seconds: float, sigma: float) -> dict[str, Any]:
    """Summary and evidence of slowdowns that came and went; each of `bouts` is the logarithm of a ratio."""
    low, high = math.exp(min(bouts)), math.exp(max(bouts))
    return {
        "severity": Severity.INFO,
        "score": max(bouts) / sigma,
        "confidence": 0.9,
        "summary": f"The job's pace wanders: {len(bouts)} times it became {percent(low)} to {percent(high)} % slower "
        "and recovered by itself. Slowdowns of this size are not reported again.",
        "evidence": {"standing": True, "times": len(bouts), "ratio": high, "ratio_least": low, "seconds": seconds},
    }
