"""Groups the findings of one job into incidents: one for each root cause, with its first mover and its consequences.

A finding opens an incident, or joins one that may have caused it (`causation.may_cause`), or, if it began earlier,
becomes the first mover of all incidents that it may have caused, which are merged into one. So the order of findings
decides how often people are notified, but not how many incidents remain in the end. An incident resolves when all its
parts are closed; a part whose attempt is over is closed once a later attempt shows that the trouble is gone.
Pure: the same findings, attempts and steps give the same incidents.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rankwatch_detectors.base import Change, Finding
from rankwatch_service.incidents.causes.causation import heads, may_cause, only_suspected, precedence
from rankwatch_service.incidents.causes.suspected_causes import suspect
from rankwatch_service.incidents.hang_evidence import ASKED
from rankwatch_service.incidents.headline import Headline, begin_grade, goes_on_beside, grade, keep, locate
from rankwatch_service.incidents.kinds import KINDS
from rankwatch_service.incidents.model import (
    Incident,
    Part,
    incident_id,
    incident_restored,
    incident_state,
    named_hosts,
    number,
    part_of,
    take_figures,
    take_times,
)
from rankwatch_service.incidents.placement import Placement
from rankwatch_service.incidents.resolution import (
    PROGRESS_FRAMES,
    come_back,
    end_by_itself,
    end_for_good,
    end_with_job,
    ended_after,
    ended_by_start,
    ended_with_its_attempt,
    go_on_again,
    last_to_end,
    may_resolve,
    quiet_s,
)
from rankwatch_service.incidents.transition import TransitionKind, Update, reported_once
from rankwatch_service.short_ids import short

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

    def settle(self, now_s: float = math.inf) -> list[Update]:
        """Resolve incidents that ended by themselves long enough ago, as of the time when they ended; without a time
        all that have ended.
        """
        quiet = [incident for incident in self.open if may_resolve(incident, now_s)]
        return [
            self._resolve_ended(one, last, f"{last.kind} did not come back within {quiet_s(one):.0f} s")
            for one in quiet
            if (last := last_to_end(one)) is not None
        ]

    def finish(self, step: int | None, now_s: float, reason: str = "the job ended") -> list[Update]:
        """Resolve all incidents: the job has ended. One that was over by then lasted until it ended by itself."""
        updates = []
        for incident in self.open:
            if incident.is_over and (last := last_to_end(incident)) is not None:
                updates.append(self._resolve_ended(incident, last, f"{last.kind} had ended by itself; {reason}"))
            end_with_job(incident)
            updates += self._resolve_if_over(incident, step, now_s, reason) if incident.state != "resolved" else []
        return updates

    def _resolve_ended(self, incident: Incident, last: Part, text: str) -> Update:
        self._mark_resolved(incident, last.ended_step, last.ended_s or 0.0)
        return Update(incident, TransitionKind.RESOLVED, text)

    def judge(self, findings: Sequence[Finding], placement: Placement) -> list[Update]:
        """Take the findings of one observation: causes before effects, ends last, since one kind may become another."""
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
        return self._changed(incident, before, f"{before.kind} {how} {part.kind}: {finding.summary}", part, finding)

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
        take_figures(part, finding)
        incident.updated_time_s = finding.detected_time_s
        wider = not set(finding.ranks) <= set(part.ranks)
        if part.ranks and finding.ranks and part.ranks[0] != finding.ranks[0]:
            take_times(part, finding)
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
            incident.summary += ended_after(finding)
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
