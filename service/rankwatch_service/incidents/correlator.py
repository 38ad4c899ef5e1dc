"""Groups the findings of one job into incidents: one for each root cause, with its first mover and its consequences.

A finding opens an incident, or joins one that may have caused it (`causes.may_cause`), or, if it began earlier,
becomes the first mover of all incidents that it may have caused, which are merged into one. So the order of findings
decides how often people are notified, but not how many incidents remain in the end. An incident resolves when all its
parts are closed; a part whose attempt is over is closed once a later attempt shows that the trouble is gone.
Pure: the same findings, attempts and steps give the same incidents.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rankwatch_detectors.base import GRAVITY, Change, Finding, Kind, Severity
from rankwatch_detectors.pace.slow_places import called
from rankwatch_detectors.scope import WHOLE_JOB, IncidentScope, ScopeLevel
from rankwatch_detectors.words import lasting
from rankwatch_service.incidents.causes import heads, may_cause, only_suspected, precedence, suspect
from rankwatch_service.incidents.hang import ASKED, PIDS, PIDS_MAX, RANKS_ON_HOST, rank_ranges
from rankwatch_service.incidents.kinds import ENDED_WITH_JOB, KINDS
from rankwatch_service.incidents.model import (
    Incident,
    Part,
    Placement,
    TransitionKind,
    Update,
    adopt_times,
    apply_figures,
    incident_id,
    incident_restored,
    incident_state,
    lowered,
    named_hosts,
    number,
    part_of,
    reported_once,
)
from rankwatch_service.names import short

UNFELT_STEPS: Final = 32
UNFELT_S: Final = 60.0
"""Training that has gone on for so many steps and seconds beside a fault of a device does not feel it."""


@dataclass(frozen=True, slots=True)
class Headline:
    """An incident in one line."""

    kind: Kind
    severity: Severity
    scope: IncidentScope

    @classmethod
    def of(cls, incident: Incident) -> Headline:
        """An incident's headline as it is now."""
        return cls(incident.kind, incident.severity, incident.scope)

    def graver_than(self, other: Headline) -> bool:
        """Whether it is more urgent."""
        return GRAVITY.index(self.severity) > GRAVITY.index(other.severity)

    def widened(self, before: Headline) -> bool:
        """Whether its scope has widened to a host, to a switch or to the job."""
        wide = (ScopeLevel.JOB, ScopeLevel.SWITCH, ScopeLevel.HOST)
        return self.scope != before.scope and self.scope.level in wide


def locate(incident: Incident, placement: Placement) -> None:
    """Set scope, hosts and devices, and the process ids of ranks that hang, are slow or have ended.

    The scope is a host or a switch if most of its ranks are affected, and the job has ranks elsewhere.
    """
    named = incident.first.scope
    if incident.kind is Kind.RANK_LOST and incident.ranks:
        named = IncidentScope.of_rank(incident.ranks[0])  # an end that is heard later may have been the first
    incident.scope = named if len(incident.first.hosts) < 2 else WHOLE_JOB
    incident.hosts = placement.hosts_of(incident.ranks) or list(incident.first.hosts)
    incident.devices = placement.devices_of(incident.ranks)
    if incident.scope.host is not None and not incident.hosts:
        incident.hosts = [incident.scope.host]
    with_pids = incident.kind in (Kind.HANG, Kind.RANK_LOST, Kind.STRAGGLER)
    if with_pids and (pids := placement.pids_of(incident.ranks[:PIDS_MAX])):
        incident.evidence[PIDS] = pids
    if len(incident.hosts) == 1 and KINDS[incident.kind].is_host_wide and (on := placement.ranks_of(incident.hosts[0])):
        incident.evidence[RANKS_ON_HOST] = len(on)
    together = len(incident.first.hosts) > 1
    if not incident.hosts or not (together or KINDS[incident.kind].is_host_wide):
        return
    if together and incident.evidence.get("hosts_hit", 0) > len(incident.hosts):  # only some of them are listed
        return
    scope, ranks = _common_place(incident.hosts, placement)
    hosts = frozenset(incident.hosts)
    affected = (
        [rank for rank in ranks if not hosts.isdisjoint(placement.hosts_of([rank]))] if together else incident.ranks
    )
    most = len(ranks) > 1 and 2 * len(affected) > len(ranks)
    if most and len(ranks) < placement.world_size and scope != incident.scope:
        incident.scope = scope
        incident.summary = incident.first.summary
        if together or set(incident.first.ranks) != set(affected):
            incident.summary = _of_place(incident, scope, affected, len(ranks))


def _of_place(incident: Incident, scope: IncidentScope, affected: Sequence[int], count: int) -> str:
    """The summary of an incident of a host or switch, of which each finding is about some of its ranks."""
    which = f"all its {count} ranks" if len(affected) == count else f"{len(affected)} of its {count} ranks"
    place = f"{called(scope)}, {which} ({rank_ranges(sorted(affected))})"
    if incident.kind is not Kind.STRAGGLER:
        return f"{place}: {incident.first.summary}"
    if incident.cause == "worker":
        incident.cause = "host"
    first = incident.first.summary.replace(f" on {scope.name}", "", 1)
    return f"{called(scope)} is slow, {which} ({rank_ranges(sorted(affected))}): {first[:1].lower()}{first[1:]}"


def _common_place(hosts: Sequence[str], placement: Placement) -> tuple[IncidentScope, list[int]]:
    """The narrowest part of the job that contains these hosts, and its ranks."""
    if len(hosts) == 1:
        return IncidentScope.of_host(hosts[0]), placement.ranks_of(hosts[0])
    switch = placement.switch_of(hosts)
    return (IncidentScope.of_switch(switch), placement.ranks_below(switch)) if switch else (WHOLE_JOB, [])


def grade(incident: Incident, found: Severity) -> None:
    """Apply the severity of a finding: the gravest counts, one grade lower while training is not affected by the
    device.
    """
    incident.found_severity = max(incident.found_severity or incident.severity, found, key=GRAVITY.index)
    incident.unfelt &= _is_of_devices(incident)
    incident.severity = lowered(incident.found_severity) if incident.unfelt else incident.found_severity


def begin_grade(incident: Incident) -> None:
    """The first severity. That a device is degraded is seen in its counters alone, before anybody feels it; whether
    training goes on beside a fault is seen later (`goes_on_beside`).
    """
    incident.unfelt = KINDS[incident.kind].is_of_device and KINDS[incident.kind].is_condition
    grade(incident, incident.severity)


def goes_on_beside(incident: Incident, now_s: float) -> bool:
    """Count a step that training has made; whether it is now known that training does not feel the device."""
    if incident.unfelt or not _is_of_devices(incident):
        return False
    incident.steps += 1
    if incident.steps < UNFELT_STEPS or now_s < incident.opened_time_s + UNFELT_S:
        return False
    incident.unfelt = True
    grade(incident, incident.severity)
    return True


def keep(incident: Incident, part: Part, finding: Finding) -> None:
    """Add a finding's part to an incident, which is graded anew."""
    incident.add(part)
    grade(incident, finding.severity)
    incident.updated_time_s = finding.detected_time_s


def _is_of_devices(incident: Incident) -> bool:
    """Whether all its parts are about devices alone."""
    return all(KINDS[part.kind].is_of_device for part in incident.parts)


PROGRESS_FRAMES: Final = 3
"""Steps that a later attempt must finish before parts of an earlier one are closed."""

LOOK_FRAMES: Final = 64
"""Steps of a new launch before slow hardware counts as repaired or replaced: detectors need half as many to find it
again."""

REPEAT_FRAMES: Final = 1_000
"""Steps of a later attempt after which a part that ended the job is closed even if its step was not reached again: a
job that goes back further does so intentionally."""

QUIET_S: Final = 120.0
"""How long a part that ended by itself must stay away before its incident resolves. A stall at every hundredth step of
one second comes back sooner, and nobody is waiting for the resolution."""

FLAPPING_QUIET_S: Final = 900.0
"""The same for a part that has come back before. Within this time, a resolved incident is also reopened rather than
replaced: one incident is easier to work on than four an hour."""


def ended_with_its_attempt(part: Part, frames: int, step: int) -> bool:
    """Whether the running attempt, which has finished `frames` steps up to `step`, shows that the part is over."""
    if KINDS[part.kind].is_lasting:
        return part.ended_with_attempt and frames >= LOOK_FRAMES
    if KINDS[part.kind].ends_job:
        past = part.onset_step is None or step >= part.onset_step or frames >= REPEAT_FRAMES
        return part.ended_with_attempt and past
    return part.ended_with_attempt


def end_by_itself(part: Part, step: int | None, now_s: float) -> None:
    """Close a part that its detector no longer sees."""
    part.is_open, part.ended_s, part.ended_step = False, now_s, step


def ended_after(finding: Finding) -> str:
    """The sentence that a summary gets when its trouble has ended by itself: how long it lasted."""
    return f" It has ended by itself after {lasting(finding.detected_time_s - finding.onset_time_s)}."


def ended_by_start(incident: Incident, attempt: str, first_step: int) -> str:
    """The sentence that a summary gets when a later attempt, whose first finished step this is, ended its trouble."""
    same_launch = incident.attempt.rpartition(".")[0] == attempt.rpartition(".")[0]
    return f" The job was {'rolled back to' if same_launch else 'relaunched from'} step {first_step}."


def end_for_good(incident: Incident) -> None:
    """Close all parts for good: what begins later is another incident."""
    for part in incident.parts:
        part.is_open, part.ended_s = False, None


def end_with_job(incident: Incident) -> None:
    """Close all parts for good, as the job has ended. What was not over by then is marked: nobody has repaired it."""
    if any(part.is_open for part in incident.parts):
        incident.evidence = {**incident.evidence, ENDED_WITH_JOB: True}
        incident.summary += " The job has ended."
    end_for_good(incident)


def go_on_again(part: Part) -> None:
    """Reopen a part that had ended by itself."""
    part.is_open, part.ended_s, part.ended_step = True, None, None
    part.flaps += 1


def last_to_end(incident: Incident) -> Part | None:
    """The part that ended by itself last."""
    ended = [part for part in incident.parts if part.ended_s is not None]
    return max(ended, key=lambda part: part.ended_s or 0.0, default=None)


def quiet_s(incident: Incident) -> float:
    """How long flapping parts of this incident must stay away before it resolves."""
    return FLAPPING_QUIET_S if any(part.flaps for part in incident.parts) else QUIET_S


def may_resolve(incident: Incident, now_s: float) -> bool:
    """Whether all parts are closed, and those that may come back have stayed away long enough."""
    if any(part.is_open for part in incident.parts):
        return False
    watched = [part.ended_s for part in incident.parts if KINDS[part.kind].flaps and part.ended_s is not None]
    return not watched or now_s - max(watched) >= quiet_s(incident)


def come_back(finding: Finding, incidents: Iterable[Incident]) -> tuple[Incident, Part] | None:
    """The ended part that this finding reopens; of a resolved incident only its first mover can be reopened."""
    if not KINDS[finding.kind].flaps:
        return None
    for incident in incidents:
        for part in incident.parts if incident.state != "resolved" else incident.parts[:1]:
            same = (part.attempt, part.kind, part.scope) == (finding.attempt, finding.kind, finding.scope)
            lately = part.ended_s is not None and finding.detected_time_s - part.ended_s <= FLAPPING_QUIET_S
            if same and lately:
                return incident, part
    return None


OPEN_MAX: Final = 256
"""Open incidents of one job; further findings are counted (`refused`). Nobody works on more at once."""

KEPT_MAX: Final = 64
"""Resolved incidents kept in memory, so that people can still comment on them."""

EPISODES_MAX: Final = 4_096
"""Episode counters kept, the newest: 16 attempts of 256 scopes."""

SETTLE_S: Final = 30.0
"""An incident that widens within this time after it opened is not notified again: people have just opened its page."""


class Correlator:
    """The incidents of one job. `counts` has the findings that were left out, by reason."""

    def __init__(self, job: str) -> None:
        self.counts: Counter[str] = Counter()
        self._job = job
        self._attempt = ""
        self._frames = 0
        self._first_step: int | None = None
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

    def restore_open(self, incidents: Sequence[Incident], attempt: str, episodes: int) -> None:
        """Begin with the incidents in the store, when there is no usable snapshot.

        Args:
            incidents: the open ones.
            attempt: the newest known one, which may continue.
            episodes: the highest episode so far; new ones begin above it, so that no id is used twice.
        """
        self._incidents = {incident.id: incident for incident in incidents}
        self._attempt, self._episode_base = attempt, episodes

    def begin(self, attempt: str) -> None:
        """Begin a new attempt. To be called before the detectors are given it."""
        if attempt == self._attempt:
            return
        same_launch = attempt.rpartition(".")[0] == self._attempt.rpartition(".")[0]
        for incident in self.open:
            for part in incident.parts:
                traits = KINDS[part.kind]
                if not (same_launch and traits.is_lasting) and not traits.spans_attempts:
                    part.ended_with_attempt = True
        self._attempt, self._frames, self._first_step = attempt, 0, None

    def progress(self, attempt: str, step: int, now_s: float) -> list[Update]:
        """Count a finished step. After enough of them, parts that ended with an earlier attempt are closed."""
        if attempt != self._attempt:
            return []
        self._frames += 1
        if self._frames == 1:
            self._first_step = step
        unfelt = [incident for incident in self.open if goes_on_beside(incident, now_s)]
        updates = [Update(one, TransitionKind.EVIDENCE, "training goes on beside it") for one in unfelt]
        if self._frames < PROGRESS_FRAMES:
            return updates
        for incident in self.open:
            over = [
                part for part in incident.parts if part.is_open and ended_with_its_attempt(part, self._frames, step)
            ]
            if over:
                for part in over:
                    part.is_open = False
                resolved = self._resolve_if_over(incident, step, now_s, f"training goes on in attempt {attempt}")
                if resolved and self._first_step is not None:
                    incident.summary += ended_by_start(incident, attempt, self._first_step)
                updates += resolved
        return updates

    def resolve_ended(self, now_s: float = math.inf) -> list[Update]:
        """Resolve incidents that ended by themselves long enough ago, as of the time when they ended; without a time
        all that have ended.
        """
        quiet = [incident for incident in self.open if may_resolve(incident, now_s)]
        return [
            self._resolve_ended(one, last, f"{KINDS[last.kind].label} did not come back within {lasting(quiet_s(one))}")
            for one in quiet
            if (last := last_to_end(one)) is not None
        ]

    def finish(self, step: int | None, now_s: float, reason: str = "the job ended") -> list[Update]:
        """Resolve all incidents: the job has ended. One that was over by then lasted until it ended by itself."""
        updates = []
        for incident in self.open:
            if incident.is_over and (last := last_to_end(incident)) is not None:
                updates.append(
                    self._resolve_ended(incident, last, f"{KINDS[last.kind].label} had ended by itself; {reason}")
                )
            end_with_job(incident)
            updates += self._resolve_if_over(incident, step, now_s, reason) if incident.state != "resolved" else []
        return updates

    def _resolve_ended(self, incident: Incident, last: Part, text: str) -> Update:
        self._mark_resolved(incident, last.ended_step, last.ended_s or 0.0)
        return Update(incident, TransitionKind.RESOLVED, text)

    def evaluate(self, findings: Sequence[Finding], placement: Placement) -> list[Update]:
        """Process the findings of one observation: causes before effects, ends last, since one kind may become
        another.
        """
        updates: list[Update] = []
        for finding in sorted(findings, key=precedence):
            known = self._find(finding)
            if finding.change is Change.CLOSE:
                updates += [] if known is None else self._close(*known, finding)
                if finding.evidence.get("ended_on_request"):
                    updates += self.finish(finding.detected_step, finding.detected_time_s, finding.summary)
            elif known is not None:
                updates += self._update(*known, finding, placement)
            elif (before := come_back(finding, self._incidents.values())) is not None:
                updates += self._come_back(*before, finding, placement)
            else:
                updates += self._open(finding, placement)
        return reported_once(updates) + suspect(self.open, placement) if findings else []

    def resolve(self, incident: Incident, step: int, now_s: float) -> None:
        """Resolve an incident as a person asked."""
        end_for_good(incident)
        self._mark_resolved(incident, step, now_s)

    # ---- findings --------------------------------------------------------------------------------------------------

    def _find(self, finding: Finding) -> tuple[Incident, Part] | None:
        """The open part with the kind and scope of this finding; a standing part and a change of it are two parts."""
        standing = finding.evidence.get("standing") is True
        found = None
        for incident in self.open:
            for part in incident.parts:
                same = (part.kind, part.scope) == (finding.kind, finding.scope) and part.is_open
                if same and (part.attempt == finding.attempt or KINDS[part.kind].is_lasting):
                    if part.standing is standing:
                        return incident, part
                    # A detector that lost its state reports as standing what it reported with an onset before.
                    found = found or ((incident, part) if standing else None)
        return found

    def _open(self, finding: Finding, placement: Placement) -> list[Update]:
        part = part_of(finding, self._episode(finding))
        # A finding about an attempt that has ended is closed as soon as training goes on.
        part.ended_with_attempt = part.attempt != self._attempt
        headed = [incident for incident in self.open if heads(part, incident, placement)]
        # If several incidents may have caused it, take the newest: the older ones have their consequences.
        cause = next(
            (
                incident
                for incident in reversed(self.open)
                if incident not in headed
                and not only_suspected(incident.first, part)
                and any(may_cause(other, part, placement) for other in incident.parts if other.is_open)
            ),
            None,
        )
        if cause is not None:
            return [self._join(cause, part, finding, placement), *self._unite(cause, headed, finding)]
        if headed:
            oldest, *others = headed
            return [self._take_over(oldest, part, finding, placement), *self._unite(oldest, others, finding)]
        if len(self.open) >= OPEN_MAX:
            self.counts["refused"] += 1
            return []
        return [self._new(part, finding, placement)]

    def _episode(self, finding: Finding) -> int:
        key = (finding.attempt, str(finding.kind), str(finding.scope))
        # Removed and added again, so that the counter that is unused for longest is the first to go.
        episode = self._episodes.pop(key, self._episode_base) + 1
        self._episodes[key] = episode
        while len(self._episodes) > EPISODES_MAX:
            del self._episodes[next(iter(self._episodes))]
        return episode

    def _new(self, part: Part, finding: Finding, placement: Placement) -> Update:
        incident = Incident(
            id=incident_id(self._job, part.attempt, part.kind, part.scope, part.episode),
            job=self._job,
            parts=[part],
            severity=finding.severity,
            ranks=part.ranks,
            scope=part.scope,
            opened_time_s=finding.detected_time_s,
            score=number(finding.score, math.inf),
            confidence=number(finding.confidence, 0.0),
            cause=finding.cause,
            summary=finding.summary,
            evidence=dict(finding.evidence),
            updated_time_s=finding.detected_time_s,
        )
        begin_grade(incident)
        locate(incident, placement)
        self._incidents[incident.id] = incident
        return Update(incident, TransitionKind.OPENED, incident.summary)

    def _join(self, incident: Incident, part: Part, finding: Finding, placement: Placement) -> Update:
        """Add a consequence, or more ranks with the same trouble on the same hosts."""
        before = Headline.of(incident)
        keep(incident, part, finding)
        if part.kind is not incident.kind or not KINDS[part.kind].is_lasting or set(part.ranks) <= set(incident.ranks):
            return self._changed(incident, before, f"consequence: {finding.summary}", part, finding)
        incident.ranks = (*incident.ranks, *(rank for rank in part.ranks if rank not in incident.ranks))
        locate(incident, placement)
        return self._changed(incident, before, f"also: {finding.summary}", part, finding)

    def _take_over(self, incident: Incident, part: Part, finding: Finding, placement: Placement) -> Update:
        """Make the finding the first mover: it began earlier and may be the cause, or the incident turned into it."""
        before = Headline.of(incident)
        ranks = incident.ranks if part.kind is incident.kind else ()
        keep(incident, part, finding)
        incident.parts.remove(part)
        incident.parts.insert(0, part)
        incident.ranks = (*part.ranks, *(rank for rank in ranks if rank not in part.ranks))
        incident.cause, incident.summary = finding.cause, finding.summary
        incident.score, incident.confidence = number(finding.score, math.inf), number(finding.confidence, 0.0)
        answers: dict[str, Any] = {name: incident.evidence.pop(name) for name in ASKED if name in incident.evidence}
        earlier = {str(before.kind): dict(incident.evidence)} if part.kind is not before.kind else {}
        incident.evidence = {**finding.evidence, **earlier, **answers}
        locate(incident, placement)
        how = "has become" if part.kind in KINDS[before.kind].becomes else "was caused by"
        text = f"{KINDS[before.kind].label} {how} {KINDS[part.kind].label}: {finding.summary}"
        return self._changed(incident, before, text, part, finding)

    def _unite(self, incident: Incident, others: Sequence[Incident], finding: Finding) -> list[Update]:
        """Merge incidents that turn out to have one cause: the others resolve, and `incident` takes their parts."""
        updates = []
        for other in others:
            for part in other.parts:
                # A copy, since the other incident's own parts are closed below.
                incident.add(replace(part))
            grade(incident, other.found_severity or other.severity)
            end_for_good(other)
            self._mark_resolved(other, finding.detected_step, finding.detected_time_s)
            text = f"merged into {short(incident.id)}: {incident.summary}"
            updates.append(Update(other, TransitionKind.RESOLVED, text))
        return updates

    def _changed(self, incident: Incident, before: Headline, text: str, part: Part, finding: Finding) -> Update:
        """The update for a changed incident: notified if it is graver, wider or of another kind, else only evidence."""
        now, age_s = Headline.of(incident), finding.detected_time_s - incident.opened_time_s
        news = now.graver_than(before) or now.kind is not before.kind or (now.widened(before) and age_s > SETTLE_S)
        what = TransitionKind.UPDATED if news else TransitionKind.EVIDENCE
        return Update(incident, what, text, fields=part.consequence().fields())

    def _update(self, incident: Incident, part: Part, finding: Finding, placement: Placement) -> list[Update]:
        before = Headline.of(incident)
        apply_figures(part, finding)
        incident.updated_time_s = finding.detected_time_s
        wider = not set(finding.ranks) <= set(part.ranks)
        if part.ranks and finding.ranks and part.ranks[0] != finding.ranks[0]:
            adopt_times(part, finding)
        part.ranks, part.hosts = tuple(finding.ranks), tuple(dict.fromkeys((*part.hosts, *named_hosts(finding))))
        grade(incident, finding.severity)
        if part is incident.first:
            incident.score, incident.confidence = number(finding.score, math.inf), number(finding.confidence, 0.0)
            incident.cause, incident.summary = finding.cause or incident.cause, finding.summary
            incident.evidence |= finding.evidence
            traits = KINDS[part.kind]
            joined = incident.ranks if traits.is_lasting and not traits.tells_all else ()
            incident.ranks = tuple(dict.fromkeys((*part.ranks, *joined)))
            locate(incident, placement)
        update = self._changed(incident, before, finding.summary, part, finding)
        if wider and part is incident.first:
            update.what = TransitionKind.UPDATED
        return [update]

    def _come_back(self, incident: Incident, part: Part, finding: Finding, placement: Placement) -> list[Update]:
        """Reopen a part that had ended by itself. People are notified only if the incident had been resolved."""
        go_on_again(part)
        if incident.state == "resolved":
            incident.severity = incident.found_severity = finding.severity  # its graver parts are over
        before = Headline.of(incident)
        self._update(incident, part, finding, placement)
        incident.evidence["flaps"] = max(other.flaps for other in incident.parts)
        update = self._changed(incident, before, f"came back ({part.flaps}x): {finding.summary}", part, finding)
        if incident.state == "resolved":
            incident.state, incident.acknowledged_by = "open", None
            incident.resolved_step = incident.resolved_time_s = None
            update.what = TransitionKind.OPENED
        return [update]

    def _close(self, incident: Incident, part: Part, finding: Finding) -> list[Update]:
        if part.ended_with_attempt:
            # The attempt ended, not the trouble: only further training shows whether it is gone.
            return []
        end_by_itself(part, finding.detected_step, finding.detected_time_s)
        incident.updated_time_s = finding.detected_time_s
        if part is incident.first:
            incident.evidence |= finding.evidence
        over = self._resolve_if_over(incident, finding.detected_step, finding.detected_time_s, finding.summary)
        costs_no_more = part is not incident.first and part.cost_gpu_hours_per_hour is not None
        if over or not (KINDS[part.kind].flaps or costs_no_more):
            return over
        if part is incident.first:
            silent = finding.kind is Kind.TELEMETRY_LOST  # its end says all: who was silent, for how long
            incident.summary = finding.summary if silent else incident.summary + ended_after(finding)
        text = f"ended by itself: {finding.summary}"
        return [Update(incident, TransitionKind.EVIDENCE, text, fields=part.consequence().fields())]

    def _resolve_if_over(self, incident: Incident, step: int | None, now_s: float, text: str) -> list[Update]:
        if not may_resolve(incident, now_s):
            return []
        self._mark_resolved(incident, step, now_s)
        return [Update(incident, TransitionKind.RESOLVED, text)]

    def _mark_resolved(self, incident: Incident, step: int | None, now_s: float) -> None:
        incident.state, incident.resolved_step = "resolved", step
        incident.suggestion, incident.checkpoint = {}, None
        incident.resolved_time_s = incident.updated_time_s = now_s
        resolved = [key for key, known in self._incidents.items() if known.state == "resolved"]
        for key in resolved[:-KEPT_MAX]:
            del self._incidents[key]

    # ---- snapshot --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All state that later decisions depend on, as JSON types."""
        return {
            "counts": dict(self.counts),
            "attempt": self._attempt,
            "frames": self._frames,
            "first_step": self._first_step,
            "episode_base": self._episode_base,
            "episodes": [[*key, count] for key, count in self._episodes.items()],
            "incidents": [incident_state(incident) for incident in self._incidents.values()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.counts = Counter(state["counts"])
        self._attempt, self._frames = state["attempt"], state["frames"]
        self._first_step = state["first_step"]
        self._episode_base = state["episode_base"]
        self._episodes = {(attempt, kind, scope): count for attempt, kind, scope, count in state["episodes"]}
        incidents = [incident_restored(saved) for saved in state["incidents"]]
        self._incidents = {incident.id: incident for incident in incidents}


WHY: Final = "why"
"""The field of a transition that has the explanations of its findings."""


def explain(updates: Sequence[Update], reasons: Sequence[Mapping[str, Any]]) -> None:
    """Attach each explanation to the newest update of an incident of which its finding is a part."""
    for reason in reasons:
        for update in reversed(updates):
            parts = update.incident.parts
            its = any((part.kind, str(part.scope)) == (reason["kind"], reason["scope"]) for part in parts)
            if its and update.what is not TransitionKind.RESOLVED:
                update.fields.setdefault(WHY, []).append(reason)
                break
