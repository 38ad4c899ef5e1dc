"""Finds ranks that make no progress in a job whose ranks do not wait for each other.

Steps of rollouts, parameter servers and evaluation workers take as long as their work does, and other ranks go on when
one stands still. So each rank is judged against its own past, with the deadlines of a pause. If ranks are in lockstep,
`hang` judges the job, and this detector does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rankwatch_detectors.base import AttemptStart, Bools, Finding, Floats, Kind, Observation, Presence, Severity
from rankwatch_detectors.dispatch import STARTS, DispatchingDetector
from rankwatch_detectors.episodes import since
from rankwatch_detectors.progress.arrival import STOPPED, STOPPED_STATES, stopped_ranks
from rankwatch_detectors.progress.progress_timeout import HangConfig
from rankwatch_detectors.scope import IncidentScope

STEPS_MIN = 4
"""Steps of a rank before its past is used."""
WEIGHT = 0.1
"""Weight of the newest step in a rank's usual step time: an average over about ten steps."""


class OwnPaceDetector(DispatchingDetector):
    """One episode for each rank, scope "rank:N". Memory: 40 bytes for each rank."""

    kind: Kind = Kind.HANG
    STATE: ClassVar[str] = "lockstep _step _entered_s _usual_s _longest_s _steps _stopped_at_s"

    def __init__(self, config: HangConfig) -> None:
        super().__init__()
        self.name = "own_pace"
        self.version = 3
        self._config = config
        self._restart(0)

    def _restart(self, ranks: int) -> None:
        self._step: Floats = np.full(ranks, math.nan)
        self._entered_s: Floats = np.full(ranks, math.nan)
        """When each rank began its step, by its host's clock."""
        self._usual_s: Floats = np.zeros(ranks)
        self._longest_s: Floats = np.zeros(ranks)
        self._steps: Floats = np.zeros(ranks)
        self._stopped_at_s: Floats = np.full(ranks, math.nan)
        """Since when each rank has been stopped by a signal at every tick; NaN where it is not."""

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:  # noqa: ARG002
        if new_attempt:
            self._restart(start.topology.world_size)
        return ()

    @property
    def reads(self) -> frozenset[type[Observation]]:
        """Ranks in lockstep are judged together, by others."""
        return STARTS if self.lockstep else super().reads

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:
        if presence is None or self.lockstep:
            return ()
        ages = np.stack([presence.sent_s, presence.step_age_s])
        fresh = presence.has_reported & (self.now_s - presence.received_s <= self._config.received_within_s)
        running = fresh & np.isfinite(ages).all(axis=0) & presence.where("state", "running")
        stopped = stopped_ranks(presence)
        known_s = np.where(np.isnan(self._stopped_at_s), self.now_s, self._stopped_at_s)
        self._stopped_at_s = np.where(stopped, known_s, math.nan)
        moved = self._learn(presence, running, stopped)
        findings: list[Finding] = []
        for scope in self.episodes:
            rank = scope.number
            if moved[rank] or (presence.has_reported[rank] and presence.state[rank] != "running"):
                step = int(presence.step[rank])
                summary = f"Rank {rank} makes progress again: step {step}."
                stood = {"age_s": self.now_s - self.episodes.reported(scope)["onset_time_s"]}
                findings += self.episodes.close(scope, step, self.now_s, summary, stood)
        return [*findings, *self._evaluate(presence, running, stopped)]

    def _learn(self, presence: Presence, running: Bools, stopped: Bools) -> Bools:
        """Learn from the newest blocks; returns the ranks that have begun another step."""
        with np.errstate(invalid="ignore"):
            entered_s = presence.sent_s - presence.step_age_s
            made = presence.step - self._step
            moved = running & (made > 0)
            # Several steps between two blocks took about a second together, so their mean is good enough.
            each_s = np.maximum(entered_s - self._entered_s, 0.0) / np.maximum(made, 1.0)
        learns = moved & ~stopped
        weight = np.where(self._steps > 0, WEIGHT, 1.0)
        self._usual_s = np.where(learns, self._usual_s + weight * (each_s - self._usual_s), self._usual_s)
        self._longest_s = np.where(learns, np.maximum(self._longest_s, each_s), self._longest_s)
        self._steps = np.where(moved, self._steps + made, self._steps)
        fresh = running & (made != 0)
        self._step = np.where(fresh, presence.step, self._step)
        self._entered_s = np.where(fresh, entered_s, self._entered_s)
        return moved

    def _evaluate(self, presence: Presence, running: Bools, stopped: Bools) -> list[Finding]:
        limit_s = self._limit_s(stopped)
        age_s = np.maximum(presence.step_age_s, 0.0) + (self.now_s - presence.received_s)
        # Progress since the last block is not visible, so the age within the block itself must nearly reach the limit.
        still = running & (age_s >= limit_s) & (presence.step_age_s >= limit_s - self._config.block_s)
        everybody = bool(still[running].all())
        findings: list[Finding] = []
        for rank in map(int, np.flatnonzero(still)):
            severity = Severity.CRITICAL if everybody or stopped[rank] else Severity.WARNING
            scope, age = IncidentScope.of_rank(rank), float(age_s[rank])
            if scope not in self.episodes:
                findings += self._open(presence, rank, severity, age, float(limit_s[rank]))
            elif severity is Severity.CRITICAL and self.episodes.reported(scope)["severity"] != severity:
                what = "No rank of the job makes progress." if everybody else f"Rank {rank} was stopped by a signal."
                findings += self.episodes.update(scope, severity=severity, detected_time_s=self.now_s, summary=what)
        return findings

    def _limit_s(self, stopped: Bools) -> Floats:
        """Seconds that each rank may take for a step, pauses included; less for a rank that a signal stopped."""
        config, known = self._config, self._steps >= STEPS_MIN
        patient_s = np.maximum(config.pause_steps * self._usual_s, config.pause_factor * self._longest_s)
        patient_s = np.where(known, np.maximum(patient_s, config.pause_s), config.first_step_s)
        prompt_s = np.maximum(config.critical_steps * self._usual_s, config.slow_steps_factor * self._longest_s)
        limit_s = np.where(stopped & known, np.maximum(prompt_s, config.floor_s), patient_s)
        with np.errstate(invalid="ignore"):
            for_long = self.now_s - self._stopped_at_s >= config.stopped_s
        return np.where(for_long, np.minimum(limit_s, config.stopped_s), limit_s)

    def _open(self, presence: Presence, rank: int, severity: Severity, age_s: float, limit_s: float) -> list[Finding]:
        step = int(presence.step[rank])
        stopped = presence.os_state[rank] in STOPPED_STATES
        how = STOPPED if stopped else f"its longest step took {self._longest_s[rank]:.1f} s"
        return self.episodes.open(
            IncidentScope.of_rank(rank),
            attempt=self.attempt,
            severity=severity,
            ranks=(rank,),
            onset_step=step,
            detected_step=step,
            onset_time_s=self.now_s - age_s,
            detected_time_s=self.now_s,
            score=age_s / max(limit_s / 3, 1e-3),
            confidence=1.0 if stopped else 0.7,
            summary=f"Rank {rank} has made no progress in step {step} {since(self.now_s - age_s)} ({how}).",
            evidence={
                "age_s": age_s,
                "deadline_s": limit_s,
                "usual_step_s": float(self._usual_s[rank]),
                "longest_step_s": float(self._longest_s[rank]),
                "decided_by": STOPPED if stopped else "its own past",
                "phase": presence.phase[rank],
                "os_state": presence.os_state[rank],
            },
        )
