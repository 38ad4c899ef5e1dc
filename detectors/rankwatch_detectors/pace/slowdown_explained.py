"""Explains what the slowdown detector judges, and what it does not."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rankwatch_detectors.base import Finding, Frame
from rankwatch_detectors.explanation.detectable import least_shift
from rankwatch_detectors.explanation.explained import (
    DETECTABLE_ROWS,
    TRAIN,
    Detectable,
    ExplainedDetector,
    FrameCounts,
    LeftOut,
    split,
)
from rankwatch_detectors.explanation.suspect import Shortfall, Statistic, Suspect
from rankwatch_detectors.pace.slowdown_config import SlowdownConfig
from rankwatch_detectors.scope import WHOLE_JOB
from rankwatch_detectors.statistics.anchor import Anchor
from rankwatch_detectors.statistics.baseline import PeerBaseline, Proof
from rankwatch_detectors.statistics.budget import threshold
from rankwatch_detectors.statistics.shift import ShiftBank
from rankwatch_detectors.statistics.wandering import Wandering

WHOLE, REST = 0, 1
"""The whole step, and the step without the time that its slowest rank added: two rows of baseline and bank."""


class ExplainedSlowdown(ExplainedDetector):
    """Base of the slowdown detector. Its attributes here are set with each row and decide nothing."""

    _config: SlowdownConfig
    _baseline: PeerBaseline
    _bank: ShiftBank
    _anchor: Anchor
    _wandering: Wandering
    _rows: int
    _skipped_rows: int
    _step_s: float
    _missing = Shortfall.NOTHING
    """What a run beyond the threshold lacks in this row."""
    _bare = False
    """Only the step time is known."""
    _shared = False
    """CPU time is judged."""

    @property
    def _limit(self) -> float:
        return threshold(self._bank.levels, self._step_s, self._config.budget)

    def _lacks(self, proof: Proof, *, agreed: bool) -> Shortfall:
        """What a run beyond the threshold that was not reported lacks."""
        if proof is not Proof.GIVEN:
            return Shortfall.CERTAINTY
        return Shortfall.ONSET if agreed else Shortfall.AGREEMENT

    def _rows_of_steps(self, counts: FrameCounts) -> dict[str, int]:
        known = self._skipped_rows == self._config.settle_rows
        warm = 0 if known else self._config.baseline.warm_rows
        not_measured = {LeftOut.NOT_MEASURED: max(counts[TRAIN] - self._rows, 0)}
        return split(self._rows, self._skipped_rows, warm) | not_measured

    def suspects(self, frame: Frame) -> Sequence[Suspect]:
        """The evidence of a shift, and the distance from the best level, from half of their thresholds on."""
        if frame.family == "values":
            return ()
        found = [self._shift()] if REST in self._bank.take_near() else []
        return [*found, self._left_level()] if self._anchor.near else found

    def _shift(self) -> Suspect:
        run, limit, missing = self._bank.run(REST), self._limit, self._missing
        if run.evidence >= limit and missing is Shortfall.NOTHING and not len(self.episodes):
            missing = Shortfall.DURATION
        return Suspect(WHOLE_JOB, Statistic.EVIDENCE, run.evidence, limit, run.rows, math.exp(run.effect), missing)

    def _left_level(self) -> Suspect:
        excess, least = self._anchor.excess, self._anchor.least
        return Suspect(WHOLE_JOB, Statistic.LEFT_LEVEL, math.expm1(excess), math.expm1(least), 1, math.exp(excess))

    def crossed(self, finding: Finding) -> Suspect | None:
        """The evidence of a shift, or the distance from the best level."""
        told = finding.evidence
        if "best_s" in told:
            return self._left_level()
        if finding.scope != WHOLE_JOB or "log_likelihood_ratio" not in told:
            return None
        value, rows = told["log_likelihood_ratio"], told["rows"]
        return Suspect(WHOLE_JOB, Statistic.EVIDENCE, value, self._limit, rows, told["ratio"])

    def needed(self, crossed: Suspect, rows: int) -> float | None:
        """The ratio that would have been reported."""
        return self._least_ratio(rows) if crossed.statistic is Statistic.EVIDENCE else None

    def detectable(self) -> Sequence[Detectable]:
        """A job that is slower at once."""
        if not self._baseline.ready()[REST]:
            return ()
        sizes = tuple((rows, self._least_ratio(rows)) for rows in DETECTABLE_ROWS)
        noise = math.expm1(float(self._baseline.sigma()[REST]))
        return (Detectable("a slower job", "ratio", noise, sizes),)

    def _least_ratio(self, rows: int) -> float | None:
        """The smallest ratio that is reported this many rows after its onset; None: none, however large."""
        config, lasted_s = self._config, rows * self._step_s
        held = rows - math.ceil(config.shared_duration_s / self._step_s) if self._shared else rows
        sigma = float(self._baseline.sigma()[REST])
        shift = least_shift(self._bank, sigma, self._limit, held)
        if shift is None:
            return None
        least = config.shared_ratio_min if self._shared else config.least_ratio(bare=self._bare)
        brief = self._bare and lasted_s < config.bare_duration_s
        ratios = (least, config.brief_ratio if brief else 1.0, math.exp(self._wandering.reach))
        doubt = self._baseline.doubt(REST, self._limit, held)
        return max(math.exp(max(shift, doubt)), *ratios)
