"""Explains what the detector of training curves judges, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankwatch_detectors.base import Finding, Frame, Kind
from rankwatch_detectors.dispatch import typical
from rankwatch_detectors.explanation.explained import (
    DETECTABLE_ROWS,
    NOT_FINITE,
    TRAIN,
    Detectable,
    ExplainedDetector,
    FrameCounts,
    LeftOut,
    split,
)
from rankwatch_detectors.explanation.suspect import Statistic, Suspect
from rankwatch_detectors.scope import WHOLE_JOB
from rankwatch_detectors.statistics.anchor import Anchor
from rankwatch_detectors.statistics.level import LevelConfig, LevelWatch


class ExplainedCurve(ExplainedDetector):
    """Base of the detector of one training curve."""

    _watch: LevelWatch
    _anchor: Anchor
    _last_step: int
    _config: Any

    @property
    def _level(self) -> LevelConfig:
        level: LevelConfig = self._config.level
        return level

    def _rows_of_steps(self, counts: FrameCounts) -> dict[str, int]:
        points, not_finite = counts[self._config.metric], counts[NOT_FINITE[self._config.metric]]
        not_measured = max(counts[TRAIN] - points - not_finite, 0)
        others = {LeftOut.NOT_FINITE: not_finite, LeftOut.NOT_MEASURED: not_measured}
        return split(points, 0, self._level.warm_points) | others

    def suspects(self, frame: Frame) -> Sequence[Suspect]:
        """The distance of each point; the sum of high points, how long a jump has lasted and the climb from half on."""
        if frame.step != self._last_step or self._config.metric not in frame.values:
            return ()
        watch, level, value = self._watch, self._level, typical(frame, self._config.metric) or 0.0
        found = []
        if self.kind is Kind.LOSS_DIVERGENCE:
            if watch.is_open and not watch.lasting:
                found.append(self._lasted())
            if self._anchor.near:
                found.append(self._climbed())
        elif watch.ready and not watch.is_open:
            high = int(watch.score >= level.drift_allowance)
            found.append(Suspect(WHOLE_JOB, Statistic.DISTANCE, watch.score, level.jump_sigmas, high, value))
        if watch.high_points and watch.high_sum >= level.drift_limit / 2 and not watch.is_open:
            found.append(self._sum(value))
        return found

    def _lasted(self) -> Suspect:
        points = self._watch.episode_points
        return Suspect(WHOLE_JOB, Statistic.LASTED, points, self._level.lasting_points, points, self._watch.newest)

    def _sum(self, value: float) -> Suspect:
        watch = self._watch
        return Suspect(WHOLE_JOB, Statistic.SUM, watch.high_sum, self._level.drift_limit, watch.high_points, value)

    def _climbed(self) -> Suspect:
        anchor = self._anchor
        least = anchor.least * anchor.share / anchor.excess if anchor.excess else anchor.least
        return Suspect(WHOLE_JOB, Statistic.LEFT_LEVEL, anchor.share, least, 1, 1.0 + anchor.share)

    def crossed(self, finding: Finding) -> Suspect | None:
        """The climb, the jump that lasted, the sum or the distance: whichever decided."""
        watch, level, told = self._watch, self._level, finding.evidence
        if "best" in told:
            return self._climbed()
        if self.kind is Kind.LOSS_DIVERGENCE and watch.high_points <= level.drift_run_points:
            return self._lasted()
        if watch.score < level.jump_sigmas and watch.high_sum >= level.drift_limit:
            return self._sum(float(told["value"]))
        far = level.jump_sigmas if watch.score >= level.jump_sigmas else level.ratio_sigmas
        return Suspect(WHOLE_JOB, Statistic.DISTANCE, watch.score, far, 1, float(told["value"]))

    def needed(self, crossed: Suspect, rows: int) -> float | None:
        """The mean of the curve that would have been reported."""
        return self._watch.least_rise(rows) if crossed.statistic is Statistic.SUM else None

    def detectable(self) -> Sequence[Detectable]:
        """One point that jumps, a rise that lasts, and a climb too slow for the level."""
        watch, anchor = self._watch, self._anchor
        if not watch.ready:
            return ()
        noise, found = watch.scale, []
        if self.kind is not Kind.LOSS_DIVERGENCE:
            found.append(Detectable(f"a jump of the {self._config.metric}", "value", noise, ((1, watch.least_jump()),)))
        if self.kind is not Kind.LOSS_SPIKE:
            sizes = tuple((rows, watch.least_rise(rows)) for rows in DETECTABLE_ROWS)
            found.append(Detectable(f"a lasting rise of the {self._config.metric}", "value", noise, sizes))
        if self.kind is Kind.LOSS_DIVERGENCE and anchor.ready:
            sizes = ((anchor.sustained_rows, anchor.best + anchor.least),)
            found.append(Detectable(f"a slow climb of the {self._config.metric}", "value", noise, sizes))
        return found
