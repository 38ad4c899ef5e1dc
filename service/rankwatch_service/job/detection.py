"""The detection pipeline of one job: observations in, updates of incidents out. Pure.

Joins what devices measure of a step, which arrives some steps late, with the rest of the step.

Detectors that judge times need both: the phases of the host and the times of the device. In jobs whose devices measure
steps they get them together, as a frame of the family "timed"; a frame of the family "steps" then says that it will
come (`Frame.awaits_times`). Detectors that judge anything else are not kept waiting.

The detectors of one job. A detector that raises is counted, reported and replaced; the stream goes on.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Final

import numpy as np

from rankwatch_detectors.base import AttemptStart, Bools, Change, Detector, Finding, Frame, Observation, StepKind, Tick
from rankwatch_detectors.explanation import ExplainedDetector, StatisticHistories, by_deadline, has_deadline, judged
from rankwatch_detectors.metric_rule import RULES_PER_JOB_MAX, MetricRule
from rankwatch_detectors.metrics import DEVICE_TIMES, is_of_host
from rankwatch_service.incidents.correlator import Correlator, explain
from rankwatch_service.incidents.model import Update
from rankwatch_service.job.topology_state import TopologyState
from rankwatch_service.tuning import DEFAULT, Tuning, TuningSet

HELD_MAX: Final = 64
"""Steps that wait for their device times: what ranks have in flight (8 steps) and agents have not sent (a second). Of
16,384 ranks 64 steps take 96 MB."""
HELD_CELLS_MAX: Final = 12 * 1024 * 1024
"""Values that wait, 9 bytes each: the oldest steps of jobs with very many ranks or phases are judged no more."""
EXPECTED_STEPS: Final = 128
"""After so many steps without device times none are expected any more, and steps are judged by their host's times."""

_MARK: Final = "device_step_s"


class TimedFrames:
    """The steps of one job that wait for their device times."""

    def __init__(self) -> None:
        self._attempt = ""
        self._lockstep = True
        self._held: dict[int, Frame] = {}
        """In step order; device times are added as they come."""
        self._without = EXPECTED_STEPS
        """Steps since the newest timed frame."""
        self._newest = -1
        """The newest step."""

    def observe(self, observation: Observation) -> Iterator[Observation]:
        """Pass an observation on, and after it the frames that it completes."""
        if isinstance(observation, AttemptStart):
            self._begin(observation)
        if not isinstance(observation, Frame) or not self._lockstep:
            yield observation
        elif observation.family == "steps":
            yield observation if observation.late else self._hold(observation)
        else:
            yield observation
            if _MARK in observation.values:
                yield from self._add(observation)

    def _begin(self, start: AttemptStart) -> None:
        if start.attempt != self._attempt:
            self._held, self._without, self._newest = {}, EXPECTED_STEPS, -1
        self._attempt, self._lockstep = start.attempt, start.topology.lockstep
        for step in [step for step, frame in self._held.items() if _ranks(frame) != start.topology.world_size]:
            del self._held[step]

    def _hold(self, frame: Frame) -> Frame:
        self._without += 1
        self._newest = frame.step
        if self._without > EXPECTED_STEPS:
            self._held.clear()
            return frame
        self._held[frame.step] = _slim(frame)
        while len(self._held) > HELD_MAX or _cells(self._held.values()) > HELD_CELLS_MAX:
            del self._held[min(self._held)]
        return dataclasses.replace(frame, awaits_times=True)

    def _add(self, late: Frame) -> Iterator[Frame]:
        """Add device times to their step, and give out what is complete, in step order.

        A frame that came in time has all that ranks are known to report. Of others, as where a rank's values come in
        several messages, more may follow, until they do for a later step.
        """
        if late.step not in self._held:
            # None are expected so far, unless they come too late for any step to wait for them.
            if self._without >= EXPECTED_STEPS and late.step > self._newest - HELD_MAX:
                self._without = 0
            return
        held = self._held[late.step] = _joined(self._held[late.step], late)
        whole = not late.late or bool(np.all(held.present[_MARK] | ~_reported(held)))
        for step in [step for step in sorted(self._held) if step < late.step or (whole and step == late.step)]:
            frame = self._held.pop(step)
            if frame.family == "timed":
                self._without = 0
                yield frame

    def state(self) -> dict[str, Any]:
        """Everything that decides the future: JSON types and arrays. Copy it before the next call."""
        held = [
            {
                "family": frame.family,
                "step": frame.step,
                "kind": frame.kind.value,
                "time_s": frame.time_s,
                "finite": frame.finite,
                "values": dict(frame.values),
                "present": dict(frame.present),
            }
            for frame in self._held.values()
        ]
        return {
            "attempt": self._attempt,
            "lockstep": self._lockstep,
            "without": self._without,
            "newest": self._newest,
            "held": held,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` gave."""
        self._attempt, self._lockstep = state["attempt"], state["lockstep"]
        self._without, self._newest = state["without"], state["newest"]
        frames: Sequence[Mapping[str, Any]] = state["held"]
        self._held = {
            one["step"]: Frame(
                self._attempt,
                one["family"],
                one["step"],
                StepKind(one["kind"]),
                one["time_s"],
                one["values"],
                one["present"],
                finite=one["finite"],
            )
            for one in frames
        }


def _slim(frame: Frame) -> Frame:
    """The part of a frame that detectors of times need."""
    names = [name for name in frame.values if is_of_host(name)]
    values = {name: frame.values[name] for name in names}
    present = {name: frame.present[name] for name in names}
    return dataclasses.replace(frame, values=values, present=present, exact={})


def _joined(held: Frame, late: Frame) -> Frame:
    values, present = dict(held.values), dict(held.present)
    for name in [name for name in late.values if name in DEVICE_TIMES]:
        if name in values:
            values[name] = np.where(late.present[name], late.values[name], values[name])
            present[name] = present[name] | late.present[name]
        else:
            values[name], present[name] = late.values[name], late.present[name]
    return dataclasses.replace(
        held,
        family="timed",
        time_s=max(held.time_s, late.time_s),
        values=values,
        present=present,
        finite=held.finite and late.finite,
    )


def _reported(frame: Frame) -> Bools:
    """The ranks whose row of the step has come."""
    rows = [here for name, here in frame.present.items() if name not in DEVICE_TIMES]
    return np.logical_or.reduce(rows) if rows else np.zeros(_ranks(frame), dtype=np.bool_)


def _cells(frames: Iterable[Frame]) -> int:
    return sum(len(frame.values) * _ranks(frame) for frame in frames)


def _ranks(frame: Frame) -> int:
    return next((int(here.size) for here in frame.present.values()), 0)


FAILURES_MAX: Final = 5
"""Failures after which a detector is switched off for this job, because it would fail at each observation."""

_OF_THE_PROCESS: Final = (KeyboardInterrupt, SystemExit)
"""Exceptions that end the process and are not failures of a detector."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A detector raised. It was replaced by a new one, or switched off."""

    detector: str
    error: str
    """Type and message of the exception, at most 500 characters."""
    failures: int
    """Failures of this detector in this job so far."""
    off: bool
    """Whether it was switched off."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The findings of all detectors on one observation, in the order of the catalogue."""

    findings: list[Finding] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    reasons: list[Mapping[str, Any]] = field(default_factory=list)
    """Explanations of the findings that opened."""


class DetectorBank:
    """Passes observations to all detectors, in the order of the catalogue, and keeps what explains their findings."""

    def __init__(self, make: Callable[[], Sequence[Detector]]) -> None:
        self._make = make
        self._detectors = {detector.name: detector for detector in make()}
        self._failures: dict[str, int] = {}
        self._start: AttemptStart | None = None
        self.histories = StatisticHistories()

    @property
    def off(self) -> dict[str, int]:
        """The detectors that are switched off, each with its failures."""
        return {name: failures for name, failures in self._failures.items() if failures >= FAILURES_MAX}

    @property
    def explained(self) -> list[ExplainedDetector]:
        """The detectors that can explain themselves and are not switched off."""
        off = self.off
        on = [one for name, one in self._detectors.items() if name not in off]
        return [detector for detector in on if isinstance(detector, ExplainedDetector)]

    def evaluate(self, groups: Sequence[Sequence[Observation]]) -> list[Evaluation]:
        """Pass observations to all detectors, in groups that have one answer each; returns the answers.

        Each detector judges all of them before the next detector does: a frame of few ranks is judged in less time than
        it takes to load the code of all detectors into the processor's caches. The start of an attempt comes alone.
        """
        answers = [Evaluation() for _ in groups]
        given = [(one, answer) for group, answer in zip(groups, answers, strict=True) for one in group]
        for observation, _ in given:
            if isinstance(observation, AttemptStart):
                self._start = observation
        self.histories.count([observation for observation, _ in given])
        by_type: dict[frozenset[type[Observation]], list[tuple[Observation, Evaluation]]] = {}
        for name, detector in self._detectors.items():
            if self._failures.get(name, 0) >= FAILURES_MAX:
                continue
            reads = detector.reads
            if reads not in by_type:
                by_type[reads] = [one for one in given if type(one[0]) in reads]
            self._evaluate(name, by_type[reads])
        return answers

    def _evaluate(self, name: str, given: Sequence[tuple[Observation, Evaluation]]) -> None:
        """Pass observations to one detector, until it is switched off."""
        detector = self._detectors[name]
        for observation, answer in given:
            try:
                findings = detector.observe(observation)
            except _OF_THE_PROCESS:
                raise
            except BaseException as error:  # noqa: BLE001 - a panic in another language is not an Exception
                answer.failures.append(self._fail(name, error))
                if self._failures[name] >= FAILURES_MAX:
                    break
                detector = self._detectors[name]
                continue
            if findings:
                answer.findings.extend(findings)
            if isinstance(observation, Frame) and isinstance(detector, ExplainedDetector):
                self._explain(detector, observation, findings, answer)

    def _explain(
        self, detector: ExplainedDetector, frame: Frame, findings: Sequence[Finding], answer: Evaluation
    ) -> None:
        try:
            answer.reasons.extend(self.histories.add(detector, frame, findings))
        except Exception as error:  # noqa: BLE001 - what only explains must not stop detection
            self.histories.forget(detector.name)
            answer.failures.append(Failure("explanation", f"{type(error).__name__}: {error}"[:500], 1, False))

    def rest(self) -> None:
        """Replace the detectors by new ones, which inherit what is always true of the job."""
        before = self._detectors
        self._detectors = {detector.name: detector for detector in self._make()}
        for name, detector in self._detectors.items():
            detector.inherit(before[name])
        self._failures, self._start, self.histories = {}, None, StatisticHistories()

    def retune(self, make: Callable[[], Sequence[Detector]]) -> None:
        """Replace the detectors by those of another configuration, which go on from the state of those before."""
        state = self.state()
        self._make = make
        self._detectors = {detector.name: detector for detector in make()}
        self.restore(state, self._start)

    def state(self) -> dict[str, Any]:
        """Snapshots of all detectors with their versions."""
        return {
            name: {"version": detector.version, "failures": self._failures.get(name, 0), "state": detector.snapshot()}
            for name, detector in self._detectors.items()
        }

    def restore(self, state: Mapping[str, Any], start: AttemptStart | None) -> list[str]:
        """Restore snapshots.

        Args:
            state: what `state` gave.
            start: the start of the running attempt, for detectors without a snapshot; None if there is none.

        Returns:
            Names of detectors without a snapshot: they are new, or of another version.
        """
        self._start = start
        without_snapshot = []
        for name, detector in self._detectors.items():
            saved = state.get(name)
            try:
                if saved is not None and saved["version"] == detector.version:
                    detector.restore(saved["state"])
                    self._failures[name] = saved["failures"]
                    continue
            except _OF_THE_PROCESS:
                raise
            except BaseException as error:  # noqa: BLE001 - a snapshot that cannot be read must not stop the service
                self._fail(name, error)
            without_snapshot.append(name)
            self._begin_anew(name)
        return without_snapshot

    def _fail(self, name: str, error: BaseException) -> Failure:
        count = self._failures[name] = self._failures.get(name, 0) + 1
        self._begin_anew(name)
        return Failure(name, f"{type(error).__name__}: {error}"[:500], count, count >= FAILURES_MAX)

    def _begin_anew(self, name: str) -> None:
        fresh = next(detector for detector in self._make() if detector.name == name)
        self._detectors[name] = fresh
        if self._start is not None:
            try:
                fresh.observe(self._start)
            except _OF_THE_PROCESS:
                raise
            except BaseException:  # noqa: BLE001 - a new one that fails at the start would fail for ever: switched off
                self._failures[name] = FAILURES_MAX


TOGETHER_MAX: Final = 32
"""Observations judged together; with 32, loading the code takes little of the time."""

RANKS_TOGETHER_MAX: Final = 4_096
"""Ranks in frames that are judged together: a fast cache holds their values."""

DETECTOR_OFF: Final = "detector_off."
"""Begins the reason under which the failures of a detector that is switched off are counted; its name follows."""

JUDGED: Final = "judged"
"""The part of a job's state that says what is judged of it."""

MakeDetectors = Callable[..., Sequence[Detector]]
"""Makes the detectors of a job: of a `CatalogueConfig`, or of the default one without an argument."""
RulesInForce = Callable[[], tuple[MetricRule, ...]]


class DetectionPipeline:
    """The detectors and the correlator of one job."""

    def __init__(self, job: str, make_detectors: MakeDetectors, rules: RulesInForce = tuple) -> None:
        """Begin without an attempt.

        Args:
            job: its name.
            make_detectors: makes its detectors.
            rules: returns the rules of people on its metrics; every start of an attempt brings them to the detectors.
        """
        self.correlator = Correlator(job)
        self._rules = rules
        self._rules_left_out = 0
        self._job = job
        self._make_detectors = make_detectors
        self._tuning: Tuning = DEFAULT
        self._tuning_version = 0
        self._bank = DetectorBank(make_detectors)
        self._timed = TimedFrames()
        self._answers: deque[Evaluation] = deque()
        """To what was judged together with the newest observation and is observed next."""

    @property
    def counts(self) -> Counter[str]:
        """What was left out, by reason; and the failures of each detector that is switched off (`DETECTOR_OFF`)."""
        counted = Counter({f"{DETECTOR_OFF}{name}": failures for name, failures in self._bank.off.items()})
        counted["metric_rules"] = self._rules_left_out
        return counted

    def observe(
        self, observation: Observation, topology_state: TopologyState, following: Iterable[Observation] = ()
    ) -> tuple[list[Update], list[Failure]]:
        """Take the next observation.

        Args:
            observation: the observation.
            topology_state: the topology as of it.
            following: what is observed next, one by one, up to the next start of an attempt. Detectors may judge it
                now, with the same outcome.

        Returns:
            The updates of incidents, and the failures of detectors.
        """
        if isinstance(observation, AttemptStart):
            self.correlator.begin(observation.attempt)
            observation = self._ruled(observation)
        if not self._answers:
            together = [observation, *islice(following, room_beside(observation))]
            self._answers.extend(self._bank.evaluate([list(self._timed.observe(one)) for one in together]))
        answer = self._answers.popleft()
        findings = answer.findings
        if not self._tuning.is_default:
            findings = [self._with_version(finding) for finding in findings]
        reported = self.correlator.evaluate(findings, topology_state) if findings else []
        if findings:
            explain(reported, [*answer.reasons, *map(by_deadline, filter(has_deadline, findings))])
        if isinstance(observation, Frame) and observation.family == "steps" and not observation.late:
            reported += self.correlator.progress(observation.attempt, observation.step, observation.time_s)
        if isinstance(observation, Tick):
            reported += self.correlator.resolve_ended(observation.now_s)
        return reported, answer.failures

    def _ruled(self, start: AttemptStart) -> AttemptStart:
        """The start of an attempt with the rules in force."""
        rules = self._rules()
        self._rules_left_out = max(len(rules) - RULES_PER_JOB_MAX, 0)
        return replace(start, rules=rules)

    def _with_version(self, finding: Finding) -> Finding:
        """A finding that opens, with the version of the tunings that let it."""
        if finding.change is not Change.OPEN:
            return finding
        return replace(finding, evidence={**finding.evidence, "tuning_version": self._tuning_version})

    def tune(self, tunings: TuningSet) -> bool:
        """Apply the job's tuning from the next observation on; detectors keep what they have learned.

        Returns:
            Whether it is another one than before.
        """
        before, self._tuning = self._tuning, tunings.of(self._job)
        self._tuning_version = tunings.version
        if self._tuning.has_settings_of(before):
            return False
        self._bank.retune(partial(self._make_detectors, self._tuning.config))
        return True

    def rest(self) -> None:
        """Replace the detectors by new ones, which inherit the job's permanent properties. Incidents stay."""
        self._bank.rest()
        self._timed = TimedFrames()

    def state(self) -> dict[str, Any]:
        """Everything that decides the future: JSON types, bytes and arrays. Copy it before the next call."""
        return {
            "bank": self._bank.state(),
            "timed": self._timed.state(),
            "correlator": self.correlator.state(),
            "trails": self._bank.histories.snapshot(),
            # Decides nothing: it is what the api reads of a job of which nothing is reported.
            JUDGED: judged(self._bank.explained, self._bank.histories.counts),
        }

    def restore(self, state: Mapping[str, Any], start: AttemptStart | None) -> list[str]:
        """Restore what `state` gave.

        Args:
            state: what `state` gave.
            start: the start of the running attempt, for detectors without a snapshot; None if there is none.

        Returns:
            Names of detectors without a snapshot: they are new, or of another version.
        """
        without_snapshot = self._bank.restore(state["bank"], None if start is None else self._ruled(start))
        self._timed.restore(state["timed"])
        self._bank.histories.restore(state["trails"])
        self.correlator.restore(state["correlator"])
        return without_snapshot


def room_beside(observation: Observation) -> int:
    """How many observations may be judged together with this one, if frames have as many ranks as it has."""
    if isinstance(observation, AttemptStart):
        return 0
    ranks = observation.ranks if isinstance(observation, Frame) else 1
    return max(min(TOGETHER_MAX, RANKS_TOGETHER_MAX // max(ranks, 1)) - 1, 0)
