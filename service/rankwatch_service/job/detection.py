"""The detection pipeline of one job: observations in, updates of incidents out. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Final

from rankwatch_detectors.base import AttemptStart, Change, Detector, Finding, Frame, Observation, Tick
from rankwatch_detectors.explanation import by_deadline, has_deadline, judged
from rankwatch_detectors.metric_rule import RULES_PER_JOB_MAX, MetricRule
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.explanation import explain
from rankwatch_service.incidents.transition import Update
from rankwatch_service.job.detector_bank import DetectorAnswer, DetectorBank, Failure
from rankwatch_service.job.timed_frames import TimedFrames
from rankwatch_service.job.topology_state import TopologyState
from rankwatch_service.tuning import DEFAULT, Tuning, TuningSet

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
        self._answers: deque[DetectorAnswer] = deque()
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
            self._answers.extend(self._bank.judge([list(self._timed.observe(one)) for one in together]))
        answer = self._answers.popleft()
        findings = answer.findings
        if not self._tuning.is_default:
            findings = [self._with_version(finding) for finding in findings]
        told = self.correlator.judge(findings, topology_state) if findings else []
        if findings:
            explain(told, [*answer.reasons, *map(by_deadline, filter(has_deadline, findings))])
        if isinstance(observation, Frame) and observation.family == "steps" and not observation.late:
            told += self.correlator.progress(observation.attempt, observation.step, observation.time_s)
        if isinstance(observation, Tick):
            told += self.correlator.settle(observation.now_s)
        return told, answer.failures

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
        """Let the job's tuning hold from the next observation on; detectors keep what they have learned.

        Returns:
            Whether it is another one than before.
        """
        before, self._tuning = self._tuning, tunings.of(self._job)
        self._tuning_version = tunings.version
        if self._tuning.says_the_same_as(before):
            return False
        self._bank.retune(partial(self._make_detectors, self._tuning.config))
        return True

    def rest(self) -> None:
        """Replace the detectors by new ones, which inherit what is always true of the job. Incidents stay."""
        self._bank.rest()
        self._timed = TimedFrames()

    def state(self) -> dict[str, Any]:
        """Everything that decides the future: JSON types, bytes and arrays. Copy it before the next call."""
        return {
            "bank": self._bank.state(),
            "timed": self._timed.state(),
            "correlator": self.correlator.state(),
            "trails": self._bank.trails.snapshot(),
            # Decides nothing: it is what the api reads of a job of which nothing is reported.
            JUDGED: judged(self._bank.explained, self._bank.trails.counts),
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
        self._bank.trails.restore(state["trails"])
        self.correlator.restore(state["correlator"])
        return without_snapshot


def room_beside(observation: Observation) -> int:
    """How many observations may be judged together with this one, if frames have as many ranks as it has."""
    if isinstance(observation, AttemptStart):
        return 0
    ranks = observation.ranks if isinstance(observation, Frame) else 1
    return max(min(TOGETHER_MAX, RANKS_TOGETHER_MAX // max(ranks, 1)) - 1, 0)
