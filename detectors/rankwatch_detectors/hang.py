"""Finds a job that makes no progress, and the rank that did not arrive.

It reads progress blocks and ticks only. The deadline is learned from the job: three usual steps, at least five seconds
and at most eight where its slowest steps need no more. Phases that are long by nature (first step, compile, eval,
checkpoint_save) have their own, learned from how long they lasted before. Ranks that are held by an order, and hosts
that are silent, are no evidence of anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from rankwatch_detectors.arrival import Missing, who_is_missing
from rankwatch_detectors.base import (
    UNREPORTED,
    AttemptStart,
    Bools,
    Finding,
    Floats,
    Kind,
    Occurrence,
    Presence,
    Severity,
)
from rankwatch_detectors.dispatch import DispatchingDetector, which

FIRST_STEP = "first step"
FIRST_AFTER_ROLLBACK = "first step after a rollback"
RUNNING = "running"


@dataclass(frozen=True, slots=True)
class HangConfig:
    """Settings of the hang detector; seconds unless said otherwise."""

    steps: float = 3.0
    """A standstill of so many usual steps is a hang ..."""
    floor_s: float = 5.0
    """... but not one shorter than this ..."""
    prompt_s: float = 8.0
    """... and one of so long is, unless the job's slowest steps say otherwise: every second costs all GPUs."""
    slow_steps_factor: float = 2.0
    """Twice what one step in a hundred exceeds is never too short ..."""
    cold_steps: int = 50
    """... but for the first steps after a restart, in which caches fill and kernels are tuned ..."""
    cold_factor: float = 4.0
    """... and which take up to three times as long: four usual steps are not too short for them."""
    block_s: float = 1.0
    """Progress blocks and ticks come so often."""
    reporting_s: float = 1.5
    """Half of both is what finding takes on average, this at most nearly always. It is taken off the deadline so that
    the whole keeps the promise."""
    log_lines: float = 8.0
    """Where only a log's lines tell of finished steps, evaluations, saves and waits for data look like any pause: they
    take a few lines every day. Eight are more than that, and not less than `prompt_s`."""
    heard_within_s: float = 5.0
    """Older progress blocks say nothing about now."""
    window: int = 256
    """Progress readings that are remembered for the usual step."""
    readings_min: int = 4
    """Readings before the usual step counts as known."""
    unknown_s: float = 60.0
    """Deadline while the usual step is unknown ..."""
    unknown_max_s: float = 240.0
    """... but where the first ones take longer: then it is twice the longest of them, and this at most."""
    first_step_s: float = 1800.0
    """Start, compilation, first collectives of large jobs take a quarter of an hour and more; after one attempt its
    own time decides."""
    rollback_s: float = 120.0
    """A rollback inside the processes loads a checkpoint before its first step."""
    long_phases: tuple[tuple[str, float], ...] = (
        ("compile", 1800.0),
        ("eval", 1800.0),
        ("checkpoint_save", 900.0),
        ("checkpoint_load", 900.0),
    )
    """Phases that are long by nature, with their deadlines until one has been seen."""
    long_factor: float = 3.0
    long_floor_s: float = 60.0
    """A phase seen before has so many times its longest duration, and at least this."""


class HangDetector(DispatchingDetector):
    """One episode at a time, scope "job". Memory: 40 bytes for each rank and a window of readings."""

    kind: Kind = Kind.HANG
    STATE: ClassVar[tuple[str, ...]] = (
        *DispatchingDetector.STATE,
        "_readings",
        "_longest",
        "_newest",
        "_newest_s",
        "_attempt_s",
        "_moved",
        "_cold_until",
        "_orders",
        "_cpu",
        "_phase_was",
    )

    def __init__(self, config: HangConfig) -> None:
        super().__init__()
        self.name = "hang"
        self.version = 3
        self._config = config
        self._readings: list[list[float]] = []
        """Signs of progress, newest last: seconds since the one before, and the steps done in them."""
        self._longest: dict[str, float] = {}
        self._orders: list[str] = []
        self._restart(0)

    def _restart(self, ranks: int) -> None:
        self._newest: int | None = None
        self._newest_s = 0.0
        self._attempt_s = self.now_s
        self._moved = False
        self._cold_until = 0
        """The step before which steps may be slower than those of the attempts before."""
        self._cpu: Floats = np.full((2, ranks), math.nan)
        """CPU seconds when the newest step was first seen, and the time of that reading."""
        self._phase_was: dict[str, float] = {}

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:
        if new_attempt:
            self._restart(start.topology.world_size)
        if new_launch:
            self._orders = []
        return ()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.kind == "order":
            order, phase = str(occurrence.fields.get("order", "")), occurrence.fields.get("phase")
            if order in self._orders:
                self._orders.remove(order)
            # Between hold and go ranks stand still because they were told to.
            if phase in ("hold", "do"):
                self._orders.append(order)
        return ()

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:
        if presence is None or not presence.heard.any():
            return ()
        fresh = presence.heard & (self.now_s - presence.heard_s <= self._config.heard_within_s)
        presence, proper = self._proper(presence)
        fresh &= proper
        running = fresh & which(presence.state, RUNNING)
        if not running.any():
            return ()
        progressed = self._read(presence, running)
        if progressed and len(self.episodes):
            summary = f"The job goes on: step {self._newest}."
            return self.episodes.close("job", self._newest, self.now_s, summary)
        if self._excused(presence):
            return ()
        age = presence.step_age_s + (self.now_s - presence.heard_s)
        deadline = self._deadline(presence)
        # Younger blocks may hide progress that was made since: the block itself must be nearly as old.
        stuck = running & (age >= deadline) & (presence.step_age_s >= deadline - self._config.block_s)
        if not stuck.any() or not stuck[running & (presence.step == presence.step[running].max())].any():
            return ()
        missing = who_is_missing(presence, stuck, running, self._cpu, self._config.block_s)
        if not len(self.episodes):
            return self._open(presence, stuck, missing, float(age[stuck].max()), deadline)
        if missing.ranks and not self.episodes.told("job")["ranks"]:
            return self._name(missing)
        return ()

    def _proper(self, presence: Presence) -> tuple[Presence, Bools]:
        """The presence with ages that can be, and the ranks whose blocks hold numbers: no step outlasts its attempt."""
        ages = np.stack([presence.step_age_s, presence.phase_age_s])
        proper = np.asarray(np.isfinite(ages).all(axis=0))
        step_age_s, phase_age_s = np.clip(np.where(proper, ages, 0.0), 0.0, self.now_s - self._attempt_s)
        return replace(presence, step_age_s=step_age_s, phase_age_s=phase_age_s), proper

    def _excused(self, presence: Presence) -> bool:
        """Ranks stand still by order, or because a process is gone, which is told as rank_lost."""
        return bool(self._orders) or "held" in presence.state or "exited" in presence.state

    def _read(self, presence: Presence, running: Bools) -> bool:
        """Learn from one reading; True when the job's newest step is beyond the one before."""
        newest = int(presence.step[running].max())
        if self._newest is not None and newest <= self._newest:
            self._learn_phases(presence, running)
            return False
        # Blocks come once a second and say how old the step is: so its beginning is known better than to the tick.
        ahead = running & (presence.step == newest)
        entered_s = float((presence.heard_s - presence.step_age_s)[ahead].min())
        if self._newest is not None:
            if not self._moved:
                self._remember(self._first_step()[0], self.now_s - self._attempt_s)
                self._cold_until = newest + self._config.cold_steps if self._readings else newest
            elif not self._standing() and not len(self.episodes):
                reading = [max(entered_s - self._newest_s, 0.0), float(newest - self._newest)]
                self._readings = [*self._readings, reading][-self._config.window :]
            self._moved = True
        for name, lasted_s in self._phase_was.items():
            self._remember(name, lasted_s)
        progressed = self._newest is not None
        self._newest, self._newest_s = newest, entered_s
        self._cpu = np.stack([presence.cpu_s, presence.heard_s])
        self._phase_was = {}
        self._learn_phases(presence, running)
        return progressed

    def _remember(self, name: str, lasted_s: float) -> None:
        if not len(self.episodes):
            self._longest[name] = max(self._longest.get(name, 0.0), lasted_s)

    def _first_step(self) -> tuple[str, float]:
        """Name and unlearned deadline of the first step of this attempt."""
        if self.attempt.endswith(".0"):
            return FIRST_STEP, self._config.first_step_s
        return FIRST_AFTER_ROLLBACK, self._config.rollback_s

    def _standing(self) -> bool:
        """Whether the time since the newest step belongs to a long phase or an order, and teaches nothing."""
        return bool(self._phase_was) or bool(self._orders)

    def _learn_phases(self, presence: Presence, running: Bools) -> None:
        for name, _ in self._config.long_phases:
            if name in presence.phase:
                inside = running & which(presence.phase, name)
                if inside.any():
                    lasted = float(presence.phase_age_s[inside].max())
                    self._phase_was[name] = max(self._phase_was.get(name, 0.0), lasted)

    def _deadline(self, presence: Presence) -> float:
        """Seconds in one step after which the job hangs; the most patient phase of any rank decides for all."""
        config = self._config
        deadline = self._usual_deadline(log=UNREPORTED in presence.phase)
        if not self._moved:
            deadline = max(deadline, self._long_deadline(*self._first_step()))
        for name, unseen_s in config.long_phases:
            if name in self._phase_was:
                deadline = max(deadline, self._long_deadline(name, unseen_s))
        return deadline

    def _usual_deadline(self, *, log: bool) -> float:
        config = self._config
        if len(self._readings) < config.readings_min:
            seen = [self._longest.get(self._first_step()[0], 0.0), *(reading[0] for reading in self._readings)]
            return max(config.unknown_s, min(config.slow_steps_factor * max(seen), config.unknown_max_s))
        # The lower of two neighbours: one odd step among a hundred decides nothing.
        took_s = sorted(reading[0] for reading in self._readings)
        last = len(took_s) - 1
        usual, slow = took_s[last // 2], took_s[99 * last // 100]
        cold = self._newest is not None and self._newest < self._cold_until
        enough = max(config.slow_steps_factor * slow, config.cold_factor * usual if cold else 0.0, config.floor_s)
        if log:
            return max(enough, config.log_lines * usual, config.prompt_s)
        return max(enough, min(config.steps * usual, config.prompt_s)) - config.reporting_s

    def usual_step_s(self) -> float:
        """Median step time of the job in seconds."""
        return float(np.median([took_s / steps for took_s, steps in self._readings]))

    def _long_deadline(self, phase: str, unseen_s: float) -> float:
        longest = self._longest.get(phase)
        if longest is None:
            return unseen_s
        return max(self._config.long_factor * longest, self._config.long_floor_s)

    def _open(
        self,
        presence: Presence,
        stuck: Bools,
        missing: Missing,
        age_s: float,
        deadline_s: float,
    ) -> list[Finding]:
        usual = self.usual_step_s() if self._readings else None
        step = int(presence.step[stuck].min())
        evidence = {
            "age_s": age_s,
            "deadline_s": deadline_s,
            "usual_step_s": usual,
            "decided_by": missing.decided_by,
            "missing": missing.described,
            "waiting": missing.waiting,
        }
        return self.episodes.open(
            "job",
            attempt=self.attempt,
            severity=Severity.CRITICAL,
            ranks=missing.ranks,
            onset_step=step,
            detected_step=step,
            onset_time_s=self.now_s - age_s,
            detected_time_s=self.now_s,
            score=age_s / max(deadline_s / 3, 1e-3),
            confidence=missing.confidence,
            summary=f"No progress in step {step} for {age_s:.1f} s{self._verdict(missing)}.",
            evidence=evidence,
        )

    def _name(self, missing: Missing) -> list[Finding]:
        """What told nobody apart at first does now: a rank has used CPU time while the others waited."""
        told = self.episodes.told("job")
        evidence = {**told["evidence"], "decided_by": missing.decided_by, "missing": missing.described}
        return self.episodes.update(
            "job",
            ranks=missing.ranks,
            confidence=missing.confidence,
            detected_time_s=self.now_s,
            summary=f"No progress in step {told['onset_step']}{self._verdict(missing)}.",
            evidence={**evidence, "waiting": missing.waiting},
        )

    def _verdict(self, missing: Missing) -> str:
        if self.world_size == 1:
            return ""
        who = ", ".join(f"rank {rank}" for rank in missing.ranks[:4])
        return f"; did not arrive: {who} ({missing.decided_by})" if who else "; no rank stands out"
