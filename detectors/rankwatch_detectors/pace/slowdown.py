"""Finds that the whole job has become slower.

A bank of CUSUMs tests the logarithm of the step time against the job's own level. All ranks wait for the slowest, so
the step is judged without the time that its slowest rank adds to the median rank, and the whole step has to agree. A
slowdown has an onset: steps that lengthen gradually, as schedules make them, are learned. On shared cores CPU time is
judged, with a higher floor. A job that becomes faster learns its new level at once. A pace that wanders by itself
raises the limit, and is reported once. A growth too slow for the baseline is reported by the anchor, which knows the
best level that the job has kept in this launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import AttemptStart, Finding, Frame, Kind, Occurrence, Severity, StepKind
from rankwatch_detectors.declared import AMOUNTS, Schedule
from rankwatch_detectors.dispatch import ATTEMPT_ENDED, OTHER_CLOCK, DispatchingDetector, typical
from rankwatch_detectors.episodes import Episodes
from rankwatch_detectors.explanation.suspect import Shortfall
from rankwatch_detectors.pace.pace_words import drifted, shifted, wanders
from rankwatch_detectors.pace.slowdown_config import SlowdownConfig
from rankwatch_detectors.pace.slowdown_explained import REST, WHOLE, ExplainedSlowdown
from rankwatch_detectors.pace.step_parts import StepParts, cause_of
from rankwatch_detectors.pace.witness import SUSPECT_EVIDENCE, added_by_one_s
from rankwatch_detectors.scope import WHOLE_JOB
from rankwatch_detectors.statistics.anchor import Anchor
from rankwatch_detectors.statistics.baseline import PeerBaseline, Proof
from rankwatch_detectors.statistics.budget import threshold
from rankwatch_detectors.statistics.followed import Followed
from rankwatch_detectors.statistics.median import median
from rankwatch_detectors.statistics.shift import Crossing, ShiftBank
from rankwatch_detectors.statistics.wandering import Wandering


class SlowdownDetector(ExplainedSlowdown):
    """Scope "job". Memory: constant."""

    kind: Kind = Kind.SLOWDOWN
    COMPARES_RANKS: ClassVar[bool] = True
    JUDGES_TIMES: ClassVar[bool] = True
    STATE: ClassVar[tuple[str, ...]] = (
        *DispatchingDetector.STATE,
        "lockstep",
        "_baseline",
        "_bank",
        "_accelerated",
        "_rows",
        "_skipped_rows",
        "_step_s",
        "_since_s",
        "_amount",
        "_anchor",
        "_schedule",
        "_followed",
        "_grown",
        "_wandering",
        "_parts",
        "standing",
    )

    def __init__(self, config: SlowdownConfig) -> None:
        super().__init__()
        self.name = "slowdown"
        self.version = 10
        self._config = config
        self._baseline = PeerBaseline(config.baseline, compared=False)
        self._bank = ShiftBank(tuple(map(math.log, config.ratios)), config.baseline.clip_sigmas, config.rows_min)
        self._anchor = Anchor(config.anchor)
        self._schedule = Schedule(config.schedule)
        self._accelerated = False
        self._step_s = 1.0
        self._followed = Followed(config.followed)
        self._wandering = Wandering(config.wandering)
        self._parts = StepParts()
        self.standing = Episodes(self.kind)
        """The finding that the job's pace wanders, while it holds."""
        self._relearn()
        self._reset()

    def _reset(self) -> None:
        self._rows = 0
        known = bool(self._baseline.ready().all())
        self._skipped_rows = self._config.settle_rows if known else self._config.skipped_rows
        self._since_s: float | None = None
        self._grown: list[float] = []
        """Effect, onset and rows of a larger slowdown that replaces the open one: opened with the next row."""
        self._bank.clear(2)

    def _relearn(self) -> None:
        self._amount = 0.0
        self._parts.clear()
        apart = np.asarray([WHOLE, REST], dtype=np.int64)
        self._baseline.regroup(apart, np.full_like(apart, -1))

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:
        other_clock = not new_attempt and start.topology.accelerated != self._accelerated
        self._accelerated = start.topology.accelerated
        findings: list[Finding] = []
        if new_launch or other_clock:
            # Another launch may have another batch size, another code version, another number of ranks.
            self._relearn()
            self._anchor.clear()
            self._schedule.clear()
            self._wandering.clear()
            why = OTHER_CLOCK if other_clock else ATTEMPT_ENDED
            findings = [*self.episodes.close_all(self.now_s, why), *self.standing.close_all(self.now_s, why)]
        if new_attempt or other_clock:
            self._reset()
        return findings

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        declared = occurrence.kind == "declared" and occurrence.attempt == self.attempt
        if not declared and not (occurrence.kind == "accepted" and self.kind in occurrence.fields.get("kinds", ())):
            return ()
        self._relearn()
        self._bank.clear(2)
        self._anchor.clear()
        why = f"The job declared a change: {occurrence.fields.get('what')}." if declared else "The level was accepted."
        return self.episodes.close_all(self.now_s, why)

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        if frame.family == "values" or frame.kind is not StepKind.TRAIN:
            return ()
        on_devices = self._accelerated or "device_busy_s" in frame.values
        cpu_s = None if on_devices else typical(frame, "busy_cpu_s")
        step_s = typical(frame, "step_time_s")
        seconds = cpu_s if cpu_s is not None else step_s
        if seconds is None or seconds <= 0:
            return ()
        self._rows += 1
        if self._rows <= self._skipped_rows:
            return ()
        self._step_s += ((step_s or seconds) - self._step_s) / min(self._rows, 64)
        if cpu_s is None:
            self._parts.push(frame, seconds, on_devices=on_devices)
        added_s = 0.0 if cpu_s is not None else added_by_one_s(frame)
        rest_s = seconds - (added_s or 0.0)
        # If the slowest rank's excess is longer than the step, it did not delay this step.
        views = np.log([seconds, rest_s if rest_s > 0 else seconds]) - self._added_load(frame)
        here = np.ones(2, dtype=np.bool_)
        residual = self._baseline.residual(views, here)
        limit = threshold(self._bank.levels, self._step_s, self._config.budget)
        self._bank.push(residual, self._baseline.sigma(), self._baseline.ready(), frame.step, limit)
        self._missing, self._bare, self._shared = Shortfall.NOTHING, added_s is None, cpu_s is not None
        least = self._config.least_ratio(bare=added_s is None)
        crossing = self._verified(limit, math.log(least))
        crossing = None if crossing and added_s is None and self._is_passing(crossing) else crossing
        findings = self._decide(crossing, frame, float(residual[REST]), seconds, shared=cpu_s is not None)
        calm = here & (self._bank.strongest() < SUSPECT_EVIDENCE) & (not self._is_slow)
        self._baseline.learn(views, residual, calm, calm)
        if cpu_s is None and calm[REST]:
            self._parts.learn()
        self._wandering.push(float(views[REST]))
        drift = self._drift(frame, float(views[REST])) if cpu_s is None else ()
        return [*findings, *drift, *self._pattern(frame, seconds)]

    def _drift(self, frame: Frame, log_seconds: float) -> Sequence[Finding]:
        """Report that the job has left its best level, then its growth and its end."""
        anchor = self._anchor
        if self._schedule.push(frame) is not None:
            anchor.clear()
        anchor.push(log_seconds, frame.step)
        if not len(self.episodes):
            left = anchor.left and anchor.excess > self._wandering.range and not self._grown
            return self._open_drift(frame) if left else ()
        if not self._drifts:
            return ()
        told = self.episodes.told(WHOLE_JOB)
        before = math.log(told["evidence"]["told_ratio"])
        if anchor.back:
            self._wandering.came_and_went(before)
            return self.episodes.close(WHOLE_JOB, frame.step, self.now_s, "The step time is back at its best level.")
        words = self._words_of_drift(told["onset_time_s"])
        if anchor.excess < self._config.retell_factor * before and words["severity"] == told["severity"]:
            self.episodes.note(WHOLE_JOB, {**told["evidence"], **words["evidence"]})
            return ()
        words["evidence"]["told_ratio"] = words["evidence"]["ratio"]
        return self.episodes.update(WHOLE_JOB, detected_step=frame.step, detected_time_s=self.now_s, **words)

    def _open_drift(self, frame: Frame) -> list[Finding]:
        onset = frame.step if self._anchor.onset_step is None else self._anchor.onset_step
        onset_time_s = self.now_s - (frame.step - onset) * self._step_s
        words = self._words_of_drift(onset_time_s)
        words["evidence"]["told_ratio"] = words["evidence"]["ratio"]
        return self.episodes.open(
            WHOLE_JOB,
            attempt=self.attempt,
            onset_step=onset,
            detected_step=frame.step,
            onset_time_s=onset_time_s,
            detected_time_s=self.now_s,
            confidence=0.8,
            **words,
        )

    def _words_of_drift(self, onset_time_s: float) -> dict[str, Any]:
        config = self._config
        words = drifted(self._anchor, float(self._baseline.sigma()[REST]), self.world_size)
        # A steady job that drifts does not recover by itself; one whose pace wanders often does, and its best level is
        # about a bout below the usual one.
        brief = bool(self._wandering.bouts) and self.now_s - onset_time_s < config.brief_s
        mild = math.log(config.brief_ratio) + max(self._wandering.bouts) if brief else math.log(config.mild_ratio)
        return {"severity": Severity.INFO if self._anchor.excess < mild else Severity.WARNING, **words}

    def _added_load(self, frame: Frame) -> float:
        """Logarithm of how much more work a step has than at first; growing batches do not make a job slow."""
        amount = next((found for name in AMOUNTS if (found := typical(frame, name)) is not None), None)
        if amount is None or amount <= 0:
            return 0.0
        self._amount = self._amount or amount
        return max(0.0, math.log(amount / self._amount))

    def _verified(self, limit: float, effect_min: float) -> Crossing | None:
        """A crossing that is large enough, certain, and visible in the whole step; other crossings are learned."""
        crossing = next((crossing for crossing in self._bank.crossings(limit) if crossing.rank == REST), None)
        if crossing is None:
            return None
        proof = self._baseline.verify(crossing, limit, max(effect_min, self._wandering.reach))
        agreed = self._bank.strongest()[WHOLE] >= SUSPECT_EVIDENCE
        trend = self._is_trend(crossing)
        if proof is Proof.GIVEN and agreed and not trend:
            return crossing
        self._missing = self._lacks(proof, agreed=bool(agreed))
        settled = crossing.rows > self._config.settle_rows and (trend or not agreed)
        if (proof is Proof.FAILED or settled) and not self._is_slow:
            self._baseline.absorb(REST, crossing.effect, crossing.rows)
            self._bank.clear_rank(REST)
            if self._wandering.is_pattern and agreed and crossing.effect >= effect_min:
                self._wandering.came_and_went(crossing.effect)
        return None

    def _is_trend(self, crossing: Crossing) -> bool:
        """Whether the run has no onset: steps grow gradually, as slowly as by a schedule."""
        config = self._config
        # `rows - 1`, because the blocks do not have the newest row yet.
        before, *levels = self._wandering.newest(crossing.rows - 1) or [math.inf]
        if crossing.effect < 0 or len(levels) < config.trend_blocks_min:
            return False
        risen, halfway = levels[-1] - before, median(np.asarray(levels)) - before
        slow = risen * config.trend_rows < math.log(config.trend_ratio) * crossing.rows
        return slow and halfway < config.onset_share * risen

    def _is_passing(self, crossing: Crossing) -> bool:
        """Whether a small shift may still pass within seconds."""
        small = 0.0 < crossing.effect < math.log(self._config.brief_ratio)
        return small and crossing.rows * self._step_s < self._config.bare_duration_s

    def _decide(
        self, crossing: Crossing | None, frame: Frame, residual: float, seconds: float, *, shared: bool
    ) -> list[Finding]:
        config = self._config
        if self._grown:
            effect, onset_step, rows = self._grown
            self._grown = []
            crossing = self._risen_to(effect, int(onset_step), int(rows))
            return self._open(crossing, frame, seconds, shared=shared)
        if self._is_slow:
            return self._follow(frame, residual, seconds, shared=shared)
        if crossing is not None and crossing.effect < 0:
            self._relearn()
            self._bank.clear(2)
            return []
        if crossing is None or (shared and crossing.effect < math.log(config.shared_ratio_min)):
            self._since_s = None
            return []
        if self._since_s is None:
            self._since_s = self.now_s
        if shared and self.now_s - self._since_s < config.shared_duration_s:
            return []
        if self._drifts and crossing.effect <= self._anchor.excess:
            # The baseline lags behind a drift, so this crossing is the same drift.
            self._baseline.absorb(REST, crossing.effect, crossing.rows)
            self._bank.clear_rank(REST)
            return []
        if self._drifts:
            self._grown = [crossing.effect, crossing.onset_step, crossing.rows]
            summary = f"Since step {crossing.onset_step} the job is slower by more than this drift."
            return self.episodes.close(WHOLE_JOB, frame.step, self.now_s, summary)
        return self._open(crossing, frame, seconds, shared=shared)

    @property
    def _drifts(self) -> bool:
        """Whether the open episode is a drift, which the baseline follows: a shift on top of it is another slowdown."""
        return WHOLE_JOB in self.episodes and "best_s" in self.episodes.told(WHOLE_JOB)["evidence"]

    @property
    def _is_slow(self) -> bool:
        """Whether a shift is open, or opens with the next row: the baseline does not learn meanwhile."""
        return bool(self._grown or len(self.episodes)) and not self._drifts

    def _follow(self, frame: Frame, residual: float, seconds: float, *, shared: bool) -> list[Finding]:
        """Follow the open episode: close it, raise its severity, or report that the job is slower still."""
        config, followed, known = self._config, self._followed, self.episodes.told(WHOLE_JOB)
        told = math.log(known["evidence"]["ratio"])
        followed.push(residual, self._wandering.reach)
        if followed.is_over:
            self._wandering.came_and_went(told)
            self._bank.clear(2)
            self._since_s = None
            self._anchor.pass_over()
            summary = f"Steps take as long as before again since step {frame.step - followed.calm_rows + 1}."
            return self.episodes.close(WHOLE_JOB, frame.step, self.now_s, summary)
        if followed.has_risen:
            return self._rise(frame, seconds, shared=shared)
        lasts = self.now_s - known["onset_time_s"] >= config.brief_s and told >= math.log(config.mild_ratio)
        if known["severity"] == Severity.INFO and lasts and not followed.calm_rows:
            summary = f"{known['summary']} It has not passed by itself."
            now = {"detected_step": frame.step, "detected_time_s": self.now_s}
            return self.episodes.update(WHOLE_JOB, severity=Severity.WARNING, summary=summary, **now)
        return []

    def _rise(self, frame: Frame, seconds: float, *, shared: bool) -> list[Finding]:
        """A slow job has become slower: an update while the slowdown grows, another episode if it had settled."""
        followed = self._followed
        onset_step = frame.step - followed.risen_rows + 1
        if followed.is_another:
            self._grown = [followed.excess, onset_step, followed.risen_rows]
            summary = f"The slowdown became larger at step {onset_step}."
            return self.episodes.close(WHOLE_JOB, frame.step, self.now_s, summary)
        crossing = self._risen_to(followed.excess, onset_step, followed.risen_rows)
        return self._open(crossing, frame, seconds, shared=shared)

    def _risen_to(self, effect: float, onset_step: int, rows: int) -> Crossing:
        """A shift on top of an open episode, with the evidence that a test against its level would have."""
        gained = (math.log(self._config.followed.rise_ratio) / float(self._baseline.sigma()[REST])) ** 2
        return Crossing(REST, effect, onset_step, rows, rows * gained / 2)

    def _open(self, crossing: Crossing, frame: Frame, seconds: float, *, shared: bool) -> list[Finding]:
        self._followed.begin(crossing.effect)
        grown_s = {} if shared else self._parts.grown_s(crossing.rows)
        sigma = float(self._baseline.sigma()[REST])
        words = shifted(crossing, seconds, sigma, self.world_size, shared=shared, grown_s=grown_s)
        mild = words["evidence"]["ratio"] < self._config.brief_ratio
        fields: dict[str, Any] = {
            "severity": Severity.INFO if mild else Severity.WARNING,
            "detected_step": frame.step,
            "detected_time_s": self.now_s,
            "cause": cause_of(grown_s),
            **words,
        }
        if WHOLE_JOB in self.episodes:
            return self.episodes.update(WHOLE_JOB, **fields)
        onset_s = self.now_s - crossing.rows * self._step_s
        onset_step = crossing.onset_step
        return self.episodes.open(
            WHOLE_JOB, attempt=self.attempt, onset_step=onset_step, onset_time_s=onset_s, **fields
        )

    def _pattern(self, frame: Frame, seconds: float) -> list[Finding]:
        """Report once that the pace wanders, and when it no longer does."""
        if WHOLE_JOB in self.standing:
            summary = "The job's pace has not changed by itself for a long time."
            return [] if self._wandering.is_pattern else self.standing.close(WHOLE_JOB, frame.step, self.now_s, summary)
        if not self._wandering.is_pattern or len(self.episodes):
            return []
        return self.standing.open(
            WHOLE_JOB,
            attempt=self.attempt,
            onset_step=frame.step,
            detected_step=frame.step,
            onset_time_s=self.now_s,
            detected_time_s=self.now_s,
            **wanders(self._wandering.bouts, seconds, float(self._baseline.sigma()[REST])),
        )
