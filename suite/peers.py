"""The rules of other projects at their defaults, beside the detectors on the same observations of the labelled suite.

NVRx's scores and thresholds are its own code (`pip install --group peers`); ADWIN is River's. The others are
re-expressed from their sources and marked so: their packages do not take recorded data, or cannot be installed beside
each other. Reports of the same subject count once until the rule has not reported it for a while.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np

from rankwatch_detectors.base import Change, Frame, Kind, Observation, Severity, StepKind, Tick
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from suite.cases import Case
from suite.scoring import BRINGS, OF_LOSS

Said = tuple[Kind, int | None]
"""A kind, and the rank that is named; None where a rule names nobody."""
LOSS_KINDS = frozenset({Kind.LOSS_SPIKE, Kind.LOSS_DIVERGENCE})


class PeerRule(Protocol):
    """One rule over one job."""

    name: str
    kinds: frozenset[Kind]
    """The kinds that it can find."""

    def observe(self, observation: Observation) -> Iterator[Said]:
        """The reports after this observation."""
        ...


class NvrxScore:
    """NVRx 0.4.1: each minute the median of each rank's section over the best rank's, below 0.75."""

    name = "NVRx 0.4.1 (its code)"
    kinds = frozenset({Kind.STRAGGLER})

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from nvidia_resiliency_ext.straggler.reporting import Report, ReportGenerator
            from nvidia_resiliency_ext.straggler.statistics import Statistic
        self._report, self._generator, self._statistic = Report, ReportGenerator, Statistic
        self._rows: list[Any] = []
        self._since_s: float | None = None

    def observe(self, observation: Observation) -> Iterator[Said]:
        if not isinstance(observation, Frame) or "busy_s" not in observation.values:
            return
        self._since_s = observation.time_s if self._since_s is None else self._since_s
        self._rows.append(observation.values["busy_s"] * 1e3)
        if observation.time_s - self._since_s < 60.0:
            return
        medians = np.median(np.stack(self._rows), axis=0)
        self._rows, self._since_s = [], observation.time_s
        reference = {"step": float(medians.min())}
        compute = self._generator._compute_sections_perf_scores
        scores = {
            rank: compute(None, {"step": {self._statistic.MED: float(median)}}, reference)["step"]
            for rank, median in enumerate(medians)
        }
        nodes = dict.fromkeys(scores, "")
        report = self._report({}, {"step": scores}, {}, {}, nodes, {}, {}, 0.0, True, 0)
        slow = report.identify_stragglers()["straggler_sections_relative"].get("step", set())
        yield from ((Kind.STRAGGLER, straggler.rank) for straggler in slow)


class TwiceTheMedian:
    """DLRover's node check: more than twice the median. DLRover runs it before training; here it runs in each step."""

    name = "DLRover 2 x median (re-expressed)"
    kinds = frozenset({Kind.STRAGGLER})

    def observe(self, observation: Observation) -> Iterator[Said]:
        if isinstance(observation, Frame) and "busy_s" in observation.values:
            busy = observation.values["busy_s"]
            yield from ((Kind.STRAGGLER, int(rank)) for rank in np.flatnonzero(busy > 2 * np.median(busy)))


class LeastWaiting:
    """TraceML: over a window of 64 steps the rank with the shortest visible backward, by a tenth of the step."""

    name = "TraceML 0.5.0 (re-expressed)"
    kinds = frozenset({Kind.STRAGGLER})

    def __init__(self) -> None:
        self._window: deque[tuple[Any, Any]] = deque(maxlen=64)

    def observe(self, observation: Observation) -> Iterator[Said]:
        if not isinstance(observation, Frame) or "wait_s" not in observation.values:
            return
        values = observation.values
        self._window.append((values["phase.backward"] + values["wait_s"], values["step_time_s"]))
        if len(self._window) < 20:
            return
        visible = np.mean([row for row, _ in self._window], axis=0)
        step = float(np.mean([row for _, row in self._window]))
        upper = float(np.sort(visible)[visible.size // 2])
        if (upper - visible.min()) / step >= 0.10:
            yield Kind.STRAGGLER, int(visible.argmin())


class AdwinPerRank:
    """Plain change-point detection: River's ADWIN on each rank's busy time over the median."""

    name = "ADWIN per rank (River)"
    kinds = frozenset({Kind.STRAGGLER})

    def __init__(self) -> None:
        self._detectors: list[Any] = []

    def observe(self, observation: Observation) -> Iterator[Said]:
        from river.drift import ADWIN

        if not isinstance(observation, Frame) or "busy_s" not in observation.values:
            return
        busy = observation.values["busy_s"]
        self._detectors = self._detectors or [ADWIN() for _ in range(busy.size)]  # type: ignore[no-untyped-call]
        for rank, value in enumerate((busy / np.median(busy)).tolist()):
            before = self._detectors[rank].estimation
            self._detectors[rank].update(value)
            if self._detectors[rank].drift_detected and self._detectors[rank].estimation > before:
                yield Kind.STRAGGLER, rank


class LossRule:
    """A rule over the job's loss."""

    kinds = LOSS_KINDS

    def __init__(self, name: str, judge: Callable[[deque[float], float, int], bool], window: int) -> None:
        self.name = name
        self._judge = judge
        self._window: deque[float] = deque(maxlen=window)
        self._count = 0

    def observe(self, observation: Observation) -> Iterator[Said]:
        if not isinstance(observation, Frame) or observation.kind is not StepKind.TRAIN:
            return
        if "loss" in observation.values:
            loss = float(np.median(observation.values["loss"]))
            if self._judge(self._window, loss, self._count):
                yield Kind.LOSS_SPIKE, None
            self._count += 1
            self._window.append(loss)


class MegatronSpike:
    """Megatron-LM: ten times the largest of the first hundred losses."""

    name = "Megatron-LM 10 x (re-expressed)"
    kinds = LOSS_KINDS

    def __init__(self) -> None:
        self._largest, self._count = 0.0, 0

    def observe(self, observation: Observation) -> Iterator[Said]:
        if isinstance(observation, Frame) and "loss" in observation.values:
            loss = float(np.median(observation.values["loss"]))
            if self._count < 100:
                self._largest, self._count = max(self._largest, abs(loss)), self._count + 1
            elif abs(loss) >= 10 * self._largest:
                yield Kind.LOSS_SPIKE, None


class Timeout:
    """No progress for so long; names nobody. `learned` = NVRx: five times the longest silence of six or more."""

    kinds = frozenset({Kind.HANG})

    def __init__(self, name: str, seconds: float, *, learned: bool = False) -> None:
        self.name = name
        self._seconds, self._learned, self._longest, self._count = seconds, learned, 0.0, 0
        self._newest, self._since_s = -1, 0.0

    def observe(self, observation: Observation) -> Iterator[Said]:
        if not isinstance(observation, Tick) or observation.presence is None:
            return
        if set(observation.presence.state) != {"running"}:
            return
        newest = int(observation.presence.step.max())
        silent_s = observation.now_s - self._since_s
        limit = 5 * self._longest if self._learned and self._count > 5 else self._seconds
        if newest > self._newest:
            self._longest, self._count = max(self._longest, silent_s), self._count + 1
            self._newest, self._since_s = newest, observation.now_s
        elif silent_s >= limit:
            yield Kind.HANG, None


def _foundry(window: deque[float], loss: float, count: int) -> bool:
    """llm-foundry: more than four in a row at twice the mean of the last hundred, or half of them above 10."""
    if count < 100:
        return False
    limit = 2 * sum(window) / len(window)
    recent = [*list(window)[-4:], loss]
    return all(value >= limit for value in recent) or sum(value > 10 for value in window) > len(window) / 2


def _lightning(window: deque[float], loss: float, count: int) -> bool:
    """Lightning: three times the running mean of ten."""
    return count > 1 and loss >= 3 * sum(window) / len(window)


def _olmo(window: deque[float], loss: float, count: int) -> bool:
    """OLMo-core: six standard deviations above the mean of the last 128."""
    if count < 64:
        return False
    mean = sum(window) / len(window)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in window) / (len(window) - 1))
    return loss > mean + 6 * deviation


def rules() -> list[PeerRule]:
    """A fresh set of all of them."""
    return [
        NvrxScore(),
        TwiceTheMedian(),
        LeastWaiting(),
        AdwinPerRank(),
        MegatronSpike(),
        LossRule("llm-foundry (re-expressed)", _foundry, 100),
        LossRule("Lightning (re-expressed)", _lightning, 10),
        LossRule("OLMo-core 6 sigma (re-expressed)", _olmo, 128),
        Timeout("NVRx learned time-out (re-expressed)", 3_600.0, learned=True),
        Timeout("DLRover 300 s (re-expressed)", 300.0),
        Timeout("NCCL watchdog 600 s (re-expressed)", 600.0),
    ]


SILENT_STEPS: Final = 100
"""Steps without a report of a subject after which another report of it counts as new."""
OURS: Final = "rankwatch"

SaidAt = tuple[Kind, int | None, int]
"""Kind, rank (None = nobody), step."""


@dataclass
class RuleScore:
    """The score of one rule on one or several cases."""

    labels: int = 0
    found: int = 0
    named: int = 0
    false: int = 0
    delays: list[int] = field(default_factory=list)

    def __iadd__(self, other: RuleScore) -> RuleScore:
        self.labels += other.labels
        self.found += other.found
        self.named += other.named
        self.false += other.false
        self.delays += other.delays
        return self

    def rank(self) -> tuple[int, int, float]:
        """Higher is better: named minus false, then found, then the delay."""
        return self.named - self.false, self.found, -sum(self.delays)

    def cells(self) -> list[str]:
        """As cells of the table."""
        delay = f"{sorted(self.delays)[len(self.delays) // 2]}" if self.delays else "-"
        return [f"{self.found}/{self.labels}", f"{self.named}/{self.labels}", delay, str(self.false)]


def beside_peers(cases: list[Case], seeds: range) -> tuple[list[list[str]], list[list[str]]]:
    """For each case our detectors, the best other rule and which is ahead; then each rule over all its cases."""
    answers = {OURS: frozenset(Kind), **{rule.name: rule.kinds for rule in rules()}}
    totals = {name: RuleScore() for name in answers}
    lines = []
    for case in cases:
        line = {name: RuleScore() for name in answers}
        for seed in seeds:
            job = case.job(seed)
            for name, said in _all_said(job).items():
                line[name] += _counted(job, said, answers[name])
        for name, count in line.items():
            totals[name] += count
        lines.append([case.name, *_compared(line)])
    return lines, [[name, *count.cells()] for name, count in totals.items()]


def reports_in(job: Job) -> dict[str, int]:
    """By rule: how much it reports in a job without a fault."""
    return {name: len(said) for name, said in _all_said(job).items()}


def _compared(line: dict[str, RuleScore]) -> list[str]:
    ours = line[OURS]
    others = {name: count for name, count in line.items() if name != OURS and (count.labels or not ours.labels)}
    if not others:
        return [*ours.cells(), "no rule answers it", "", "", "", "", OURS]
    if ours.labels:
        best = max(others, key=lambda name: others[name].rank())
    else:
        # In a case without a fault, the rule with the most false reports is compared.
        best = max(others, key=lambda name: others[name].false)
    theirs = others[best]
    if ours.rank() == theirs.rank():
        ahead = "both"
    elif ours.rank() > theirs.rank():
        ahead = OURS
    else:
        ahead = best
    return [*ours.cells(), best, *theirs.cells(), ahead]


def _all_said(job: Job) -> dict[str, list[SaidAt]]:
    """By rule: each kind and rank that it reported, with the step, once for as long as the report lasts."""
    bank, others = detectors(), rules()
    said: dict[str, list[SaidAt]] = {OURS: [], **{rule.name: [] for rule in others}}
    last: dict[tuple[str, Kind, int | None], int] = {}
    labelled = {label.kind for label in job.labels}
    labelled |= OF_LOSS if labelled & OF_LOSS else set()
    step = 0
    for observation in generate(job):
        step = observation.step if isinstance(observation, Frame) else step
        for detector in bank:
            for finding in detector.observe(observation):
                # An info-level finding pages no one: it can be right, but not false.
                disturbs = finding.severity is not Severity.INFO or finding.kind in labelled
                if finding.change is Change.OPEN and disturbs:
                    said[OURS] += [(finding.kind, rank, step) for rank in finding.ranks or (None,)]
        for rule in others:
            _listen(rule, list(rule.observe(observation)), step, said[rule.name], last)
    return said


def _listen(
    rule: PeerRule,
    now: list[tuple[Kind, int | None]],
    step: int,
    said: list[SaidAt],
    last: dict[tuple[str, Kind, int | None], int],
) -> None:
    for kind, rank in now:
        key = (rule.name, kind, rank)
        # Reports about the same rank each minute are one incident.
        if abs(step - last.get(key, -SILENT_STEPS)) >= SILENT_STEPS:
            said.append((kind, rank, step))
        last[key] = step


def _counted(job: Job, said: list[SaidAt], answers: frozenset[Kind]) -> RuleScore:
    """Counts the labels of the kinds that a rule covers, those found, those named, and the false reports."""
    count = RuleScore()
    for label in job.labels:
        if label.kind not in answers:
            continue
        kinds = OF_LOSS if label.kind in OF_LOSS else {label.kind}
        for rank in label.ranks or (None,):
            # A step that hangs is never finished; the newest finished one is the one before.
            inside = [(who, step) for kind, who, step in said if kind in kinds and step >= label.at_step - 1]
            named = [step for who, step in inside if who == rank]
            count.labels += 1
            count.found += bool(inside)
            count.named += bool(named)
            count.delays += [max(named[0] - label.at_step, 0)] if named else []
    kinds = {label.kind for label in job.labels}
    kinds |= {kind for of in kinds for kind in BRINGS.get(of, ())} | (OF_LOSS if kinds & OF_LOSS else set())
    culprits = {rank for label in job.labels for rank in label.ranks}
    before = min((label.at_step - 1 for label in job.labels), default=job.steps)
    wrong = [k not in kinds or step < before or (who is not None and who not in culprits) for k, who, step in said]
    count.false = sum(wrong)
    return count
