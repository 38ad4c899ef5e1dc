"""Finds a pipeline stage that is slow as a whole: no rank of it is at fault, and ranks are compared within stages.

The median busy time of each stage is held against the other stages' by the same baseline and CUSUMs that serve ranks. A
stage that has become slower is a slowdown; one that has been heavier from the beginning is told once, for information,
since it costs every step and only another division of the layers helps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import (
    AttemptStart,
    Bools,
    Finding,
    Floats,
    Frame,
    Ints,
    Kind,
    Severity,
    StepKind,
    Topology,
)
from rankwatch_detectors.baseline import BaselineConfig
from rankwatch_detectors.dispatch import DispatchingDetector, typical
from rankwatch_detectors.load import LoadConfig
from rankwatch_detectors.peers import GROUP_MIN, PeerGroups
from rankwatch_detectors.witness import Witness, WitnessConfig, own_seconds


@dataclass(frozen=True, slots=True)
class StageConfig:
    """Settings of the stage detector."""

    budget: float = 0.5
    """False incidents per job-week; the job's own slowdown has a budget besides."""
    witness: WitnessConfig = field(default_factory=lambda: WitnessConfig(ratios=(1.05, 1.10, 1.30), ratio_min=1.04))
    baseline: BaselineConfig = field(
        # Embeddings and heads make stages uneven by design: whatever stands is a stage's place.
        default_factory=lambda: BaselineConfig(offset_max=math.log(4.0))
    )
    standing_ratio: float = 1.25
    """A stage so much heavier than the others is worth knowing: a quarter of every other stage's time is waiting."""
    standing_rows: int = 16
    skipped_rows: int = 2
    smooth_rows: int = 8
    clear_share: float = 0.35
    clear_rows: int = 16


class StageDetector(DispatchingDetector):
    """Names slow stages; scope "stage:N". Silent in jobs of fewer than three. Memory: 16 bytes for each rank."""

    kind: Kind = Kind.SLOWDOWN
    STATE: ClassVar[tuple[str, ...]] = (
        *DispatchingDetector.STATE,
        "_witness",
        "_groups",
        "_stage_of",
        "_rows",
        "_excess",
    )

    def __init__(self, config: StageConfig) -> None:
        super().__init__()
        self.name = "stage"
        self.version = 2
        self._config = config
        self._witness = Witness(config.witness, config.baseline, LoadConfig(), config.budget)
        self._groups = PeerGroups()
        self._stage_of: Ints = np.zeros(0, dtype=np.int64)
        self._rows = 0
        self._excess: dict[str, list[float]] = {}
        """By open scope: what was told, the excess smoothed, calm rows."""

    @property
    def _stages(self) -> int:
        return int(self._stage_of.max()) + 1 if self._stage_of.size else 0

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:
        before = self._stages
        self._stage_of = start.topology.pp.copy()
        self._groups.regroup(self._stage_of)
        stages = self._stages
        if new_attempt or before != stages:
            known = before == stages and not new_launch
            came_from = np.arange(stages, dtype=np.int64) if known else np.full(stages, -1, dtype=np.int64)
            self._witness.begin(_of_stages(stages), came_from)
            self._rows, self._excess = 0, {}
        return ()

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        wanted = frame.family == "steps" and frame.kind is StepKind.TRAIN and self._stages >= GROUP_MIN
        seconds = own_seconds(frame) if wanted else None
        if seconds is None:
            return ()
        self._rows += 1
        if self._rows <= self._config.skipped_rows:
            return ()
        by_stage = self._by_stage(seconds)
        frozen = self._changed()
        step_s = typical(frame, "step_time_s")
        bare = Frame(frame.attempt, frame.family, frame.step, frame.kind, frame.time_s, {}, {})
        residual, crossings = self._witness.judge(by_stage, bare, step_s, self.now_s, frozen)
        findings = self._follow(residual, frame)
        for crossing in crossings:
            evidence = {"rows": crossing.rows, "log_likelihood_ratio": crossing.evidence}
            findings += self._open(crossing.rank, crossing.effect, crossing.onset_step, by_stage, frame, evidence)
            self._witness.bank.clear_rank(crossing.rank)
        self._witness.learn(self._changed())
        return [*findings, *self._standing(by_stage, frame)]

    def _by_stage(self, seconds: Floats) -> Floats:
        """Lower median of each stage's ranks; NaN where none reported."""
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
        """Stages whose open episode says that they have become slower: these neither test nor learn."""
        return [int(scope.removeprefix("stage:")) for scope in self._excess]

    def _follow(self, residual: Floats, frame: Frame) -> list[Finding]:
        config = self._config
        findings: list[Finding] = []
        for scope in list(self._excess):
            stage, state = int(scope.removeprefix("stage:")), self._excess[scope]
            state[1] += (float(residual[stage]) - state[1]) / config.smooth_rows
            state[2] = state[2] + 1 if state[1] < config.clear_share * state[0] else 0
            if state[2] >= config.clear_rows:
                del self._excess[scope]
                summary = f"Pipeline stage {stage} takes as long as before again in step {frame.step}."
                findings += self.episodes.close(scope, frame.step, self.now_s, summary)
        return findings

    def _standing(self, by_stage: Floats, frame: Frame) -> list[Finding]:
        """Stages that have been heavier from the beginning, once there are rows enough to say so."""
        if self._rows != self._config.skipped_rows + self._config.standing_rows:
            return []
        findings: list[Finding] = []
        for stage in np.flatnonzero(self._witness.baseline.offset >= math.log(self._config.standing_ratio)).tolist():
            effect = float(self._witness.baseline.offset[stage])
            findings += self._open(stage, effect, None, by_stage, frame, {})
        return findings

    def _open(
        self, stage: int, effect: float, onset: int | None, by_stage: Floats, frame: Frame, more: dict[str, Any]
    ) -> list[Finding]:
        scope = f"stage:{stage}"
        ratio = math.exp(effect)
        others = np.delete(by_stage, stage)
        usual = float(np.nanmedian(others)) if np.isfinite(others).any() else math.nan
        since = "from the first step" if onset is None else f"since step {onset}"
        told = "its usual share of" if onset is not None else "as long as"
        fields: dict[str, Any] = {
            "severity": Severity.INFO if onset is None else Severity.WARNING,
            "onset_step": frame.step - self._config.standing_rows if onset is None else onset,
            "detected_step": frame.step,
            "detected_time_s": self.now_s,
            "summary": f"Pipeline stage {stage} takes {ratio:.2f} times {told} the other stages {since}; none of its "
            f"{int((self._stage_of == stage).sum())} ranks stands out.",
            "evidence": {"ratio": ratio, "stage_busy_s": float(by_stage[stage]), "others_busy_s": usual, **more},
        }
        if onset is not None:
            self._excess[scope] = [effect, effect, 0.0]
        if scope in self.episodes:
            return self.episodes.update(scope, **fields)
        return self.episodes.open(
            scope,
            attempt=self.attempt,
            onset_time_s=self.now_s - int(more.get("rows", self._config.standing_rows)) * self._witness.step_s,
            score=effect / float(self._witness.sigma[stage]),
            confidence=0.9,
            cause="stage",
            **fields,
        )


def _of_stages(stages: int) -> Topology:
    """The stages as if each were one rank, all doing the same work."""
    zero = np.zeros(stages, dtype=np.int64)
    nowhere = ("",) * stages
    return Topology(stages, nowhere, nowhere, zero, zero, zero, zero, zero)
