"""Watches a metric for a lasting change: River's ADWIN and Page-Hinkley on standardised residuals.

The first `REFERENCE_POINTS` values give the level, its scatter, and how much each value resembles the one before (the
autocorrelation at lag 1). What a value differs from what the one before predicts, divided by its usual scatter, is a
residual without autocorrelation: the tests would take a slow wave of autocorrelated noise for a change. The level is
fixed until a person accepts another one, a new launch begins, or the metric changes in a direction that the rule does
not watch.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np

from rankwatch_detectors.base import Floats, Frame, Topology
from rankwatch_detectors.dispatch import typical
from rankwatch_detectors.metric_rule import Direction, MetricRule
from rankwatch_detectors.rules.rule_watch import RuleWatch
from rankwatch_detectors.statistics.series import DriftTest

REFERENCE_POINTS: Final = 64
"""Values that give the level. Fewer leave its autocorrelation unknown, to which the tests are most sensitive."""

RECENT_POINTS: Final = 16
"""Values whose mean is the present level."""

RESIDUAL_MAX: Final = 4.0
"""Residuals are cut here: a single value, however far off, is no change."""

SHIFT_MIN: Final = 1.0
"""The least change of the level that is told, in units of the scatter of the reference."""

BACK_SHARE: Final = 0.5
"""The level is back once less than this share of the change is left."""

MAD_TO_SIGMA: Final = 1.4826
"""Standard deviation of normal noise by its median absolute deviation."""

AUTOCORRELATION_MAX: Final = 0.95
"""Beyond it no residual of a change would be left: of 64 values the estimate often is 1."""


class DriftWatch(RuleWatch):
    """The level of one metric, the median over ranks. Memory: constant."""

    STATE: ClassVar[tuple[str, ...]] = (
        *RuleWatch.STATE,
        "_reference",
        "_level",
        "_scatter",
        "_noise",
        "_autocorrelation",
        "_before",
        "_recent",
        "_shift",
        "_drift",
    )

    def __init__(self, rule: MetricRule) -> None:
        super().__init__(rule)
        self._drift = DriftTest()
        self._learn_anew()

    def _learn_anew(self) -> None:
        self._reference: list[float] = []
        self._level, self._scatter, self._noise, self._autocorrelation = 0.0, 0.0, 0.0, 0.0
        self._before = 0.0
        """How far the value before was from the level."""
        self._recent: list[float] = []
        self._shift = 0.0
        """The change of the level that was found; 0: none."""
        self._drift.reset()

    def begin(self, topology: Topology, *, fresh: bool) -> None:  # noqa: D102
        super().begin(topology, fresh=fresh)
        if fresh:
            self._learn_anew()

    def accept(self) -> None:
        """The present level is learned as the one to keep."""
        self.held.resize(1)
        self._learn_anew()

    def push(self, frame: Frame, now_s: float) -> bool:  # noqa: D102
        value = None if frame.late else typical(frame, self.rule.metric)
        if value is None:
            return False
        if len(self._reference) < REFERENCE_POINTS:
            self._reference.append(value)
            if len(self._reference) == REFERENCE_POINTS:
                self._fit()
            return False
        self._recent = [*self._recent[1 - RECENT_POINTS :], value]
        self.value = sum(self._recent) / len(self._recent)
        residual = self._residual(value)
        if not self._shift and self._drift.push(residual):
            self._judge_shift(self.value - self._level)
        bad = self._shift * (self.value - self._level) > BACK_SHARE * self._shift**2
        was_open = self.held.any_open
        self._hold(np.array([bad]), np.array([not bad]), frame, now_s)
        if self._shift and not bad and not self.held.any_open:
            self._shift = 0.0
            self._begin_tests()
        return bool(self._shift) or was_open

    def evidence(self) -> dict[str, Any]:  # noqa: D102
        return {
            "value": self.value,
            "level": self._level,
            "scatter": self._scatter,
            "autocorrelation": self._autocorrelation,
        }

    def sentence(self) -> str:  # noqa: D102
        sigmas = (self.value - self._level) / self._scatter
        return f"{self.rule.metric} has left its level of {self._level:.6g} for {self.value:.6g} ({sigmas:+.1f} sigmas)"

    def _judge_shift(self, shift: float) -> None:
        if abs(shift) < SHIFT_MIN * self._scatter:
            return
        if self.rule.direction in (Direction.BOTH, Direction.UP if shift > 0 else Direction.DOWN):
            self._shift = shift
        else:
            self._learn_anew()

    def _residual(self, value: float) -> float:
        """What the value differs from what the one before predicts, in usual deviations."""
        before, self._before = self._before, value - self._level
        return max(-RESIDUAL_MAX, min(RESIDUAL_MAX, (self._before - self._autocorrelation * before) / self._noise))

    def _begin_tests(self) -> None:
        """Begin the tests with the residuals of the reference, whose mean is the one to keep."""
        newest = self._before
        self._drift.reset([self._residual(value) for value in self._reference][1:])
        self._before = newest

    def _fit(self) -> None:
        points = np.array(self._reference)
        self._level = float(np.median(points))
        away = points - self._level
        # Of few values the estimate is too small by about (1 + 4 r) / n.
        power = float(away @ away)
        lagged = float(away[1:] @ away[:-1]) / power if power else 0.0
        corrected = lagged + (1 + 4 * lagged) / len(points)
        self._autocorrelation = min(max(corrected, 0.0), AUTOCORRELATION_MAX)
        # A constant metric has no scatter: then a thousandth of it is.
        least = max(abs(self._level) * 1e-3, 1e-12)
        self._scatter = max(_sigma(away), least)
        self._noise = max(_sigma(away[1:] - self._autocorrelation * away[:-1]), least)
        self._before = float(away[-1])
        self._begin_tests()


def _sigma(residuals: Floats) -> float:
    """The scatter of residuals around 0, by their median; by their squares if more than half of them are 0."""
    middle = MAD_TO_SIGMA * float(np.median(np.abs(residuals)))
    return middle or float(np.sqrt(np.mean(residuals**2)))
