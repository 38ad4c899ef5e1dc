"""Finds that the whole job has become slower.

A bank of CUSUMs tests the logarithm of the step time against the job's own level. All ranks wait for the slowest, so
the step is judged without the time that its slowest rank adds to the median rank, and the whole step has to agree. A
slowdown has an onset: steps that lengthen gradually, as schedules make them, are learned. On shared cores CPU time is
judged, with a higher floor, and the whole step if it takes several times as long. A job that becomes faster learns its
new level at once. A pace that wanders by itself raises the limit, and is reported once. A growth too slow for the
baseline is reported by the anchor, which knows the best level that the job has kept in this launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import numpy as np

from rankwatch_detectors.base import AttemptStart, Change, Finding, Frame, Kind, Occurrence, Severity, StepKind
from rankwatch_detectors.declared import AMOUNTS, WORK, NewLevel, Schedule, ScheduleConfig, change_in, why_anew
from rankwatch_detectors.dispatch import ATTEMPT_ENDED, OTHER_CLOCK, typical
from rankwatch_detectors.episodes import Episodes
from rankwatch_detectors.explanation import (
    DETECTABLE_ROWS,
    TRAIN,
    Detectable,
    ExplainedDetector,
    FrameCounts,
    LeftOut,
    Statistic,
    Suspect,
    UnmetCriterion,
    least_shift,
    split,
)
from rankwatch_detectors.pace.peer_test import SUSPECT_EVIDENCE, added_by_one_s, of_most
from rankwatch_detectors.pace.step_parts import WAITING, StepParts, cause_of, drifted, shifted, wanders
from rankwatch_detectors.scope import WHOLE_JOB
from rankwatch_detectors.statistics.baseline import BaselineConfig, Proof
from rankwatch_detectors.statistics.best_level import (
    BestLevel,
    BestLevelConfig,
    Followed,
    FollowedConfig,
    RandomWalk,
    RandomWalkConfig,
)
from rankwatch_detectors.statistics.peers import median
from rankwatch_detectors.statistics.shift import Crossing, threshold
from rankwatch_detectors.statistics.single import SeriesBaseline, SeriesShift
from rankwatch_detectors.words import duration


@dataclass(frozen=True, slots=True)
class SlowdownConfig:
    """Settings of the slowdown detector."""

    budget: float = 1.0
    """False incidents per job-week."""
    ratios: tuple[float, ...] = (1.05, 1.1, 1.3, 1 / 1.1, 1 / 1.3)
    """Tested ratios; those below 1 only make a faster job learn its new level."""
    ratio_min: float = 1.03
    """Least ratio that is reported. Busy times that grow by 5 % lengthen the step by less, since its transfers stay."""
    bare_ratio_min: float = 1.045
    """The same if only the step time is known: 5 %, of which a short run may show half a percent less. Planned changes
    of a run cost less than that."""
    bare_duration_s: float = 60.0
    """If only the step time is known, a slowdown below `brief_ratio` must last a minute: its cause cannot be checked,
    and short steps sometimes wait for a disk or a neighbour."""
    mild_ratio: float = 1.05
    """A drift below it is `info`: planned changes of a run cost as much."""
    brief_ratio: float = 1.1
    """A slowdown below it is `info` as long as it may pass by itself, as most of these do ..."""
    brief_s: float = 900.0
    """... within a quarter of an hour. One that stays is a warning, from `bare_ratio_min` on."""
    onset_share: float = 0.75
    """In the middle of its run a shift has reached this share of its height, a trend only half. The baseline's lag
    behind a trend is no shift: it is learned, and the anchor decides whether a level has been left ..."""
    trend_ratio: float = 1.02
    """... unless steps lengthen by this ratio within `trend_rows`: schedules (attention windows) take half of that."""
    trend_rows: int = 128
    trend_blocks_min: int = 2
    rows_min: int = 5
    shared_ratio_min: float = 1.3
    """On shared cores, caches and neighbours change CPU time by 10 % and more."""
    shared_duration_s: float = 60.0
    crowded_ratio_min: float = 3.5
    """On shared cores steps that take this many times as long are a slowdown although their CPU time has not grown. As
    many other processes as a job has ranks make them twice as long, which is no fault of the job."""
    waiting_ratio_min: float = 2.0
    """So are steps that would still take this many times as long without all the time for which any rank wanted a core
    and had none: they wait for something else."""
    ramp_rows: int = 96
    """Newest rows that distinguish a run from steps that were getting longer before it."""
    ramp_sigmas: float = 4.0
    ramp_ratio_max: float = 8.0
    """Steps that have been getting longer all along are for information up to this ratio: longer texts make them so."""
    skipped_rows: int = 2
    settle_rows: int = 64
    """Rows skipped at the start of an attempt that keeps the last attempt's level: caches are cold again, and steps
    are slower for some tens of rows."""
    baseline: BaselineConfig = field(
        default_factory=lambda: BaselineConfig(warm_rows=32, offset_rows=256, scatter_rows=128)
    )
    random_walk: RandomWalkConfig = field(default_factory=RandomWalkConfig)
    followed: FollowedConfig = field(default_factory=FollowedConfig)
    best_level: BestLevelConfig = field(default_factory=lambda: BestLevelConfig(steady_share=0.005))
    """Schedules that lengthen steps gradually from the start (attention windows) add 1 % in 128 rows; medians of as
    many rows of a steady job differ by 0.3 %."""
    retell_factor: float = 3.0
    """A drift is reported again when its excess is this many times the reported one."""
    schedule: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(rates=(), amounts=(*AMOUNTS, WORK), steps_up=False)
    )
    """Without learning rates, which do not affect the duration of a step."""

    def least_ratio(self, *, bare: bool) -> float:
        """The least ratio that is reported; `bare`: only the step time is known."""
        return max(self.bare_ratio_min, self.ratio_min) if bare else self.ratio_min


def queued_by_all(frame: Frame) -> float:
    """Seconds of a step for which ranks wanted a core and had none, of all ranks; NaN unless most measure it."""
    queued = of_most(frame, "queued_s")
    return math.nan if queued is None else float(np.nansum(np.clip(queued, 0.0, QUEUED_S_MAX)))


QUEUED_S_MAX: Final = 1e9
"""Of one rank and step; what an agent sends beyond this, or below 0, is no time, and sums of it would overflow."""


WHOLE, REST = 0, 1
"""The whole step, and the step without the time that its slowest rank added: two rows of baseline and bank."""


class ExplainedSlowdown(ExplainedDetector):
    """Base of the slowdown detector. Its attributes here are set with each row and decide nothing."""

    _config: SlowdownConfig
    _baseline: SeriesBaseline
    _rest_shift: SeriesShift
    _best_level: BestLevel
    _random_walk: RandomWalk
    _rows: int
    _skipped_rows: int
    _step_s: float
    _missing = UnmetCriterion.NOTHING
    """What a run beyond the threshold lacks in this row."""
    _bare = False
    """Whether only the step time is known."""
    _shared = False
    """CPU time is judged."""

    @property
    def _limit(self) -> float:
        return threshold(self._rest_shift.levels, self._step_s, self._config.budget)

    def _lacks(self, proof: Proof, *, agreed: bool) -> UnmetCriterion:
        """What a run beyond the threshold that was not reported lacks."""
        if proof is not Proof.GIVEN:
            return UnmetCriterion.CERTAINTY
        return UnmetCriterion.ONSET if agreed else UnmetCriterion.AGREEMENT

    def _rows_of_steps(self, counts: FrameCounts) -> dict[str, int]:
        known = self._skipped_rows == self._config.settle_rows
        warm = 0 if known else self._config.baseline.warm_rows
        not_measured = {LeftOut.NOT_MEASURED: max(counts[TRAIN] - self._rows, 0)}
        return split(self._rows, self._skipped_rows, warm) | not_measured

    def suspects(self, frame: Frame) -> Sequence[Suspect]:
        """The evidence of a shift, and the distance from the best level, from half of their thresholds on."""
        if frame.family == "values":
            return ()
        found = [self._shift()] if self._rest_shift.take_near() else []
        return [*found, self._left_level()] if self._best_level.near else found

    def _shift(self) -> Suspect:
        run, limit, missing = self._rest_shift.run(), self._limit, self._missing
        if run.evidence >= limit and missing is UnmetCriterion.NOTHING and not len(self.episodes):
            missing = UnmetCriterion.DURATION
        return Suspect(WHOLE_JOB, Statistic.EVIDENCE, run.evidence, limit, run.rows, math.exp(run.effect), missing)

    def _left_level(self) -> Suspect:
        excess, least = self._best_level.excess, self._best_level.least
        return Suspect(WHOLE_JOB, Statistic.LEFT_LEVEL, math.expm1(excess), math.expm1(least), 1, math.exp(excess))

    def crossed(self, finding: Finding) -> Suspect | None:
        """The evidence of a shift, or the distance from the best level."""
        reported = finding.evidence
        if "best_s" in reported:
            return self._left_level()
        if finding.scope != WHOLE_JOB or "log_likelihood_ratio" not in reported:
            return None
        value, rows = reported["log_likelihood_ratio"], reported["rows"]
        return Suspect(WHOLE_JOB, Statistic.EVIDENCE, value, self._limit, rows, reported["ratio"])

    def needed(self, crossed: Suspect, rows: int) -> float | None:
        """The ratio that would have been reported."""
        return self._least_ratio(rows) if crossed.statistic is Statistic.EVIDENCE else None

    def detectable(self) -> Sequence[Detectable]:
        """A job that is slower at once."""
        if not self._baseline.ready()[REST]:
            return ()
        sizes = tuple((rows, self._least_ratio(rows)) for rows in DETECTABLE_ROWS)
        noise = math.expm1(self._baseline.sigma()[REST])
        return (Detectable("a slower job", "ratio", noise, sizes),)

    def _least_ratio(self, rows: int) -> float | None:
        """The smallest ratio that is reported this many rows after its onset; None: none, however large."""
        config, lasted_s = self._config, rows * self._step_s
        held = rows - math.ceil(config.shared_duration_s / self._step_s) if self._shared else rows
        sigma = self._baseline.sigma()[REST]
        shift = least_shift(self._rest_shift, sigma, self._limit, held)
        if shift is None:
            return None
        least = config.shared_ratio_min if self._shared else config.least_ratio(bare=self._bare)
        brief = self._bare and lasted_s < config.bare_duration_s
        ratios = (least, config.brief_ratio if brief else 1.0, math.exp(self._random_walk.reach))
        uncertainty = self._baseline.uncertainty(REST, self._limit, held)
        return max(math.exp(max(shift, uncertainty)), *ratios)


class SlowdownDetector(ExplainedSlowdown):
    """Scope "job". Memory: constant."""

    kind: Kind = Kind.SLOWDOWN
    COMPARES_RANKS: ClassVar[bool] = True
    JUDGES_TIMES: ClassVar[bool] = True
    STATE: ClassVar[str] = (
        "lockstep _baseline _whole_shift _rest_shift _accelerated _rows _skipped_rows _step_s _trained_s _since_s "
        "_amount _best_level _schedule _followed _grown _view _ramp _quiet _newest _works _queues _usual_work "
        "_random_walk _parts standing _new_level"
    )

    def __init__(self, config: SlowdownConfig) -> None:
        super().__init__()
        self.name = "slowdown"
        self.version = 16
        self._config = config
        self._baseline = SeriesBaseline(config.baseline, 2)
        levels = tuple(map(math.log, config.ratios))
        self._whole_shift, self._rest_shift = (
            SeriesShift(levels, config.baseline.clip_sigmas, config.rows_min, view) for view in (WHOLE, REST)
        )
        self._best_level = BestLevel(config.best_level)
        self._schedule = Schedule(config.schedule)
        self._accelerated = False
        self._step_s = 1.0
        self._followed = Followed(config.followed)
        self._random_walk = RandomWalk(config.random_walk)
        self._parts = StepParts()
        self.standing = Episodes(self.kind)
        """The finding that the job's pace wanders, while it holds."""
        self._new_level = NewLevel()
        self._relearn()
        self._reset()

    def _reset(self) -> None:
        self._rows = 0
        known = all(self._baseline.ready())
        self._skipped_rows = self._config.settle_rows if known else self._config.skipped_rows
        self._trained_s = 0.0
        """Seconds that all steps have taken. A log that is read at once has them, and stream time has not."""
        self._since_s: float | None = None
        self._grown: list[float] = []
        """Effect, onset and rows of a larger slowdown that replaces the open one: opened with the next row."""
        self._view = REST
        """Which view the open episode is about."""
        self._ramp = False
        """The open episode has no onset: it is for information until it is very large."""
        self._quiet = False
        """Whether the open episode is like earlier ones that have passed; it is not reported while it may pass too."""
        self._newest: list[float] = []
        """Newest values without what the slowest rank adds, and the work of these steps, both as logarithms."""
        self._works: list[float] = []
        self._queues: list[float] = []
        """Of the newest steps the seconds for which ranks wanted a core and had none, added up; NaN: not measured."""
        self._forget_shifts()

    def _forget_shifts(self) -> None:
        self._whole_shift.clear()
        self._rest_shift.clear()

    def _relearn(self) -> None:
        self._amount = 0.0
        self._usual_work = [0.0, 0.0, 0.0]
        """Rows, mean and variance of the logarithm of the work of usual steps."""
        self._parts.clear()
        self._baseline.forget()
        self._forget_shifts()

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:
        other_clock = not new_attempt and start.topology.accelerated != self._accelerated
        self._accelerated = start.topology.accelerated
        findings: list[Finding] = []
        if new_launch or other_clock:
            # Another launch may have another batch size, another code version, another number of ranks.
            self._relearn()
            self._best_level.clear()
            self._schedule.clear()
            self._random_walk.clear()
            why = OTHER_CLOCK if other_clock else ATTEMPT_ENDED
            findings = self._audible(self.episodes.close_all(self.now_s, why))
            findings += self.standing.close_all(self.now_s, why)
        if new_attempt or other_clock:
            self._reset()
        return findings

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        why = why_anew(occurrence, self.attempt, self.kind)
        if not why:
            return ()
        change = change_in(occurrence, self.attempt)
        if change is not None and len(self.episodes):
            self._new_level.begin(self._newest[-1])
            return self._audible(self.episodes.mark(WHOLE_JOB, change.what, change.step))
        self._relearn()
        self._best_level.clear()
        return self._audible(self.episodes.close_all(self.now_s, why))

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
        self._trained_s += step_s or seconds
        if cpu_s is None:
            self._parts.push(frame, seconds, on_devices=on_devices)
        added_s = 0.0 if cpu_s is not None else added_by_one_s(frame)
        rest_s = seconds - (added_s or 0.0)
        # If the slowest rank's excess is longer than the step, it did not delay this step.
        seconds_of = (step_s if cpu_s is not None and step_s else seconds, seconds)
        load = self._added_load(frame)
        views = [float(one) - load for one in np.log([seconds_of[WHOLE], rest_s if rest_s > 0 else seconds])]
        residual, sigma, ready = self._baseline.residual(views), self._baseline.sigma(), self._baseline.ready()
        limit = self._limit
        for view, shift in enumerate((self._whole_shift, self._rest_shift)):
            if ready[view]:
                shift.push(residual[view], sigma[view], frame.step, limit)
        self._missing, self._bare, self._shared = UnmetCriterion.NOTHING, added_s is None, cpu_s is not None
        least = self._config.least_ratio(bare=added_s is None)
        self._remember(views[REST], frame)
        crossing = self._verified(limit, math.log(least))
        crossing = None if crossing and added_s is None and self._is_passing(crossing) else crossing
        if cpu_s is not None:
            self._queues.append(queued_by_all(frame))
            del self._queues[: -self._config.settle_rows]
            if crossing is None or crossing.effect < math.log(self._config.shared_ratio_min):
                crossing = self._crowded(limit, seconds_of[WHOLE]) or crossing
        findings = self._decide(crossing, frame, residual[self._view], seconds_of, shared=cpu_s is not None)
        shifts = (self._whole_shift, self._rest_shift)
        normal = [not self._is_slow and shift.strongest < SUSPECT_EVIDENCE for shift in shifts]
        self._baseline.learn(residual, normal)
        if normal[REST]:
            self._learn_work()
        if cpu_s is None and normal[REST]:
            self._parts.learn()
        self._random_walk.push(views[REST])
        drift = self._drift(frame, views[REST]) if cpu_s is None else ()
        learned = self._learn_declared(views[self._view], frame.step)
        return [*self._audible([*findings, *drift, *learned]), *self._pattern(frame, seconds)]

    def _learn_declared(self, log_seconds: float, step: int) -> list[Finding]:
        """End an episode in which a change was declared, once steps have taken as long for long."""
        if not (self._new_level and len(self.episodes)):
            self._new_level.clear()
            return []
        level = self._new_level.push(log_seconds, math.log(self._config.trend_ratio) / 2)
        if level is None:
            return []
        self._new_level.clear()
        self._relearn()
        self._best_level.clear()
        summary = f"Steps have stayed at a new level of {duration(math.exp(level))} since a change was declared."
        return self.episodes.close(WHOLE_JOB, step, self.now_s, summary)

    def _audible(self, findings: Sequence[Finding]) -> list[Finding]:
        """The findings to report of the open episode: one that is like earlier ones only once it has become a
        warning.
        """
        reported = list[Finding]()
        for one in findings:
            if one.change is Change.OPEN:
                effect = math.log(one.evidence["ratio"])
                self._quiet = one.severity is Severity.INFO and self._random_walk.is_like_before(effect)
            elif self._quiet and one.change is Change.UPDATE and one.severity is not Severity.INFO:
                self._quiet, one = False, replace(one, change=Change.OPEN)  # noqa: PLW2901
            if not self._quiet:
                reported.append(one)
            elif one.change is Change.CLOSE:
                self._quiet = False
        return reported

    def _drift(self, frame: Frame, log_seconds: float) -> Sequence[Finding]:
        """Report that the job has left its best level, then its growth and its end."""
        best_level = self._best_level
        if self._schedule.push(frame) is not None:
            best_level.clear()
        best_level.push(log_seconds, frame.step)
        if not len(self.episodes):
            left = best_level.left and best_level.excess > self._random_walk.range and not self._grown
            return self._open_drift(frame) if left else ()
        if not self._drifts:
            return ()
        reported = self.episodes.reported(WHOLE_JOB)
        before = math.log(reported["evidence"]["told_ratio"])
        if best_level.back:
            self._random_walk.came_and_went(before)
            return self.episodes.close(WHOLE_JOB, frame.step, self.now_s, "The step time is back at its best level.")
        words = self._words_of_drift(reported["onset_time_s"])
        if best_level.excess < self._config.retell_factor * before and words["severity"] == reported["severity"]:
            self.episodes.note(WHOLE_JOB, {**reported["evidence"], **words["evidence"]})
            return ()
        words["evidence"]["told_ratio"] = words["evidence"]["ratio"]
        return self.episodes.update(WHOLE_JOB, detected_step=frame.step, detected_time_s=self.now_s, **words)

    def _open_drift(self, frame: Frame) -> list[Finding]:
        onset = frame.step if self._best_level.onset_step is None else self._best_level.onset_step
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
        words = drifted(self._best_level, self._baseline.sigma()[REST], self.world_size)
        # A steady job that drifts does not recover by itself; one whose pace wanders often does, and its best level is
        # about a bout below the usual one.
        brief = bool(self._random_walk.bouts) and self.now_s - onset_time_s < config.brief_s
        mild = math.log(config.brief_ratio) + max(self._random_walk.bouts) if brief else math.log(config.mild_ratio)
        return {"severity": Severity.INFO if self._best_level.excess < mild else Severity.WARNING, **words}

    def _added_load(self, frame: Frame) -> float:
        """Logarithm of how much more work a step has than at first; growing batches do not make a job slow."""
        amount = next((found for name in AMOUNTS if (found := typical(frame, name)) is not None), None)
        if amount is None or amount <= 0:
            return 0.0
        self._amount = self._amount or amount
        return max(0.0, math.log(amount / self._amount))

    def _verified(self, limit: float, effect_min: float) -> Crossing | None:
        """A crossing that is large enough, certain, and visible in the whole step; other crossings are learned."""
        crossing = self._rest_shift.crossing(limit)
        if crossing is None:
            return None
        proof = self._baseline.verify(crossing, limit, max(effect_min, self._random_walk.reach))
        agreed = self._whole_shift.strongest >= SUSPECT_EVIDENCE
        trend = self._is_trend(crossing)
        if proof is Proof.GIVEN and agreed and not trend:
            if self._is_slow or not self._is_explained(crossing):
                return crossing
            self._relearn()
            self._best_level.clear()
            return None
        self._missing = self._lacks(proof, agreed=agreed)
        settled = crossing.rows > self._config.settle_rows and (trend or not agreed)
        if (proof is Proof.FAILED or settled) and not self._is_slow:
            self._baseline.absorb(REST, crossing.effect, crossing.rows)
            self._rest_shift.clear()
            if self._random_walk.is_pattern and agreed and crossing.effect >= effect_min:
                self._random_walk.came_and_went(crossing.effect)
        return None

    def _crowded(self, limit: float, seconds: float) -> Crossing | None:
        """A shift of the whole step by several times; smaller ones come and go with what else runs on the cores, unless
        that does not explain them.
        """
        crossing = self._whole_shift.crossing(limit)
        if crossing is None or self._is_slow:
            return None
        if crossing.effect >= math.log(self._config.crowded_ratio_min) or self._waits(crossing, seconds):
            return crossing
        if crossing.effect < 0 or crossing.rows > self._config.settle_rows:
            self._baseline.absorb(WHOLE, crossing.effect, crossing.rows)
            self._whole_shift.clear()
        return None

    def _waits(self, crossing: Crossing, seconds: float) -> bool:
        """Whether most of a shift is not due to busy cores: no step is longer by more than its ranks wanted a core."""
        queued = [one for one in self._queues[-crossing.rows :] if math.isfinite(one)]
        if not queued:
            return False
        return (
            math.exp(crossing.effect) * (1.0 - median(np.asarray(queued)) / seconds) >= self._config.waiting_ratio_min
        )

    def _remember(self, log_seconds: float, frame: Frame) -> None:
        work = typical(frame, WORK)
        self._newest.append(log_seconds)
        self._works.append(math.log(work) if work and work > 0 else 0.0)
        del self._newest[: -self._config.ramp_rows], self._works[: -self._config.ramp_rows]

    def _is_explained(self, crossing: Crossing) -> bool:
        """Whether at least half of a run is more work, by more than the work differs from step to step."""
        run = np.asarray(self._works[-crossing.rows :])
        _, usual, variance = self._usual_work
        added, chance = median(run) - usual, math.sqrt(variance / run.size)
        return added >= crossing.effect / 2 > 0.0 and added > self._config.ramp_sigmas * chance

    def _learn_work(self) -> None:
        """Learn how much work the steps have from which the usual time is learned, as slowly as that."""
        rows, usual, variance = self._usual_work
        rows = min(rows + 1, self._config.baseline.offset_rows)
        away = self._works[-1] - usual
        self._usual_work = [rows, usual + away / rows, variance + (away * away * (1 - 1 / rows) - variance) / rows]

    def _is_ramp(self, crossing: Crossing) -> bool:
        """Whether steps were getting longer before the run, at least half as fast: work that grows on purpose does."""
        before = np.asarray(self._newest[: max(len(self._newest) - crossing.rows, 0)])
        if crossing.effect < 0 or before.size < self._config.baseline.warm_rows // 2:
            return False
        rows = np.arange(before.size) - (before.size - 1) / 2
        spread = float(np.square(rows).sum())
        slope = float(rows @ before) / spread
        error = float(np.std(before - before.mean() - slope * rows)) / math.sqrt(spread)
        to_run = (before.size + crossing.rows) / 2
        return slope > self._config.ramp_sigmas * error and slope * to_run >= crossing.effect / 2

    def _is_trend(self, crossing: Crossing) -> bool:
        """Whether the run has no onset: steps grow gradually, as slowly as by a schedule."""
        config = self._config
        # `rows - 1`, because the blocks do not have the newest row yet.
        before, *levels = self._random_walk.newest(crossing.rows - 1) or [math.inf]
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
        self, crossing: Crossing | None, frame: Frame, residual: float, seconds: tuple[float, float], *, shared: bool
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
            return []
        if crossing is None or (shared and crossing.effect < math.log(config.shared_ratio_min)):
            self._since_s = None
            return []
        if self._since_s is None:
            self._since_s = self._trained_s
        if shared and self._trained_s - self._since_s < config.shared_duration_s:
            return []
        if self._drifts and crossing.effect <= self._best_level.excess:
            # The baseline lags behind a drift, so this crossing is the same drift.
            self._baseline.absorb(REST, crossing.effect, crossing.rows)
            self._rest_shift.clear()
            return []
        if self._drifts:
            self._grown = [crossing.effect, crossing.onset_step, crossing.rows]
            summary = f"Since step {crossing.onset_step} the job is slower by more than this drift."
            return self.episodes.close(WHOLE_JOB, frame.step, self.now_s, summary)
        return self._open(crossing, frame, seconds, shared=shared)

    @property
    def _drifts(self) -> bool:
        """Whether the open episode is a drift, which the baseline follows: a shift on top of it is another slowdown."""
        return WHOLE_JOB in self.episodes and "best_s" in self.episodes.reported(WHOLE_JOB)["evidence"]

    @property
    def _is_slow(self) -> bool:
        """Whether a shift is open, or opens with the next row: the baseline does not learn meanwhile."""
        return bool(self._grown or len(self.episodes)) and not self._drifts

    def _follow(self, frame: Frame, residual: float, seconds: tuple[float, float], *, shared: bool) -> list[Finding]:
        """Follow the open episode: close it, raise its severity, or report that the job is slower still."""
        config, followed, known = self._config, self._followed, self.episodes.reported(WHOLE_JOB)
        reported = math.log(known["evidence"]["ratio"])
        followed.push(residual, self._random_walk.reach)
        if followed.is_over:
            self._random_walk.came_and_went(reported)
            self._forget_shifts()
            self._since_s = None
            self._best_level.pass_over()
            summary = f"Steps take as long as before again since step {frame.step - followed.normal_rows + 1}."
            return self.episodes.close(WHOLE_JOB, frame.step, self.now_s, summary)
        if followed.has_risen:
            return self._rise(frame, seconds, shared=shared)
        lasts = self.now_s - known["onset_time_s"] >= config.brief_s and reported >= math.log(config.bare_ratio_min)
        if known["severity"] == Severity.INFO and lasts and not followed.normal_rows and not self._ramp:
            share = 1 - math.exp(-reported)
            summary = f"{known['summary']} It does not pass by itself, and costs {100 * share:.0f} % of the job's time."
            now = {"detected_step": frame.step, "detected_time_s": self.now_s}
            return self.episodes.update(WHOLE_JOB, severity=Severity.WARNING, summary=summary, **now)
        return []

    def _rise(self, frame: Frame, seconds: tuple[float, float], *, shared: bool) -> list[Finding]:
        """A slow job has become slower: an update while the slowdown grows, another episode if it had settled."""
        followed = self._followed
        onset_step = frame.step - followed.risen_rows + 1
        rise = followed.excess - math.log(self.episodes.reported(WHOLE_JOB)["evidence"]["ratio"])
        # The rise is counted from its middle on.
        goes_on = self._ramp and self._is_ramp(self._risen_to(rise / 2, onset_step, followed.risen_rows))
        if followed.is_another and not goes_on:
            self._grown = [followed.excess, onset_step, followed.risen_rows]
            summary = f"The slowdown became larger at step {onset_step}."
            return self.episodes.close(WHOLE_JOB, frame.step, self.now_s, summary)
        crossing = self._risen_to(followed.excess, onset_step, followed.risen_rows)
        return self._open(crossing, frame, seconds, shared=shared)

    def _risen_to(self, effect: float, onset_step: int, rows: int) -> Crossing:
        """A shift on top of an open episode, with the evidence that a test against its level would have."""
        gained = (math.log(self._config.followed.rise_ratio) / self._baseline.sigma()[self._view]) ** 2
        return Crossing(self._view, effect, onset_step, rows, rows * gained / 2)

    def _open(self, crossing: Crossing, frame: Frame, seconds: tuple[float, float], *, shared: bool) -> list[Finding]:
        self._followed.begin(crossing.effect)
        self._view = crossing.rank
        crowded = shared and crossing.rank == WHOLE
        grown_s = {} if shared else self._parts.grown_s(crossing.rows)
        waits = crowded and self._waits(crossing, seconds[WHOLE])
        cause = WAITING if waits else "host" if crowded else cause_of(grown_s)
        by_cpu = shared and not crowded and seconds[WHOLE] != seconds[REST]  # a log has only one of both
        how: dict[str, Any] = {"shared": by_cpu, "grown_s": grown_s, "cause": cause}
        sigma = self._baseline.sigma()[crossing.rank]
        words = shifted(crossing, seconds[crossing.rank], sigma, self.world_size, **how)
        bouts, ratio = self._random_walk, math.exp(crossing.effect)
        grows = WHOLE_JOB in self.episodes
        self._ramp = self._ramp if grows else self._is_ramp(crossing)
        in_character = self._ramp and ratio < self._config.ramp_ratio_max
        habit = bouts.recurs and bouts.is_like_before(crossing.effect)
        mild = in_character or habit or ratio < self._config.brief_ratio
        if self._ramp:
            words["summary"] += " They were getting longer before, little by little."
        fields: dict[str, Any] = {
            "severity": Severity.INFO if mild else Severity.WARNING,
            "detected_step": frame.step,
            "detected_time_s": self.now_s,
            **words,
        }
        if grows:
            known = self.episodes.reported(WHOLE_JOB)
            # What was certain stays so: there is a slowdown, and now it is a larger one.
            return self.episodes.update(
                WHOLE_JOB, **fields | {"confidence": max(known["confidence"], fields["confidence"])}
            )
        onset_s = self.now_s - crossing.rows * self._step_s
        onset_step = crossing.onset_step
        return self.episodes.open(
            WHOLE_JOB, attempt=self.attempt, onset_step=onset_step, onset_time_s=onset_s, **fields
        )

    def _pattern(self, frame: Frame, seconds: float) -> list[Finding]:
        """Report that the pace wanders, how often it did, and when it no longer does."""
        bouts: RandomWalk = self._random_walk
        now: dict[str, Any] = {"detected_step": frame.step, "detected_time_s": self.now_s}
        words = wanders(bouts.bouts, seconds, self._baseline.sigma()[REST]) if bouts.recurs else {}
        if WHOLE_JOB in self.standing:
            if not words:
                summary = "The job's pace has not changed by itself for a long time."
                return self.standing.close(WHOLE_JOB, frame.step, self.now_s, summary)
            same = words["evidence"]["times"] == self.standing.reported(WHOLE_JOB)["evidence"]["times"]
            return [] if same else self.standing.update(WHOLE_JOB, **now, **words)
        if not words or len(self.episodes):
            return []
        began: dict[str, Any] = {"onset_step": frame.step, "onset_time_s": self.now_s}
        return self.standing.open(WHOLE_JOB, attempt=self.attempt, **began, **now, **words)
