"""The detectors of one job. A detector that raises is counted, reported and replaced; the stream goes on. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankwatch_detectors.base import AttemptStart, Detector, Finding, Frame, Observation
from rankwatch_detectors.explanation import ExplainedDetector, FrameCounts, Trails

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
    """Of this detector in this job so far."""
    off: bool
    """Whether it was switched off."""


@dataclass(frozen=True, slots=True)
class DetectorAnswer:
    """What the detectors say of one observation, in the order of the catalogue."""

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
        self.trails = Trails()

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

    def judge(self, groups: Sequence[Sequence[Observation]]) -> list[DetectorAnswer]:
        """Pass observations to all detectors, in groups that have one answer each; returns the answers.

        Each detector judges all of them before the next detector does: a frame of few ranks is judged in less time than
        it takes to load the code of all detectors into the processor's caches. The start of an attempt comes alone.
        """
        answers = [DetectorAnswer() for _ in groups]
        given = [(one, answer) for group, answer in zip(groups, answers, strict=True) for one in group]
        for observation, _ in given:
            if isinstance(observation, AttemptStart):
                self._start = observation
        counts = self.trails.count([observation for observation, _ in given])
        for name in self._detectors:
            for (observation, answer), counted in zip(given, counts, strict=True):
                if self._failures.get(name, 0) >= FAILURES_MAX:
                    break
                self._judge(name, observation, counted, answer)
        return answers

    def _judge(self, name: str, observation: Observation, counts: FrameCounts, answer: DetectorAnswer) -> None:
        detector = self._detectors[name]
        try:
            findings = detector.observe(observation)
        except _OF_THE_PROCESS:
            raise
        except BaseException as error:  # noqa: BLE001 - a panic in River's Rust code is not an Exception
            answer.failures.append(self._fail(name, error))
            return
        answer.findings.extend(findings)
        if isinstance(observation, Frame) and isinstance(detector, ExplainedDetector):
            try:
                answer.reasons.extend(self.trails.take(detector, observation, findings, counts))
            except Exception as error:  # noqa: BLE001 - what only explains must not stop detection
                self.trails.forget(name)
                answer.failures.append(Failure("explanation", f"{type(error).__name__}: {error}"[:500], 1, False))

    def rest(self) -> None:
        """Replace the detectors by new ones, which inherit what is always true of the job."""
        before = self._detectors
        self._detectors = {detector.name: detector for detector in self._make()}
        for name, detector in self._detectors.items():
            detector.inherit(before[name])
        self._failures, self._start, self.trails = {}, None, Trails()

    def retune(self, make: Callable[[], Sequence[Detector]]) -> None:
        """Replace the detectors by those of another configuration, which go on from the state of those before."""
        state = self.state()
        self._make = make
        self._detectors = {detector.name: detector for detector in make()}
        self.restore(state, self._start)

    def state(self) -> dict[str, Any]:
        """Snapshots of all detectors with their versions."""
        return {
            name: {
                "version": detector.version,
                "failures": self._failures.get(name, 0),
                "state": detector.snapshot(),
            }
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
