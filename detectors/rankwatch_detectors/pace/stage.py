"""Finds a pipeline stage that is slow as a whole; comparing ranks within stages does not show it.

The median busy time of each stage is compared with the other stages' by the same baseline and CUSUMs as for ranks. A
stage that has become slower is a slowdown. Stages that have been heavier from the beginning are a property of the job,
reported once as information: they cost time in every step, and only another division of the layers helps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankwatch_detectors.base import (
    AttemptStart,
    Bools,
    Finding,
    Floats,
    Frame,
    Ints,
    Kind,
    Observation,
    Severity,
    StepKind,
    Topology,
)
from rankwatch_detectors.dispatch import ATTEMPT_ENDED, STARTS, DispatchingDetector, typical
from rankwatch_detectors.episodes import Episodes
from rankwatch_detectors.pace.load import LoadConfig
from rankwatch_detectors.pace.peer_test import PeerTest, PeerTestConfig, device_seconds, own_seconds
from rankwatch_detectors.scope import IncidentScope
from rankwatch_detectors.statistics.baseline import BaselineConfig
from rankwatch_detectors.statistics.peers import GROUP_MIN, PeerGroups, median
from rankwatch_detectors.statistics.shift import Crossing
from rankwatch_detectors.words import percent, slower_than


@dataclass(frozen=True, slots=True)
class StageConfig:
    """Settings of the stage detector."""

    budget: float = 0.5
    """False incidents per job-week, in addition to the budget of the job's slowdown."""
    peer_test: PeerTestConfig = field(default_factory=lambda: PeerTestConfig(ratios=(1.05, 1.10, 1.30), ratio_min=1.04))
    baseline: BaselineConfig = field(
        # Embeddings and heads make stages uneven by design, so any standing offset is accepted.
        default_factory=lambda: BaselineConfig(offset_max=math.inf, warm_reach=math.inf)
    )
    standing_ratio: float = 1.1
    """A stage this much heavier than the others is reported: the others wait for a tenth of their time."""
    standing_rows: int = 48
    """First rows are no pattern: while caches fill and kernels are tuned, some stages take longer than others."""
    skipped_rows: int = 2
    smooth_rows: int = 8
    clear_share: float = 0.35
    clear_rows: int = 16


class StageDetector(DispatchingDetector):
    """Finds slow stages; scope "stage:N", for standing differences that of the heaviest. Needs three stages or more.

    Memory: 16 bytes for each rank.
    """

    kind: Kind = Kind.SLOWDOWN
    COMPARES_RANKS: ClassVar[bool] = True
    JUDGES_TIMES: ClassVar[bool] = True
    STATE: ClassVar[str] = "lockstep _peer_test _groups _stage_of _rows _excess standing _heavier"

    def __init__(self, config: StageConfig) -> None:
        super().__init__()
        self.name = "stage"
        self.version = 8
        self._config = config
        self._peer_test = PeerTest(config.peer_test, config.baseline, LoadConfig(), config.budget)
        self._groups = PeerGroups()
        self._stage_of: Ints = np.zeros(0, dtype=np.int64)
        self._rows = 0
        self._excess: dict[str, list[float]] = {}
        """The reported excess, the smoothed excess, calm rows, by open scope."""
        self.standing = Episodes(self.kind)
        """The finding about heavier stages, at most one. These stages are tested for changes like all others."""
        self._heavier: dict[str, list[float]] = {}
        """The same three values, by number of a stage in that finding."""

    @property
    def _stages(self) -> int:
        return int(self._stage_of.max()) + 1 if self._stage_of.size else 0

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:
        before = self._stages
        self._stage_of = start.topology.pp.copy()
        self._groups.regroup(self._stage_of)
        stages = self._stages
        findings: list[Finding] = []
        if new_launch or before != stages:
            findings = self.standing.close_all(self.now_s, ATTEMPT_ENDED)
            self._heavier = {}
        if new_attempt or before != stages:
            known = before == stages and not new_launch
            came_from = np.arange(stages, dtype=np.int64) if known else np.full(stages, -1, dtype=np.int64)
            self._peer_test.begin(_of_stages(stages), came_from)
            self._rows, self._excess = 0, {}
        return findings

    @property
    def reads(self) -> frozenset[type[Observation]]:
        """Few stages are no peers."""
        return super().reads if self._stages >= GROUP_MIN else STARTS

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        wanted = frame.family != "values" and frame.kind is StepKind.TRAIN and self._stages >= GROUP_MIN
        if not wanted:
            return ()
        device = device_seconds(frame)
        seconds = own_seconds(frame) if device is None else device
        if seconds is None:
            return ()
        self._rows += 1
        if self._rows <= self._config.skipped_rows:
            return ()
        by_stage = self._by_stage(seconds)
        frozen = self._changed()
        step_s = typical(frame, "step_time_s")
        bare = Frame(frame.attempt, frame.family, frame.step, frame.kind, frame.time_s, {}, {})
        residual, crossings = self._peer_test.evaluate(by_stage, bare, step_s, self.now_s, frozen)
        findings = self._follow(residual, frame)
        for crossing in crossings:
            findings += self._open(crossing, by_stage, frame)
            self._peer_test.bank.clear_rank(crossing.rank)
        self._peer_test.learn(self._changed())
        return [*findings, *self._standing(by_stage, frame)]

    def _by_stage(self, seconds: Floats) -> Floats:
        """Lower median of each stage's ranks; NaN if none reported."""
        usable: Bools = np.isfinite(seconds)
        medians = np.full(self._stages, np.nan)
        if not self._groups.proper.all():
            for stage in range(self._stages):
                own = np.sort(seconds[usable & (self._stage_of == stage)])
                medians[stage] = own[(own.size - 1) // 2] if own.size else np.nan
            return medians
        medians[self._stage_of] = self._groups.location(seconds, usable)
        return np.where(medians > 0, medians, np.nan)

    def _changed(self) -> list[int]:
        """Stages with an open slowdown, which are neither tested nor learned."""
        return [IncidentScope.parse(text).number for text in self._excess]

    def _follow(self, residual: Floats, frame: Frame) -> list[Finding]:
        """Follow the open episodes, and close the standing finding once no stage is heavier."""
        findings: list[Finding] = []
        for text, state in list(self._excess.items()):
            scope = IncidentScope.parse(text)
            stage = scope.number
            if self._has_passed(state, float(residual[stage])):
                del self._excess[text]
                summary = f"Pipeline stage {stage} takes as long as before again in step {frame.step}."
                findings += self.episodes.close(scope, frame.step, self.now_s, summary)
        for number, state in list(self._heavier.items()):
            # Residuals are relative to its known offset, so the offset is added: a stage is lighter only once most of
            # the reported excess is gone.
            if self._has_passed(state, state[0] + float(residual[int(number)])):
                del self._heavier[number]
                self._peer_test.baseline.forget(int(number))
        if not self._heavier:
            summary = f"No pipeline stage is heavier than the others any more in step {frame.step}."
            findings += [
                f for scope in self.standing for f in self.standing.close(scope, frame.step, self.now_s, summary)
            ]
        return findings

    def _has_passed(self, state: list[float], excess: float) -> bool:
        """Add one row of a stage's excess; True once it has been small for long enough."""
        state[1] += (excess - state[1]) / self._config.smooth_rows
        state[2] = state[2] + 1 if state[1] < self._config.clear_share * state[0] else 0
        return state[2] >= self._config.clear_rows

    def _standing(self, by_stage: Floats, frame: Frame) -> list[Finding]:
        """Report stages that are heavier from the beginning, once enough rows are known."""
        config = self._config
        if self._rows != config.skipped_rows + config.standing_rows or len(self.standing):
            return []
        offset = self._peer_test.baseline.offset
        heavy = [stage for stage in np.argsort(-offset).tolist() if offset[stage] >= math.log(config.standing_ratio)]
        if not heavy:
            return []
        self._heavier = {str(stage): [float(offset[stage]), float(offset[stage]), 0.0] for stage in heavy}
        ratios = {str(stage): math.exp(offset[stage]) for stage in heavy}
        reported = ", ".join(f"stage {stage} by {percent(ratios[str(stage)])} %" for stage in heavy)
        light = np.delete(by_stage, heavy)
        return self.standing.open(
            IncidentScope.of_stage(heavy[0]),
            attempt=self.attempt,
            severity=Severity.INFO,
            onset_step=frame.step - config.standing_rows,
            detected_step=frame.step,
            onset_time_s=self.now_s - config.standing_rows * self._peer_test.step_s,
            detected_time_s=self.now_s,
            score=float(offset[heavy[0]] / self._peer_test.sigma[heavy[0]]),
            confidence=0.9,
            summary=f"Since the first step some pipeline stages take longer than the others: {reported}. Layers are "
            "divided "
            "unevenly; no rank stands out.",
            evidence={
                "standing": True,
                "ratio": math.exp(offset[heavy[0]]),
                "ratios": ratios,
                "stage_busy_s": float(by_stage[heavy[0]]),
                "others_busy_s": _median(light),
            },
            cause="stage",
        )

    def _open(self, crossing: Crossing, by_stage: Floats, frame: Frame) -> list[Finding]:
        stage, ratio = crossing.rank, math.exp(crossing.effect)
        scope = IncidentScope.of_stage(stage)
        findings = self.episodes.open(
            scope,
            attempt=self.attempt,
            severity=Severity.WARNING,
            onset_step=crossing.onset_step,
            detected_step=frame.step,
            onset_time_s=self.now_s - crossing.rows * self._peer_test.step_s,
            detected_time_s=self.now_s,
            score=crossing.effect / float(self._peer_test.sigma[stage]),
            confidence=0.9,
            summary=f"Pipeline stage {stage} is {slower_than(ratio, 'it was')}, compared with the others, since step "
            f"{crossing.onset_step}; none of its {int((self._stage_of == stage).sum())} ranks stands out.",
            evidence={
                "ratio": ratio,
                "stage_busy_s": float(by_stage[stage]),
                "others_busy_s": _median(np.delete(by_stage, stage)),
                "rows": crossing.rows,
                "log_likelihood_ratio": crossing.evidence,
            },
            cause="stage",
        )
        if findings:
            self._excess[str(scope)] = [crossing.effect, crossing.effect, 0.0]
        return findings


def _median(values: Floats) -> float:
    measured = values[np.isfinite(values)]
    return median(measured) if measured.size else math.nan


def _of_stages(stages: int) -> Topology:
    """The stages as if each were one rank, all doing the same work."""
    zero = np.zeros(stages, dtype=np.int64)
    nowhere = ("",) * stages
    return Topology(stages, nowhere, nowhere, zero, zero, zero, zero, zero)
