"""Tables as benchmarks print them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Final

from rankwatch_detectors.base import AttemptStart, Change, Finding, Kind, Severity
from rankwatch_service.incidents.model import Incident, TransitionKind
from rankwatch_service.simulate.faults import Label
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from suite.cases import Case, bound
from suite.cluster_cases import ClusterCase
from suite.cluster_model import ClusterJob
from suite.pipeline import recording_pipeline, topology_state_of, updates_of


def table(head: list[str], lines: Iterable[list[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


BRINGS: Final = {
    Kind.STRAGGLER: {Kind.SLOWDOWN},
    Kind.SLOWDOWN: {Kind.SLOWDOWN},
    Kind.RANK_LOST: {Kind.TELEMETRY_LOST, Kind.HANG, Kind.RESTART_LOOP},
    Kind.TELEMETRY_LOST: {Kind.HANG},
    Kind.NONFINITE: {Kind.CORRUPTION, Kind.LOSS_DIVERGENCE, Kind.LOSS_SPIKE, Kind.GRAD_NORM},
    Kind.LOSS_DIVERGENCE: {Kind.LOSS_SPIKE},
    Kind.LOSS_SPIKE: {Kind.LOSS_DIVERGENCE},
}
"""Kinds that a fault of each kind may cause."""
OF_LOSS: Final = frozenset({Kind.LOSS_SPIKE, Kind.LOSS_DIVERGENCE})
"""A jump of the loss may last, and a climb may begin as a jump: either kind counts for the other."""
IN_SECONDS: Final = frozenset({Kind.HANG, Kind.TELEMETRY_LOST})
"""Kinds whose delay is in seconds, since they show as missing steps."""


@dataclass
class Score:
    """Counts over one or several jobs of one case."""

    labels: int = 0
    found: int = 0
    named: int = 0
    caused: int = 0
    """Of those named: with the expected cause class."""
    delays: list[float] = field(default_factory=list)
    """Until the first finding, info-level ones included."""
    criticals: list[float] = field(default_factory=list)
    """Until the first critical finding, if any."""
    bounds: list[float] = field(default_factory=list)
    unit: str = ""
    right_opens: int = 0
    false: list[str] = field(default_factory=list)
    """Pages: what was critical or a warning at some time."""
    informed: int = 0
    """False ones that stayed information, which nobody is notified of."""
    roots: int = 0
    incidents: int = 0
    """Without info-level incidents that report standing conditions or opened before any fault."""
    notified: int = 0
    """Openings and updates of incidents that are not for information only: what receivers are sent, but for the end."""

    def add(self, case: Case | ClusterCase, seed: int) -> None:
        """Judge the job of one seed."""
        job = case.job(seed)
        findings, incidents, messages = judged(job)
        self.roots += len(job.labels)
        self.incidents += sum(_counts(incident, job) for incident in incidents)
        self.notified += messages
        for label in job.labels:
            # A fault that begins before the first step cannot be found before it.
            seen = replace(label, at_step=max(label.at_step, job.start_step))
            self._look_for(seen, findings, case.cause)
        if case.ratio and isinstance(job, Job):
            self.bounds.append(bound(job, case.ratio))
        for at, finding in enumerate(findings):
            self._weigh(finding, job, _first_page(findings[at:]))

    def _look_for(self, label: Label, findings: list[Finding], cause: str) -> None:
        kinds = OF_LOSS if label.kind in OF_LOSS else {label.kind}
        of_kind = [f for f in findings if f.kind in kinds and _since(f, label)]
        self.unit = " s" if kinds & IN_SECONDS else self.unit
        culprits: list[tuple[int, ...]] = [(rank,) for rank in label.ranks]
        for ranks in culprits or [()]:
            self.labels += 1
            self.found += bool(of_kind)
            # Ranks that hang together are named together.
            named = [f for f in of_kind if not ranks or f.ranks == ranks or f.ranks == label.ranks]
            if named:
                self.named += 1
                self.caused += named[0].cause == cause or not cause
                self.delays.append(delay(named[0], label))
                critical = [delay(f, label) for f in named if f.severity is Severity.CRITICAL]
                self.criticals += critical[:1]

    def _weigh(self, finding: Finding, job: Job | ClusterJob, page: Finding | None) -> None:
        """Count an episode. People hear of it with its first page: what has begun by then may be what it reports."""
        if finding.change is not Change.OPEN:
            return
        begun = [label for label in job.labels if _since(page or finding, label)]
        kinds = {label.kind for label in begun}
        culprits = {rank for label in begun for rank in label.ranks}
        answered = OF_LOSS if kinds & OF_LOSS else set()
        if finding.kind in kinds | answered and set(finding.ranks) <= culprits:
            self.right_opens += 1
        elif finding.kind in {kind for of in kinds for kind in BRINGS.get(of, ())}:
            return
        elif page is not None:
            self.false.append(f"{finding.kind} {finding.scope} at {finding.detected_step}")
        else:
            self.informed += 1

    @property
    def precision(self) -> float:
        """Share of right findings among those that opened."""
        opened = self.right_opens + len(self.false)
        return self.right_opens / opened if opened else 1.0

    @property
    def typical(self) -> float:
        """Median delay; NaN if nothing was named."""
        return statistics.median(self.delays) if self.delays else float("nan")


def _counts(incident: Incident, job: Job | ClusterJob) -> bool:
    """Whether an incident counts as one that needs a root cause."""
    begun = [label for label in job.labels if label.at_step <= (incident.detected_step or 0)]
    if incident.first.standing:
        return incident.severity is not Severity.INFO
    return bool(begun) or incident.severity is not Severity.INFO


def judged(job: Job | ClusterJob) -> tuple[list[Finding], list[Incident], int]:
    """The opened and updated findings, the incidents made of them, and the number of notifications."""
    findings: list[Finding] = []
    pipeline, topology_state = recording_pipeline(findings), topology_state_of(job.topology())
    incidents: dict[str, Incident] = {}
    messages = 0
    for observation in generate(job) if isinstance(job, Job) else job.observations():
        if isinstance(observation, AttemptStart):
            topology_state = topology_state_of(observation.topology)
        for news in updates_of(pipeline, observation, topology_state):
            incidents[news.incident.id] = news.incident
            sent = (
                news.what in (TransitionKind.OPENED, TransitionKind.UPDATED)
                and news.incident.severity is not Severity.INFO
            )
            messages += sent
    return findings, list(incidents.values()), messages


def delay(finding: Finding, label: Label) -> float:
    """Steps from the fault to the finding; seconds for kinds that show as missing steps."""
    if finding.kind in IN_SECONDS:
        return finding.detected_time_s - finding.onset_time_s
    return float(max((finding.detected_step or 0) - label.at_step, 0))


def _first_page(findings: list[Finding]) -> Finding | None:
    """The first finding of the episode that begins with the first of these which is more than information, if any."""
    first, *later = findings
    same = (f for f in later if (f.kind, f.scope, f.attempt) == (first.kind, first.scope, first.attempt))
    of_episode = (first, *takewhile(lambda f: f.change is not Change.OPEN, same))
    return next((f for f in of_episode if f.severity is not Severity.INFO), None)


def _since(finding: Finding, label: Label) -> bool:
    missing = finding.kind in IN_SECONDS | {Kind.RESTART_LOOP}
    return missing or (finding.detected_step or 0) >= label.at_step


def score(case: Case | ClusterCase, seeds: range) -> Score:
    """Judge a case over seeds."""
    total = Score()
    for seed in seeds:
        total.add(case, seed)
    return total
