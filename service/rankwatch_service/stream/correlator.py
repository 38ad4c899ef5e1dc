"""Findings of one job become incidents: one for each root cause, its first mover named, the rest its consequences.

A finding opens an incident, joins one that may have brought it (`causes.BRINGS`), or, where it came first, takes over
as first mover of one that it may have brought. An incident resolves when all its parts have closed; parts whose attempt
is over count as closed once a later attempt makes progress. Pure: same findings, attempts and steps in, same out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rankwatch_detectors.base import Change, Finding, Kind, Severity
from rankwatch_service.stream.causes import BECOMES, BRINGS, CAUSE_ORDER, LASTING, Reach, reach
from rankwatch_service.stream.incidents import (
    LISTED_MAX,
    Incident,
    Moment,
    Part,
    incident_id,
    incident_restored,
    incident_state,
    part_of,
)
from rankwatch_service.stream.roster import Roster

OPEN_MAX: Final = 256
"""Open incidents of one job; findings beyond are counted (`refused`). Nobody works on more at once."""

KEPT_MAX: Final = 64
"""Resolved incidents kept in memory for what people still say about them."""

EPISODES_MAX: Final = 4_096
"""Episode counters kept, the newest: 16 attempts of 256 scopes."""

PROGRESS_FRAMES: Final = 3
"""Steps that a later attempt must finish before troubles of an earlier one count as over."""

SLACK_S: Final = 2.0
"""Onsets within this are the same moment: telemetry is about a second apart."""

SETTLE_S: Final = 30.0
"""What widens so soon after it was told is the same news: nobody has got further than opening the page."""

_SEVERITIES: Final = (Severity.INFO, Severity.WARNING, Severity.CRITICAL)


@dataclass(slots=True)
class Told:
    """Something about an incident that is worth a transition."""

    incident: Incident
    what: Moment
    text: str
    actor: str = "stream"
    fields: dict[str, Any] = field(default_factory=dict)


class Correlator:
    """The incidents of one job. `counts` says which findings were left out and why."""

    def __init__(self, job: str) -> None:
        self.counts: Counter[str] = Counter()
        self._job = job
        self._attempt = ""
        self._frames = 0
        self._number = 0
        self._episodes: dict[tuple[str, str, str], int] = {}
        self._episode_base = 0
        self._incidents: dict[str, Incident] = {}

    @property
    def open(self) -> list[Incident]:
        """Incidents that are not resolved, oldest first."""
        return [incident for incident in self._incidents.values() if incident.state != "resolved"]

    def get(self, incident_id: str) -> Incident | None:
        """An incident that is open or was resolved lately."""
        return self._incidents.get(incident_id)

    def adopt(self, incidents: Sequence[Incident], number: int, episodes: int) -> None:
        """Begin with what the store knows, when there is no usable snapshot.

        Args:
            incidents: those still open.
            number: the highest number given out.
            episodes: the highest episode given out; new ones begin above it, so that no id comes twice.
        """
        self._incidents = {incident.id: incident for incident in incidents}
        self._number, self._episode_base = number, episodes

    def begin(self, attempt: str) -> None:
        """A new attempt begins: call this before the detectors learn of it."""
        if attempt == self._attempt:
            return
        same_launch = attempt.rpartition(".")[0] == self._attempt.rpartition(".")[0]
        for incident in self.open:
            for part in incident.parts:
                if not (same_launch and part.kind in LASTING):
                    part.ended_with_attempt = True
        self._attempt, self._frames = attempt, 0

    def progress(self, attempt: str, step: int, now_s: float) -> list[Told]:
        """Training finished a step: what ended with an earlier attempt is over once there were enough."""
        if attempt != self._attempt:
            return []
        self._frames += 1
        if self._frames < PROGRESS_FRAMES:
            return []
        told = []
        for incident in self.open:
            if any(part.is_open and part.ended_with_attempt for part in incident.parts):
                for part in incident.parts:
                    part.is_open &= not part.ended_with_attempt
                told += self._resolve_if_over(incident, step, now_s, f"training goes on in attempt {attempt}")
        return told

    def finish(self, step: int, now_s: float) -> list[Told]:
        """The job came to its end: nothing can go on."""
        for incident in self.open:
            for part in incident.parts:
                part.is_open = False
        return [
            told for incident in self.open for told in self._resolve_if_over(incident, step, now_s, "the job ended")
        ]

    def judge(self, findings: Sequence[Finding], roster: Roster) -> list[Told]:
        """Take findings that came together: causes before effects, ends last, since a trouble may become another."""
        told: list[Told] = []
        for finding in sorted(findings, key=_precedence):
            known = self._find(finding)
            if finding.change is Change.CLOSE:
                told += [] if known is None else self._close(*known, finding)
            elif known is not None:
                told += self._update(*known, finding, roster)
            else:
                told += self._open(finding, roster)
        return _once(told)

    def resolve(self, incident: Incident, step: int, now_s: float) -> None:
        """A person says that it is over."""
        for part in incident.parts:
            part.is_open = False
        self._mark_resolved(incident, step, now_s)

    # ---- findings --------------------------------------------------------------------------------------------------

    def _find(self, finding: Finding) -> tuple[Incident, Part] | None:
        """The open part that this finding speaks of."""
        for incident in self.open:
            for part in incident.parts:
                same = (part.kind, part.scope) == (finding.kind, finding.scope) and part.is_open
                if same and (part.attempt == finding.attempt or part.kind in LASTING):
                    return incident, part
        return None

    def _open(self, finding: Finding, roster: Roster) -> list[Told]:
        key = (finding.attempt, str(finding.kind), finding.scope)
        episode = self._episodes.pop(key, self._episode_base) + 1
        self._episodes[key] = episode
        while len(self._episodes) > EPISODES_MAX:
            del self._episodes[next(iter(self._episodes))]
        part = part_of(finding, episode)
        # What is told of an attempt that is over already is over as soon as training goes on.
        part.ended_with_attempt = part.attempt != self._attempt
        for incident in reversed(self.open):
            became = BECOMES.get(incident.kind) is part.kind and incident.attempt == part.attempt
            if became or (_may_bring(part, incident.first, roster) and _earlier(part, incident.first)):
                return self._take_over(incident, part, finding, roster)
            if any(_may_bring(other, part, roster) for other in incident.parts if other.is_open):
                return self._join(incident, part, finding, roster)
        if len(self.open) >= OPEN_MAX:
            self.counts["refused"] += 1
            return []
        return [self._new(part, finding, roster)]

    def _new(self, part: Part, finding: Finding, roster: Roster) -> Told:
        self._number += 1
        incident = Incident(
            id=incident_id(self._job, part.attempt, part.kind, part.scope, part.episode),
            number=self._number,
            job=self._job,
            parts=[part],
            severity=finding.severity,
            ranks=part.ranks,
            scope=part.scope,
            detected_step=finding.detected_step,
            detected_time_s=finding.detected_time_s,
            score=_number(finding.score, math.inf),
            confidence=_number(finding.confidence, 0.0),
            cause=finding.cause,
            summary=finding.summary,
            evidence=dict(finding.evidence),
            updated_time_s=finding.detected_time_s,
        )
        _locate(incident, roster)
        self._incidents[incident.id] = incident
        return Told(incident, Moment.OPENED, finding.summary)

    def _join(self, incident: Incident, part: Part, finding: Finding, roster: Roster) -> list[Told]:
        """The finding is a consequence, or more of the same on the same hosts."""
        self._keep(incident, part, finding)
        if part.kind is not incident.kind or part.kind not in LASTING or set(part.ranks) <= set(incident.ranks):
            what = Moment.UPDATED if part.kind is Kind.RESTART_LOOP else Moment.EVIDENCE
            return [Told(incident, what, f"brought with it: {finding.summary}", fields=part.told())]
        before = incident.scope
        incident.ranks = (*incident.ranks, *(rank for rank in part.ranks if rank not in incident.ranks))
        _locate(incident, roster)
        _widen(incident, roster)
        # One more rank of the same host is a line in the incident; that it is the host is news, unless it is all one.
        at_once = finding.detected_time_s - incident.detected_time_s <= SETTLE_S
        what = Moment.EVIDENCE if incident.scope == before or at_once else Moment.UPDATED
        return [Told(incident, what, f"also: {finding.summary}", fields=part.told())]

    def _take_over(self, incident: Incident, part: Part, finding: Finding, roster: Roster) -> list[Told]:
        """The finding came first and may have brought what the incident was opened for."""
        before = incident.kind
        self._keep(incident, part, finding)
        incident.parts.remove(part)
        incident.parts.insert(0, part)
        incident.ranks, incident.scope = part.ranks, part.scope
        incident.cause, incident.summary = finding.cause, finding.summary
        incident.score, incident.confidence = _number(finding.score, math.inf), _number(finding.confidence, 0.0)
        incident.evidence = {**finding.evidence, str(before): dict(incident.evidence)}
        _locate(incident, roster)
        how = "has become" if BECOMES.get(before) is part.kind else "was brought by"
        return [Told(incident, Moment.UPDATED, f"{before} {how}: {finding.summary}", fields=part.told())]

    def _keep(self, incident: Incident, part: Part, finding: Finding) -> None:
        incident.parts_total += 1
        if len(incident.parts) >= LISTED_MAX:
            del incident.parts[-1]
        incident.parts.append(part)
        incident.severity = max(incident.severity, finding.severity, key=_SEVERITIES.index)
        incident.updated_time_s = finding.detected_time_s

    def _update(self, incident: Incident, part: Part, finding: Finding, roster: Roster) -> list[Told]:
        part.summary, part.attempt = finding.summary, finding.attempt
        part.ended_with_attempt = False
        incident.updated_time_s = finding.detected_time_s
        graver = _SEVERITIES.index(finding.severity) > _SEVERITIES.index(incident.severity)
        wider = not set(finding.ranks) <= set(part.ranks)
        part.ranks = tuple(finding.ranks)
        if graver:
            incident.severity = finding.severity
        if part is incident.first:
            incident.score, incident.confidence = _number(finding.score, math.inf), _number(finding.confidence, 0.0)
            incident.cause, incident.summary = finding.cause or incident.cause, finding.summary
            incident.evidence |= finding.evidence
            if wider:
                incident.ranks = (*incident.ranks, *(rank for rank in part.ranks if rank not in incident.ranks))
                _locate(incident, roster)
        what = Moment.UPDATED if graver or (wider and part is incident.first) else Moment.EVIDENCE
        return [Told(incident, what, finding.summary, fields=part.told())]

    def _close(self, incident: Incident, part: Part, finding: Finding) -> list[Told]:
        if part.ended_with_attempt:
            # It did not pass, its attempt did; whether that helped shows when training goes on.
            return []
        part.is_open = False
        incident.updated_time_s = finding.detected_time_s
        if part is incident.first:
            incident.evidence |= finding.evidence
        return self._resolve_if_over(incident, finding.detected_step, finding.detected_time_s, finding.summary)

    def _resolve_if_over(self, incident: Incident, step: int | None, now_s: float, text: str) -> list[Told]:
        if any(part.is_open for part in incident.parts):
            return []
        self._mark_resolved(incident, step, now_s)
        return [Told(incident, Moment.RESOLVED, text)]

    def _mark_resolved(self, incident: Incident, step: int | None, now_s: float) -> None:
        incident.state, incident.resolved_step = "resolved", step
        incident.resolved_time_s = incident.updated_time_s = now_s
        resolved = [key for key, known in self._incidents.items() if known.state == "resolved"]
        for key in resolved[:-KEPT_MAX]:
            del self._incidents[key]

    # ---- snapshot --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that decides the future, as JSON types."""
        return {
            "counts": dict(self.counts),
            "attempt": self._attempt,
            "frames": self._frames,
            "number": self._number,
            "episode_base": self._episode_base,
            "episodes": [[*key, count] for key, count in self._episodes.items()],
            "incidents": [incident_state(incident) for incident in self._incidents.values()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self.counts = Counter(state["counts"])
        self._attempt, self._frames, self._number = state["attempt"], state["frames"], state["number"]
        self._episode_base = state["episode_base"]
        self._episodes = {(attempt, kind, scope): count for attempt, kind, scope, count in state["episodes"]}
        incidents = [incident_restored(saved) for saved in state["incidents"]]
        self._incidents = {incident.id: incident for incident in incidents}


def _precedence(finding: Finding) -> tuple[bool, float, int, str]:
    ends = finding.change is Change.CLOSE
    return (ends, finding.onset_time_s, CAUSE_ORDER.index(finding.kind), finding.scope)


def _once(told: list[Told]) -> list[Told]:
    """Of several things worth telling about one incident at once the first one is told, with all the rest in it."""
    seen: set[str] = set()
    for news in told:
        if news.what is Moment.UPDATED and news.incident.id in seen:
            news.what = Moment.EVIDENCE
        if news.what in (Moment.OPENED, Moment.UPDATED):
            seen.add(news.incident.id)
    return told


def _may_bring(cause: Part, effect: Part, roster: Roster) -> bool:
    if effect.kind not in BRINGS[cause.kind]:
        return False
    if cause.attempt != effect.attempt and cause.kind not in LASTING and effect.kind is not Kind.RESTART_LOOP:
        return False
    if reach(cause.kind, effect.kind) is Reach.JOB:
        return True
    hosts = set(roster.hosts_of(cause.ranks))
    return bool(hosts & set(roster.hosts_of(effect.ranks))) or bool(set(cause.ranks) & set(effect.ranks))


def _earlier(part: Part, than: Part) -> bool:
    """Whether `part` began first; where nobody can tell, the table decides."""
    if part.attempt == than.attempt and part.onset_step is not None and than.onset_step is not None:
        if part.onset_step != than.onset_step:
            return part.onset_step < than.onset_step
    elif abs(part.onset_time_s - than.onset_time_s) > SLACK_S:
        return part.onset_time_s < than.onset_time_s
    return CAUSE_ORDER.index(part.kind) < CAUSE_ORDER.index(than.kind)


def _locate(incident: Incident, roster: Roster) -> None:
    incident.hosts = roster.hosts_of(incident.ranks)
    incident.devices = roster.devices_of(incident.ranks)
    if incident.scope.startswith("host:") and not incident.hosts:
        incident.hosts = [incident.scope.removeprefix("host:")]


def _widen(incident: Incident, roster: Roster) -> None:
    """When most ranks of a host are hit, the host is the subject; not so for a job that has only one."""
    (host, *others) = incident.hosts or [""]
    on_host = roster.ranks_of(host)
    elsewhere = len(on_host) < roster.world_size
    if not others and elsewhere and len(on_host) > 1 and 2 * len(incident.ranks) > len(on_host):
        incident.scope = f"host:{host}"
        incident.summary = f"{len(incident.ranks)} of {len(on_host)} ranks of host {host}: {incident.first.summary}"


def _number(value: float, instead: float) -> float:
    return instead if math.isnan(value) else value
