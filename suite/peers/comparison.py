"""Compares other projects' rules with the detectors on the same observations of the labelled suite."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from rankwatch_detectors.base import Change, Frame, Kind, Severity
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from suite.cases import Case
from suite.peers.rules import PeerRule, rules
from suite.scoring import BRINGS, OF_LOSS

SILENT_STEPS: Final = 100
"""Steps without a report of a subject after which another report of it counts as new."""
OURS: Final = "rankwatch"

Said = tuple[Kind, int | None, int]
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


def _all_said(job: Job) -> dict[str, list[Said]]:
    """By rule: each kind and rank that it reported, with the step, once for as long as the report lasts."""
    bank, others = detectors(), rules()
    said: dict[str, list[Said]] = {OURS: [], **{rule.name: [] for rule in others}}
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
    said: list[Said],
    last: dict[tuple[str, Kind, int | None], int],
) -> None:
    for kind, rank in now:
        key = (rule.name, kind, rank)
        # Reports about the same rank each minute are one incident.
        if abs(step - last.get(key, -SILENT_STEPS)) >= SILENT_STEPS:
            said.append((kind, rank, step))
        last[key] = step


def _counted(job: Job, said: list[Said], answers: frozenset[Kind]) -> RuleScore:
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
