"""Loss spikes, loss divergence and gradient-norm excursions, found in the job's training curves.

The series is the median over ranks of each train step, from the frame family that has it first. Non-finite values are
left to `nonfinite` and not learned here. A jump that comes back is a spike; one that stays, or a slow climb, is
divergence; a change that stays but stops growing becomes the new level (a new data mix looks like that). The level
follows the curve, so the loss also has an anchor, which finds climbs too slow for the level. Changes that a job
declares, or logs as its schedule, reset both, but end nothing that is open: an open incident goes on against the level
before, says what was declared, and ends when that level is reached again or a new one has stayed. A loss that grows
tenfold while a declared level is still being learned is divergence too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rankwatch_detectors.base import GRAVITY, AttemptStart, Change, Finding, Frame, Kind, Occurrence, Severity, StepKind
from rankwatch_detectors.declared import (
    Changed,
    Declared,
    Growth,
    GrowthConfig,
    NewLevel,
    Schedule,
    ScheduleConfig,
    change_in,
)
from rankwatch_detectors.dispatch import typical
from rankwatch_detectors.explanation import (
    DETECTABLE_ROWS,
    NOT_FINITE,
    TRAIN,
    Detectable,
    ExplainedDetector,
    FrameCounts,
    LeftOut,
    Statistic,
    Suspect,
    Suspicion,
    split,
)
from rankwatch_detectors.metrics import column_words
from rankwatch_detectors.scope import WHOLE_JOB
from rankwatch_detectors.statistics.best_level import BestLevel, BestLevelConfig
from rankwatch_detectors.statistics.level import LevelConfig, LevelWatch, PeakConfig, Peaks, Turn


class ExplainedCurve(ExplainedDetector):
    """Base of the detector of one training curve."""

    _watch: LevelWatch
    _best_level: BestLevel
    _last_step: int
    _interval: int
    _step_s: float
    _config: Any

    @property
    def _level(self) -> LevelConfig:
        level: LevelConfig = self._config.level
        return level

    @property
    def _name(self) -> str:
        """What people call the series."""
        return column_words(self._config.metric)

    def _rows_of_steps(self, counts: FrameCounts) -> dict[str, int]:
        points, not_finite = counts[self._config.metric], counts[NOT_FINITE[self._config.metric]]
        not_measured = max(counts[TRAIN] - points - not_finite, 0)
        others = {LeftOut.NOT_FINITE: not_finite, LeftOut.NOT_MEASURED: not_measured}
        return split(points, 0, self._level.warm_points) | others

    def suspects(self, frame: Frame) -> Sequence[Suspect]:
        """The distance of a point, the sum of high points and the climb from half of their thresholds on; and how long
        a jump has lasted.
        """
        if frame.step != self._last_step or self._config.metric not in frame.values:
            return ()
        watch, level, found = self._watch, self._level, []
        if self.kind is Kind.LOSS_DIVERGENCE:
            if watch.is_open and not watch.lasting:
                found.append(self._lasted())
            if self._best_level.near:
                found.append(self._risen())
        elif watch.score >= level.jump_sigmas / 2 and watch.ready and not watch.is_open:
            value = typical(frame, self._config.metric) or 0.0
            found.append(Suspect(WHOLE_JOB, Statistic.DISTANCE, watch.score, level.jump_sigmas, 1, value))
        if watch.high_sum >= level.drift_limit / 2 and not watch.is_open:
            found.append(self._sum(typical(frame, self._config.metric) or 0.0))
        return found

    def before(self, crossed: Suspect, step: int, time_s: float) -> list[Suspicion]:
        """The points of the level before a point that jumped, with their steps counted back."""
        if crossed.statistic is not Statistic.DISTANCE:
            return []
        values = self._watch.recent
        back = [self._interval * (len(values) - place) for place in range(len(values))]
        return [
            Suspicion(step - steps, time_s - steps * self._step_s, crossed._replace(value=score, size=value, rows=0))
            for steps, (value, score) in zip(back, values, strict=True)
        ]

    def _lasted(self) -> Suspect:
        points = self._watch.episode_points
        return Suspect(WHOLE_JOB, Statistic.LASTED, points, self._level.lasting_points, points, self._watch.newest)

    def _sum(self, value: float) -> Suspect:
        watch = self._watch
        return Suspect(WHOLE_JOB, Statistic.SUM, watch.high_sum, self._level.drift_limit, watch.high_points, value)

    def _risen(self) -> Suspect:
        best_level = self._best_level
        least = best_level.least * best_level.share / best_level.excess if best_level.excess else best_level.least
        return Suspect(WHOLE_JOB, Statistic.LEFT_LEVEL, best_level.share, least, 1, 1.0 + best_level.share)

    def crossed(self, finding: Finding) -> Suspect | None:
        """The climb, the jump that lasted, the sum or the distance: whichever decided."""
        watch, level, reported = self._watch, self._level, finding.evidence
        if "best" in reported:
            return self._risen()
        if self.kind is Kind.LOSS_DIVERGENCE and watch.high_points <= level.drift_run_points:
            return self._lasted()
        if watch.score < level.jump_sigmas and watch.high_sum >= level.drift_limit:
            return self._sum(float(reported["value"]))
        far = level.jump_sigmas if watch.score >= level.jump_sigmas else level.ratio_sigmas
        return Suspect(WHOLE_JOB, Statistic.DISTANCE, watch.score, far, 1, float(reported["value"]))

    def needed(self, crossed: Suspect, rows: int) -> float | None:
        """The mean of the curve that would have been reported."""
        return self._watch.least_rise(rows) if crossed.statistic is Statistic.SUM else None

    def detectable(self) -> Sequence[Detectable]:
        """One point that jumps, a rise that lasts, and a climb too slow for the level."""
        watch, best_level = self._watch, self._best_level
        if not watch.ready:
            return ()
        noise, found = watch.scale, []
        if self.kind is not Kind.LOSS_DIVERGENCE:
            found.append(Detectable(f"a jump of the {self._name}", "value", noise, ((1, watch.least_jump()),)))
        if self.kind is not Kind.LOSS_SPIKE:
            sizes = tuple((rows, watch.least_rise(rows)) for rows in DETECTABLE_ROWS)
            found.append(Detectable(f"a lasting rise of the {self._name}", "value", noise, sizes))
        if self.kind is Kind.LOSS_DIVERGENCE and best_level.ready:
            sizes = ((best_level.sustained_rows, best_level.best + best_level.least),)
            found.append(Detectable(f"a slow climb of the {self._name}", "value", noise, sizes))
        return found


PEAKED = " It peaked at "
BEST = "its best lasting level"
RENEWALS_MAX = 64
"""Changes that are remembered until the rows of their step come."""
PACE_POINTS = 32
"""Points over which the duration of a step is averaged."""


@dataclass(frozen=True, slots=True)
class CurveConfig:
    """Which series is watched, and how."""

    metric: str = "loss"
    level: LevelConfig = field(default_factory=LevelConfig)
    mild_ratio: float = 1.5
    """A jump below this multiple of the level is `info`."""
    low_share: float = 0.05
    """A jump that stays below this share of the highest level that the curve has had is `info`: it has learned far more
    than that, and the less is left the more single batches differ."""
    slight_share: float = 0.2
    """A lasting rise below this share of `LevelWatch.measure` is `info`."""
    brief_s: float = 60.0
    """A younger lasting rise is `info`, since it may pass by itself, as humps of an optimizer do ..."""
    sure_ratio: float = 3.0
    """... unless it has reached this multiple of the level."""
    retell_factor: float = 3.0
    """An excess this many times the reported one is reported again."""
    best_level: BestLevelConfig = field(default_factory=BestLevelConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    growth: GrowthConfig = field(default_factory=GrowthConfig)
    peaks: PeakConfig = field(default_factory=PeakConfig)
    peaks_before_points: int = 32
    """Peaks within this many points before the onset of a divergence are part of it; as many as the level's median."""


class CurveDetector(ExplainedCurve):
    """One kind's view of one series; scope "job"."""

    STATE: ClassVar[str] = (
        "lockstep _watch _best_level _schedule _peaks _growth _interval _last_step _last_s _step_s _launched _renewed "
        "_renewals _new_level"
    )

    def __init__(self, kind: Kind, config: CurveConfig) -> None:
        self.kind = kind
        super().__init__()
        self.name = kind.value
        self.version = 15
        self._config = config
        self._watch = LevelWatch(config.level)
        self._best_level = BestLevel(config.best_level)
        self._schedule = Schedule(config.schedule)
        self._peaks = Peaks(config.peaks)
        self._growth = Growth(config.growth)
        self._interval = 1
        """Steps from one logged point to the next."""
        self._last_step = -1
        self._last_s = 0.0
        self._step_s = 0.0
        """Recent average of the seconds from one step to the next."""
        self._launched = False
        """True until the first point of this launch."""
        self._renewed = -1
        """The step of the newest change with which the curve has begun anew."""
        self._renewals: list[list[Any]] = []
        """Changes that are still to come: the step of each, and what it is."""
        self._new_level = NewLevel()

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:
        self._watch.minimized = start.topology.optimizers <= 1
        if new_attempt:
            self._renewed, self._renewals = -1, []
            self._launched = self._launched or new_launch
            self._watch.restart()
            self._best_level.accept()
            self._schedule.clear()
            self._peaks.clear()
            self._growth.clear()
            self._new_level.clear()
            self._last_step = -1
        return ()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        change = change_in(occurrence, self.attempt)
        if change is not None:
            # The event comes before or after the rows of its step, and from several ranks.
            known = 0 <= change.step <= self._renewed or any(step == change.step for step, _ in self._renewals)
            if not known and len(self._renewals) < RENEWALS_MAX:
                self._renewals.append([change.step, change.what])
            return self._begin_anew(self._last_step)
        if occurrence.kind == "accepted" and self.kind.value in occurrence.fields.get("kinds", ()):
            self._watch.accept()
            self._best_level.accept()
            self._growth.clear()
            self._new_level.clear()
            return self.episodes.close_all(self.now_s, f"The level of the {self._name} was accepted.")
        return ()

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        if frame.kind is not StepKind.TRAIN:
            return ()
        return [*self._begin_anew(frame.step), *self._evaluate(frame)]

    def _begin_anew(self, step: int) -> Sequence[Finding]:
        """Begin a new curve if a change has come by this step; mark what is open, which is no reason to end it."""
        if not self._renewals:
            return ()
        due = [Changed(what, first) for first, what in self._renewals if first <= step]
        if not due:
            return ()
        self._renewed = max(self._renewed, *(change.step for change in due))
        self._renewals = [one for one in self._renewals if one[0] > step]
        marked = self.episodes.mark(WHOLE_JOB, due[-1].what, due[-1].step) if WHOLE_JOB in self.episodes else []
        if marked:
            self._new_level.begin(self._watch.level)
        if not marked or self._is_explained(due[-1]):
            if self._watch.ready:
                self._growth.begin(self._watch.usual, self._watch.measure, max(due[-1].step, 0))
            self._restart()
        return marked

    def _restart(self) -> None:
        self._watch.restart(fresh=True)
        self._best_level.clear()
        self._peaks.clear()

    def _is_explained(self, change: Changed) -> bool:
        """Whether the open episode began with the change: its event came after the rows of its step."""
        reported = self.episodes.reported(WHOLE_JOB)
        return reported["onset_step"] >= change.step >= 0 and "best" not in reported["evidence"]

    def _learn_declared(self, value: float, step: int) -> list[Finding]:
        """End an episode in which a change was declared, once the curve has stayed at a new level."""
        if not (self._new_level and WHOLE_JOB in self.episodes):
            self._new_level.clear()
            return []
        watch, logarithmic = self._watch, self._level.logarithmic
        unit = 1.0 if logarithmic else watch.measure
        least_rise = max(watch.scale, self._config.best_level.share_min * unit)
        level = self._new_level.push(math.log(value) if logarithmic else value, least_rise)
        if level is None:
            return []
        level = math.exp(level) if logarithmic else level
        self._new_level.clear()
        self._growth.clear()
        self._restart()
        summary = f"The {self._name} has stayed at a new level of {level:.4g} since a change was declared."
        return self.episodes.close(WHOLE_JOB, step, self.now_s, summary)

    def _look_at_growth(self, value: float, frame: Frame) -> list[Finding]:
        """Report a loss that grows tenfold while the level after a declared change is not known yet."""
        if self._watch.ready and not self._watch.settling.young:
            self._growth.clear()
        growth = self._growth
        if not growth.push(value) or WHOLE_JOB in self.episodes or not (self._watch.minimized and self.lockstep):
            return []
        self._new_level.begin(value)
        return self.episodes.open(
            WHOLE_JOB,
            attempt=self.attempt,
            severity=Severity.WARNING,
            onset_step=growth.step,
            detected_step=frame.step,
            onset_time_s=self.now_s - self._lasted_s(frame, growth.step),
            detected_time_s=self.now_s,
            score=growth.excess,
            confidence=0.8,
            summary=f"The {self._name} has grown since a change was declared in step {growth.step}; in step "
            f"{frame.step} it is {growth.now:.4g}, {self._above(growth.now, growth.level, 'the level before,')}.",
            evidence={
                "metric": self._config.metric,
                "value": growth.now,
                "usual": growth.level,
                "declared_step": growth.step,
            },
        )

    def _evaluate(self, frame: Frame) -> Sequence[Finding]:
        self._heed(self._schedule.push(frame))
        if frame.step <= self._last_step:
            return ()
        value = typical(frame, self._config.metric)
        if value is None or (value <= 0 and self._config.level.logarithmic):
            return ()
        if self._last_step >= 0:
            self._interval = frame.step - self._last_step
            newest_s = (self.now_s - self._last_s) / self._interval
            self._step_s += (newest_s - self._step_s) / PACE_POINTS if self._step_s else newest_s
        self._last_step, self._last_s = frame.step, self.now_s
        if self._launched:
            self._launched = False
            self._watch.restart(fresh=frame.step < self._config.level.warm_points)
        turn = self._watch.push(value, frame.step)
        findings = self._report(turn, value, frame) if turn is not None else self._escalate(value, frame)
        if self.kind is Kind.LOSS_DIVERGENCE:
            self._best_level.push(value, frame.step, self._watch.measure or abs(value) or 1.0)
            findings = [*findings, *self._rise(frame), *self._look_at_growth(value, frame)]
            peaked = self._peaks.push(frame.step, value, self._watch.scale)
            if WHOLE_JOB in self.episodes and (peaked or any(one.change is Change.OPEN for one in findings)):
                findings = self._with_peaks(findings)
        return [*findings, *self._learn_declared(value, frame.step)]

    def _with_peaks(self, findings: list[Finding]) -> list[Finding]:
        """Add the spikes within an open divergence, and just before it, with their step and height."""
        reported = self.episodes.reported(WHOLE_JOB)
        peaks = self._peaks.since(reported["onset_step"] - self._config.peaks_before_points * self._interval)
        if not peaks:
            return findings
        evidence, newest = {**reported["evidence"], "spikes": peaks}, peaks[-1]
        if any(newest["value"] < peak["value"] for peak in reported["evidence"].get("spikes", ())):
            self.episodes.note(WHOLE_JOB, evidence)
            return findings
        summary = f"{reported['summary'].split(PEAKED)[0]}{PEAKED}{newest['value']:.4g} in step {newest['step']}."
        reported_now = {"evidence": evidence, "summary": summary, "detected_time_s": self.now_s}
        return [*findings, *self.episodes.update(WHOLE_JOB, **reported_now)]

    def _heed(self, declared: Declared | None) -> None:
        """Reset what a logged change of the schedule explains."""
        if declared is not None:
            self._best_level.clear()
        if declared is Declared.SHARP:
            self._watch.settling.clear()

    def _rise(self, frame: Frame) -> Sequence[Finding]:
        """Report that the loss has left its best level, then its growth and its end."""
        best_level = self._best_level
        if WHOLE_JOB not in self.episodes:
            # Without lockstep the median is over other ranks in each frame, so its slow changes mean nothing.
            kept_up = self._watch.minimized and self.lockstep
            return self._open_rise(frame) if best_level.left and kept_up else ()
        reported = self.episodes.reported(WHOLE_JOB)
        if self._watch.is_open or "best" not in reported["evidence"]:
            return ()
        if best_level.back:
            return self.episodes.close(
                WHOLE_JOB, frame.step, self.now_s, f"The {self._name} is back at its best level."
            )
        grown = best_level.excess >= self._config.retell_factor * (reported["evidence"]["value"] - best_level.best)
        severity = max(Severity(reported["severity"]), self._severity_of_rise(frame), key=GRAVITY.index)
        if not grown and severity == reported["severity"]:
            return ()
        return self._report_rise(frame, severity)

    def _severity_of_rise(self, frame: Frame) -> Severity:
        config, share = self._config, self._best_level.share
        brief = self._lasted_s(frame, self._best_level.onset_step) < config.brief_s and share < config.sure_ratio - 1
        return Severity.INFO if brief or share < config.slight_share else Severity.WARNING

    def _lasted_s(self, frame: Frame, onset_step: int | None) -> float:
        """Seconds since a step, by the recent duration of steps; 0 if the step is unknown."""
        return 0.0 if onset_step is None else (frame.step - onset_step) * self._step_s

    def _report_rise(self, frame: Frame, severity: Severity) -> list[Finding]:
        return self.episodes.update(
            WHOLE_JOB,
            severity=severity,
            detected_step=frame.step,
            detected_time_s=self.now_s,
            score=self._score_of_rise(),
            summary=self._sentence_of_rise(),
            evidence={**self.episodes.reported(WHOLE_JOB)["evidence"], **self._evidence_of_rise()},
        )

    def _open_rise(self, frame: Frame) -> list[Finding]:
        onset = self._best_level.onset_step
        return self.episodes.open(
            WHOLE_JOB,
            attempt=self.attempt,
            severity=self._severity_of_rise(frame),
            onset_step=frame.step if onset is None else onset,
            detected_step=frame.step,
            onset_time_s=self.now_s,
            detected_time_s=self.now_s,
            score=self._score_of_rise(),
            confidence=0.8,
            summary=self._sentence_of_rise(),
            evidence={"metric": self._config.metric, **self._evidence_of_rise()},
        )

    def _evidence_of_rise(self) -> dict[str, Any]:
        best_level = self._best_level
        return {"value": best_level.now, "best": best_level.best, "share": best_level.share, "least": best_level.least}

    def _score_of_rise(self) -> float:
        return self._best_level.excess / (self._watch.scale or self._best_level.least)

    def _sentence_of_rise(self) -> str:
        best_level = self._best_level
        since = f" since step {best_level.onset_step}" if best_level.onset_step is not None else ""
        above = self._above(best_level.now, best_level.best, BEST)
        return f"The {self._name} has climbed{since}: {best_level.now:.4g}, {above}."

    def _escalate(self, value: float, frame: Frame) -> Sequence[Finding]:
        """Report an open rise again each time its excess has tripled, or its severity has risen."""
        if WHOLE_JOB not in self.episodes or not self._watch.is_open:
            return ()
        reported = self.episodes.reported(WHOLE_JOB)
        usual, before = self._watch.usual, reported["evidence"]["value"]
        grown = value - usual >= self._config.retell_factor * max(abs(before - usual), self._watch.scale)
        severity = self._graver(Severity(reported["severity"]), frame)
        if not grown and severity == reported["severity"]:
            return ()
        value = value if grown else self._watch.newest
        how = "keeps growing" if grown else f"has been high since step {self._watch.onset_step}"
        peaked = "".join(reported["summary"].partition(PEAKED)[1:])
        return self.episodes.update(
            WHOLE_JOB,
            severity=severity,
            detected_step=frame.step,
            detected_time_s=self.now_s,
            score=self._watch.score,
            confidence=max(reported["confidence"], self._confidence),
            summary=f"The {self._name} {how}: {value:.4g} in step {frame.step}, {self._above_usual(value)}.{peaked}",
            evidence={**reported["evidence"], **self._evidence(value)},
        )

    def _graver(self, reported: Severity, frame: Frame) -> Severity:
        """The severity of an open rise by its newest points; never lower than reported."""
        if not self._watch.lasting:
            return reported
        return max(reported, self._severity(Turn.LASTING, self._watch.newest, frame), key=GRAVITY.index)

    def _report(self, turn: Turn, value: float, frame: Frame) -> Sequence[Finding]:
        begins = {
            Kind.LOSS_SPIKE: turn is Turn.JUMP,
            Kind.LOSS_DIVERGENCE: turn is Turn.LASTING,
            Kind.GRAD_NORM: turn in (Turn.JUMP, Turn.LASTING),
        }[self.kind]
        if turn is Turn.LASTING:
            value = self._watch.newest
        if begins and WHOLE_JOB not in self.episodes:
            return self._open(turn, value, frame)
        if WHOLE_JOB not in self.episodes:
            return ()
        if self.kind is Kind.LOSS_DIVERGENCE:
            return self._turned(turn, value, frame)
        if turn is Turn.JUMP:  # of the curve since a declared change
            return ()
        if turn is Turn.LASTING:
            if self.kind is Kind.GRAD_NORM:
                severity = self._graver(Severity(self.episodes.reported(WHOLE_JOB)["severity"]), frame)
                return self.episodes.update(WHOLE_JOB, severity=severity, summary=self._sentence(turn, value, frame))
            return self.episodes.close(
                WHOLE_JOB, frame.step, self.now_s, f"The {self._name} did not come back: it diverges."
            )
        return self._close(turn, value, frame)

    def _close(self, turn: Turn, value: float, frame: Frame) -> Sequence[Finding]:
        how = "is back at its level" if turn is Turn.BACK else f"has settled at a new level of {value:.4g}"
        summary = f"The {self._name} {how} in step {frame.step}."
        if turn is Turn.BACK and self._watch.is_usual:
            summary += f" It has come back {self._watch.excursions.count} times: such jumps are not reported any more."
        return self.episodes.close(WHOLE_JOB, frame.step, self.now_s, summary)

    def _turned(self, turn: Turn, value: float, frame: Frame) -> Sequence[Finding]:
        """Update or close an open divergence: it is over only once it is over both by the level and by the anchor."""
        reported = self.episodes.reported(WHOLE_JOB)
        risen = "best" in reported["evidence"]
        if turn is Turn.JUMP:
            return ()
        if turn is Turn.LASTING:
            return self.episodes.update(
                WHOLE_JOB,
                severity=max(Severity(reported["severity"]), self._severity(turn, value, frame), key=GRAVITY.index),
                detected_step=frame.step,
                detected_time_s=self.now_s,
                confidence=max(reported["confidence"], self._confidence),
                summary=self._sentence(turn, value, frame),
                evidence={**reported["evidence"], **self._evidence(value)},
            )
        if turn is Turn.SETTLED and self._new_level:  # it ends with the level since the change
            return ()
        if turn is Turn.SETTLED and self._best_level.left:
            return self._report_rise(frame, Severity(reported["severity"]))
        if risen and not self._best_level.back:
            return ()
        self._best_level.pass_over()
        return self._close(turn, value, frame)

    def _open(self, turn: Turn, value: float, frame: Frame) -> list[Finding]:
        watch = self._watch
        onset = watch.onset_step if watch.onset_step is not None else frame.step
        return self.episodes.open(
            WHOLE_JOB,
            attempt=self.attempt,
            severity=self._severity(turn, value, frame),
            onset_step=onset,
            detected_step=frame.step,
            onset_time_s=self.now_s - self._lasted_s(frame, onset),
            detected_time_s=self.now_s,
            score=watch.score,
            confidence=self._confidence,
            summary=self._sentence(turn, value, frame),
            evidence={"metric": self._config.metric, **self._evidence(value)},
        )

    @property
    def _confidence(self) -> float:
        """The confidence grows with the distance from the trend; it stays below 1, since the script may have changed
        its data.
        """
        return min(0.95, (0.7 if self._watch.lasting else 0.5) + max(self._watch.score, 0.0) / 50)

    def _evidence(self, value: float) -> dict[str, Any]:
        watch = self._watch
        return {
            "value": value,
            "usual": watch.usual,
            "scale": watch.scale,
            "score": watch.score,
            "rising": watch.rising,
        }

    def _severity(self, turn: Turn, value: float, frame: Frame) -> Severity:
        config, watch, excess = self._config, self._watch, value - self._watch.usual
        if (watch.settling.young and not watch.ran_away) or (turn is Turn.JUMP and watch.repeats):
            return Severity.INFO
        if turn is Turn.JUMP and value < config.low_share * watch.settling.highest:
            return Severity.INFO
        sure = excess >= (config.sure_ratio - 1) * watch.measure
        brief = self._lasted_s(frame, watch.onset_step) < config.brief_s
        if turn is Turn.LASTING and brief and not sure:
            return Severity.INFO
        mild = abs(excess) < (config.mild_ratio - 1) * abs(watch.usual)
        if self.kind is Kind.LOSS_DIVERGENCE:
            if excess < config.slight_share * watch.measure:
                return Severity.INFO
            return Severity.WARNING if mild else Severity.CRITICAL
        return Severity.INFO if mild or (self.kind is Kind.GRAD_NORM and turn is Turn.JUMP) else Severity.WARNING

    def _sentence(self, turn: Turn, value: float, frame: Frame) -> str:
        above = self._above_usual(value)
        if turn is Turn.JUMP and value < self._watch.usual:  # told late, between high points
            peak, since = self._watch.peak, self._watch.onset_step
            return f"The {self._name} has jumped up to {peak:.4g} since step {since}, {self._above_usual(peak)}."
        if turn is Turn.JUMP and self._watch.onset_step in (None, frame.step):
            return f"The {self._name} jumped to {value:.4g} in step {frame.step}, {above}."
        how = "jumped in" if turn is Turn.JUMP else f"has {'grown' if self._watch.ran_away else 'been high'} since"
        return f"The {self._name} {how} step {self._watch.onset_step}; in step {frame.step} it is {value:.4g}, {above}."

    def _above_usual(self, value: float) -> str:
        return self._above(value, self._watch.usual, "its lowest" if self._watch.ran_away else "its usual")

    def _above(self, value: float, base: float, words: str) -> str:
        """How far a value is above a level; a ratio only where the level is clearly above zero."""
        sure = self._level.logarithmic or self._watch.ran_away
        proper = base > 0.0 and (sure or base >= self._level.ratio_level_sigmas * self._watch.scale)
        ratio = value / base if proper else 0.0
        if ratio >= 2.0:
            return f"{ratio:,.{0 if ratio >= 9.95 else 1}f} times {words} {base:.4g}"
        if ratio >= 1.01:
            return f"{(ratio - 1) * 100:.0f} % above {words} {base:.4g}"
        return f"{words} is {base:.4g}"
