"""One job: bundles, ticks and control records in, effects out. Pure and deterministic: a replay ends in the same state.

Connects the parts: assembler -> detectors -> correlator -> ledger, policy and announcements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rankwatch_detectors.base import AttemptStart, Frame, Observation, Occurrence
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.hang import ANSWERS, HangEvidence
from rankwatch_service.incidents.host_incidents import host_incidents
from rankwatch_service.incidents.model import MATTERS, Incident, Transition, TransitionKind, Update, hangs, unix_ns
from rankwatch_service.job.admission import (
    NOTHING,
    Admission,
    BundleAccepted,
    BundleRefused,
    BundleSplit,
    CellCount,
    CellDemand,
    CellQuota,
    limit_of,
)
from rankwatch_service.job.assembler import Assembler
from rankwatch_service.job.attempts import AHEAD_MAX, Launch, PendingAttempts, RankOwners
from rankwatch_service.job.detection import DetectionPipeline, MakeDetectors
from rankwatch_service.job.device_boards import DeviceBoards, as_frame
from rankwatch_service.job.effects import Effects, FeedEntry, brief
from rankwatch_service.job.event_owners import DECLARATION_STEPS, DECLARATIONS_MAX, Declarations
from rankwatch_service.job.history import JobHistory
from rankwatch_service.job.summary import AttemptChange, SummaryBuilder
from rankwatch_service.names import launch_of, number_of, series_of_devices
from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.policy.announcement import command_announcement, incident_announcement
from rankwatch_service.policy.checkpoint_ledger import LedgerEntry
from rankwatch_service.policy.control_records import (
    ControlRecord,
    IncidentReview,
    JobOwnership,
    OrderPhase,
    ServiceReport,
)
from rankwatch_service.policy.response import JobSituation, Responder, acceptance, advice_gone, judged
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.telemetry.bundle import Bundle
from rankwatch_service.telemetry.envelope import Reason

IDLE_AFTER_S: Final = 3_600.0
"""A job without telemetry for this long becomes idle: it drops its frames and detectors and keeps its incidents."""

Links = Callable[[str, str], Mapping[str, str]]
"""(job, incident id) -> URLs of pages about the incident, by name."""


class JobStream:
    """The state of one job at one position in the log."""

    def __init__(self, job: str, make_detectors: MakeDetectors, links: Links, settings: SettingsInForce) -> None:
        self.job = job
        self.history = JobHistory()
        self.detectors_without_snapshot: list[str] = []
        """Detectors whose state could not be restored."""
        self._links = links
        self._assembler = Assembler()
        self._allowed_cells = 0
        self._rank_owners = RankOwners()
        self._pending_attempts = PendingAttempts()
        self._declarations = Declarations()
        self._pipeline = DetectionPipeline(job, make_detectors, lambda: self.settings.rules_of(job))
        self.adopt(settings)
        self._summary = SummaryBuilder(job)
        self._responder, self._hang_evidence = Responder(), HangEvidence()
        self._received_s, self._is_idle = 0.0, False
        self.devices, self.ownership = DeviceBoards(), JobOwnership(job)
        """What its devices count; its project and owner."""

    def adopt(self, settings: SettingsInForce) -> None:
        """Apply these settings from now on."""
        self.settings = settings
        self._pipeline.tune(settings.tuning)

    @property
    def correlator(self) -> Correlator:
        """The incidents."""
        return self._pipeline.correlator

    @property
    def first_seen_unix_ns(self) -> int | None:
        """When the job began, stream time; None before its first summary."""
        return self._summary.first_seen_unix_ns

    @property
    def is_idle(self) -> bool:
        """Whether the job is idle: only its incidents are kept until telemetry arrives again."""
        return self._is_idle

    def begin_without_snapshot(self, first_seen_unix_ns: int | None, attempt: str, attempts: int) -> None:
        """Begin as an idle job whose past is lost; its row in the table of jobs stays until telemetry comes."""
        self._is_idle = True
        self._summary.begin_without_snapshot(first_seen_unix_ns, attempt, attempts)

    @property
    def allowed(self) -> CellDemand:
        """What the job is allowed to have state for, until it is idle."""
        return CellDemand(self._allowed_cells, self._assembler.cells.is_reporting)

    # ---- admission -------------------------------------------------------------------------------------------------

    def admit(self, bundle: Bundle, quota: CellQuota, now_s: float, effects: Effects) -> Admission:
        """Process the next bundle in log order, if it is admitted.

        Args:
            bundle: of any attempt; each of several batches has only rows, and progress of ranks that go on.
            quota: what the job may have at the bundle.
            now_s: stream time.
            effects: what follows is added here.

        Returns:
            Accepted, if it was taken, with the same outcome as its batches one by one. Split only for several batches,
            and refused only for one. A batch that is refused for want of room may still have introduced its ranks.
        """
        several = len(bundle.batches) > 1
        if several and not self._assembler.fits(bundle, now_s):
            return BundleSplit()
        if refused := self._refusal(bundle, now_s):
            return BundleSplit() if several else refused
        count = self._count_of(bundle.attempt)
        demand = count.demand(bundle) if count else NOTHING
        may_grow = demand.cells <= self._allowed_cells or self._grant(demand, quota, effects)
        if several and not may_grow:
            return BundleSplit()
        self._received_s, self._is_idle = now_s, False
        if not may_grow:
            self._report_limit(demand, bundle, quota, now_s, effects)
            if bundle.attempt != self._assembler.attempt or self._assembler.board is None:
                return BundleRefused(Reason.LIMIT, str(limit_of(demand)))
        if count and self._assembler.is_newer(bundle.attempt):
            if not (self._may_take_over(now_s) or self._rank_owners.has(bundle.batches[0])):
                self._assembler.counts["newcomer_batches"] += self._pending_attempts.add(bundle, count, now_s)
                return BundleAccepted()
            self._begin(bundle.attempt, now_s, effects)
            may_grow = self._is_allowed(bundle)  # beside its batches that waited
        self._take(bundle, now_s, effects, may_grow=may_grow)
        if self._summary.is_new:
            self._summarize(now_s, effects)  # so that a new job is listed before its first tick
        return BundleAccepted()

    def _refusal(self, bundle: Bundle, now_s: float) -> BundleRefused | None:
        """Why a bundle is forged, or which sender has no rank of its attempt; None if it is accepted."""
        until_ns = self.settings.policy.unsigned_until_unix_ns
        if until_ns is not None and unix_ns(now_s) >= until_ns and not all(batch.agent for batch in bundle.batches):
            return BundleRefused(Reason.FORGED, "unsigned telemetry is not accepted any more")
        running, attempt = self._assembler.attempt, bundle.attempt
        launch = self._launch_of(attempt)
        if launch is Launch.RUNNING and number_of(attempt) > number_of(running or attempt) + AHEAD_MAX:
            return BundleRefused(Reason.FORGED, f"attempt {attempt} does not follow {running}")
        return self._rank_owners.refusal(bundle, launch, self._assembler.topology_state, now_s)

    def _count_of(self, attempt: str) -> CellCount | None:
        """The count to which a bundle of an attempt belongs; None for an earlier attempt, of which nothing is kept."""
        if attempt != self._assembler.attempt and not self._assembler.is_newer(attempt):
            return None
        return self._pending_attempts.cells(attempt) or self._assembler.count_for(attempt)

    def _is_allowed(self, bundle: Bundle) -> bool:
        """Whether the job may have state for all of a bundle, without a further grant."""
        count = self._count_of(bundle.attempt)
        return count is None or count.demand(bundle).cells <= self._allowed_cells

    def _grant(self, demand: CellDemand, quota: CellQuota, effects: Effects) -> bool:
        """Grant the job what it demands; returns whether it may have that."""
        if (grant := quota.grant(demand)) is None:
            return False
        effects.grants.append(grant)
        self._allowed_cells = grant.cells
        return True

    def _report_limit(
        self, demand: CellDemand, bundle: Bundle, quota: CellQuota, now_s: float, effects: Effects
    ) -> None:
        """Report that the job may not have what it demands for a bundle.

        If the attempt does not run yet, who its ranks are is taken, where the job may have that.
        """
        self.report("limit", {**asdict(limit_of(demand)), "host": bundle.batches[0].host}, now_s, effects)
        launch = self._launch_of(bundle.attempt)
        named = self._rank_owners.disambiguate_hosts(bundle, launch, self._assembler.topology_state)
        introduction = self._assembler.introduction(named)
        allowed = introduction.cells <= self._allowed_cells or self._grant(introduction, quota, effects)
        if introduction.cells and allowed:
            self._assembler.introduce(named, now_s)
        if self._summary.is_new:
            self._summarize(now_s, effects)  # a job with an incident is listed

    def _take(self, bundle: Bundle, now_s: float, effects: Effects, *, may_grow: bool) -> None:
        assembler, attempt = self._assembler, bundle.attempt
        launch, topology = self._launch_of(attempt), assembler.topology_state
        is_older = assembler.attempt not in (None, attempt) and not assembler.is_newer(attempt)
        own = self._rank_owners.add(bundle, launch, topology, self.history.ledger, now_s, is_older=is_older)
        if own.strange_checkpoints:
            self.history.counts["checkpoint_gone"] += own.strange_checkpoints
        for (host, agent, kind), count in own.rankless_events.items():
            fields = {"what": "event", "detail": f"{kind} of no rank", "host": host, "agent": agent, "count": count}
            self.report("forged", fields, now_s, effects)
        new_devices = self.devices.add(own.bundle.batches, len(topology.infos), now_s)
        effects.devices += [(self.job, device) for device in new_devices]
        self._observe(assembler.add(own.bundle, now_s, may_grow=may_grow), now_s, effects)

    # ---- attempts --------------------------------------------------------------------------------------------------

    def _may_take_over(self, now_s: float) -> bool:
        """Whether any attempt may: none runs."""
        return self._assembler.attempt is None or self._assembler.ended or self._rank_owners.silent(now_s)

    def _begin(self, attempt: str, now_s: float, effects: Effects) -> None:
        """A newer attempt takes over, with those of its batches that waited for it."""
        before = self._assembler.attempt
        self._rank_owners.begin(new_launch=before is None or launch_of(before) != launch_of(attempt))
        for bundle in self._pending_attempts.pop(attempt):
            if (refused := self._refusal(bundle, now_s)) is None:
                self._take(bundle, now_s, effects, may_grow=self._is_allowed(bundle))
            elif refused.reason is Reason.FORGED:
                fields = {"what": "rank", "detail": refused.detail, "host": bundle.batches[0].host}
                self.report("forged", fields, now_s, effects)

    def _launch_of(self, attempt: str) -> Launch:
        running = self._assembler.attempt
        if running is not None and launch_of(running) == launch_of(attempt):
            return Launch.RUNNING
        return Launch.LATER if self._assembler.is_newer(attempt) else Launch.EARLIER

    def control(self, record: ControlRecord, now_s: float, effects: Effects) -> None:
        """Apply the next control record about this job, or about all jobs."""
        match record:
            case OrderPhase():
                self._summary.order(record.action, record.phase, now_s, paused=record.paused)
                self.history.ordered(record, now_s)
                fields = {name: getattr(record, name) for name in ("order", "phase", "action", "step")}
                step = record.step if record.step >= 0 else None
                self._observe([Occurrence("order", record.attempt, "", now_s, None, step, fields)], now_s, effects)
            case IncidentReview():
                self._review(record, now_s, effects)
            case _ if isinstance(record, ServiceReport):
                self.report(record.kind, record.fields, now_s, effects)
            case JobOwnership():
                self.ownership = record
            case _:
                rules, changed = self.settings.rules, self.settings.take_for(self.job, record)
                if self._pipeline.tune(self.settings.tuning):
                    changed += (f"tuning: version {self.settings.tuning.version}",)
                self.history.configured(() if self._is_idle else changed, self._assembler.last_step, now_s)
                if self.settings.rules != rules:  # detectors get them with a start of the attempt
                    self._observe(filter(None, [self._assembler.start(now_s)]), now_s, effects)

    def report(self, kind: str, fields: Mapping[str, Any], now_s: float, effects: Effects) -> None:
        """Report what the service itself knows of the job: a kind of `SERVICE_KINDS`, with its fields."""
        self._observe([self._report_of(kind, fields, now_s)], now_s, effects)
        if self._is_idle:  # no tick will show whether it comes back
            self._publish(self.correlator.resolve_ended(), now_s, effects)

    def tick(self, now_s: float, outage_s: float, effects: Effects) -> None:
        """Advance to `now_s`; for `outage_s` of the time since the last tick the service could not receive anything."""
        if self._is_idle:
            return
        self._rank_owners.discount_outage(outage_s)
        self._observe(self._assembler.tick(now_s, outage_s), now_s, effects)
        if (newest := self._pending_attempts.newest()) and self._may_take_over(now_s):
            self._begin(newest, now_s, effects)
        for pending in self._pending_attempts.beside(now_s):
            detail = f"attempt {pending.attempt} sends telemetry beside the running one"
            self.report("forged", {"what": "attempt", "detail": detail, "host": pending.host}, now_s, effects)
        for counters in self.devices.due(now_s):
            effects.chart(series_of_devices(self.job, counters.kind), as_frame(counters))
            self._observe([counters], now_s, effects)
        situation = self._situation(now_s)
        # What kept the policy from acting, such as a cool-down, may have passed.
        for incident in self.correlator.open:
            if incident.state == "open" and incident.goes_on:
                commands = self._responder.reconsider(incident, situation, self.settings, self.history.ledger)
                self._request(commands, incident, effects)
        self._publish(self._hang_evidence.due(self.correlator.open, situation.world_size, now_s), now_s, effects)
        effects.stacks += [(self.job, received) for received in self._hang_evidence.received]
        if self._assembler.finished:
            self._publish(self.correlator.finish(self._assembler.last_step, now_s), now_s, effects)
        self._summarize(now_s, effects)
        if now_s - self._received_s > IDLE_AFTER_S:
            self._is_idle, self._assembler, self._allowed_cells = True, Assembler(), 0
            self._rank_owners.begin(new_launch=True)
            self._pipeline.rest()
            self._publish(self.correlator.resolve_ended(), now_s, effects)

    # ---- observations ----------------------------------------------------------------------------------------------

    def _observe(self, observations: Iterable[Observation], now_s: float, effects: Effects) -> None:
        """Handle each observation, with all that follows from it, before the next one is taken.

        The order within one is: the attempt that it starts; the updates of incidents that detectors make of it; the
        checkpoints that it changes; the updates of incidents whose advised checkpoint is gone by that. An update leads
        to no further one, since it makes checkpoints suspect and never gone.
        """
        for given in observations:
            observation = self._within_limits(given, now_s)
            if isinstance(observation, AttemptStart):
                self._start_attempt(observation, now_s, effects)
            assembler = self._assembler
            updates, failures = self._pipeline.observe(observation, assembler.topology_state, assembler.coming)
            effects.failures += [(self.job, failure) for failure in failures]
            self._publish(updates, now_s, effects)
            if entries := self._record(observation, now_s, effects):
                self._store(entries, now_s, effects)
                self._publish(advice_gone(self.correlator.open, entries), now_s, effects)

    def _within_limits(self, observation: Observation, now_s: float) -> Observation:
        """The observation; in place of a change that is declared beyond the limit of these, the report of that."""
        if not isinstance(observation, Occurrence) or observation.kind != "declared":
            return observation
        running, step = self._assembler.attempt, self._assembler.last_step
        if observation.attempt != running or self._declarations.allow(observation, step):
            return observation
        limit = f"{DECLARATIONS_MAX}, and one in {DECLARATION_STEPS} steps,"
        fields = {"what": "declared changes", "limit": limit, "host": observation.host}
        return self._report_of("limit", fields, now_s)

    def _report_of(self, kind: str, fields: Mapping[str, Any], now_s: float) -> Occurrence:
        return Occurrence(kind, self._summary.attempt, "", now_s, None, None, fields)

    def _start_attempt(self, start: AttemptStart, now_s: float, effects: Effects) -> None:
        before = self._summary.attempt
        if start.attempt != before:
            if before:
                effects.change_attempt(self.job, before, AttemptChange(ended_unix_ns=unix_ns(now_s)))
            self.history.begin(start.attempt, before, now_s)
        change = self._summary.attempt_started(start, self._assembler.topology_state, now_s)
        effects.change_attempt(self.job, start.attempt, change)

    def _record(self, observation: Observation, now_s: float, effects: Effects) -> Sequence[LedgerEntry]:
        """Record an observation in charts, summary and history; returns the checkpoints that it changes."""
        if isinstance(observation, Occurrence):
            return self._record_event(observation, effects)
        if not isinstance(observation, Frame):
            return ()
        effects.chart(self.job, observation)
        if observation.late:
            return ()
        self._summary.frame(observation, now_s)
        if observation.family != "steps":
            return ()
        return self.history.progressed(observation.attempt, observation.step, self.correlator.open)

    def _record_event(self, event: Occurrence, effects: Effects) -> Sequence[LedgerEntry]:
        if event.kind == "checkpoint_saved":
            return self.history.saved(event, self._assembler.topology_state, self._assembler.attempt or "")
        if event.kind in ("checkpoint_gone", "process_exit"):
            return self.history.gone(event)
        if event.kind in ("location_refused", "declared", "checkpoint_loaded", "checkpoint_failed"):
            self.history.add(event)
        elif event.kind == "trace":
            effects.traces += self.history.traced(self.job, event)
        elif event.kind in ANSWERS:
            self._hang_evidence.take(event, self.correlator.open)
        return ()

    def _review(self, record: IncidentReview, now_s: float, effects: Effects) -> None:
        """Apply a person's review of an incident."""
        incident = self.correlator.get(record.incident)
        standing = [] if incident is None else [part for part in incident.parts if part.is_open]
        update = judged(self.correlator, record, self._assembler.last_step, now_s)
        if update is None:
            return
        self._publish([update], now_s, effects)
        if update.what is TransitionKind.RESOLVED:
            self._observe([acceptance(standing, self._summary.attempt, now_s)], now_s, effects)

    # ---- effects ---------------------------------------------------------------------------------------------------

    def _publish(self, updates: Iterable[Update], now_s: float, effects: Effects) -> None:
        """Turn updates of incidents into transitions and messages, after what the policy does about each."""
        for update in updates:
            incident = update.incident
            if update.what in MATTERS and incident.state != "resolved":
                self._respond(update, now_s, effects)
            incident.transitions += 1
            incident.updated_time_s = now_s
            transition = Transition(
                incident.transitions, update.what, update.actor, update.text, update.fields, now_s, incident.version()
            )
            effects.transitions.append(transition)
            topology = self._assembler.topology_state
            about = (self._links(self.job, incident.id), self.ownership, topology.world_size, topology.accelerated)
            if announcement := incident_announcement(transition, *about):
                effects.announcements.append(announcement)
            effects.feed.append(FeedEntry("incident", self.job, brief(transition), unix_ns(now_s)))

    def _respond(self, update: Update, now_s: float, effects: Effects) -> None:
        incident = update.incident
        if update.what is TransitionKind.OPENED:
            incident.changes_before = self.history.before(incident.first.onset_time_s, incident.kind)
        self._store(self.history.mark_suspect(incident), now_s, effects)
        commands = self._responder.respond(incident, self._situation(now_s), self.settings, self.history.ledger)
        self._request(commands, incident, effects)
        effects.host_incidents += host_incidents(incident, self._assembler.topology_state, now_s)

    def _request(self, commands: Sequence[CommandRequest], incident: Incident, effects: Effects) -> None:
        effects.commands += commands
        about = (self._links(self.job, incident.id), incident.version(), self.ownership)
        announced = (command_announcement(command, *about) for command in commands)
        effects.announcements += filter(None, announced)

    def _store(self, entries: Sequence[LedgerEntry], now_s: float, effects: Effects) -> None:
        for entry in entries:
            effects.checkpoints.append((self.job, entry))
            data = {"id": entry.id, "step": entry.step, "tier": str(entry.tier), "verdict": str(entry.verdict)}
            effects.feed.append(FeedEntry("checkpoint", self.job, data, unix_ns(now_s)))

    def _summarize(self, now_s: float, effects: Effects) -> None:
        hung = hangs(self.correlator.open, self._assembler.attempt)
        counts = self.history.counts + self.devices.counts + self._pipeline.counts
        summary = self._summary.changed(
            self._assembler, self._received_s, now_s, hung, counts, self.history.configuration
        )
        if summary is None:
            return
        effects.jobs[self.job] = summary
        ended_unix_ns = unix_ns(now_s) if summary.state == "ended" else None
        for attempt, change in self._summary.attempts_progressed(ended_unix_ns).items():
            effects.change_attempt(self.job, attempt, change)
        effects.feed.append(FeedEntry("job", self.job, summary.shown(), unix_ns(now_s)))

    def _situation(self, now_s: float) -> JobSituation:
        return JobSituation(
            attempt=self._assembler.attempt or "",
            world_size=self._assembler.topology_state.world_size,
            step=self._assembler.last_step,
            step_time_s=self._assembler.step_time_s or 0.0,
            can=self._assembler.topology_state.can,
            now_s=now_s,
            project=self.ownership.project,
        )

    # ---- snapshot --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that decides the future: JSON types, bytes and arrays. Copy it before the next call."""
        return {
            "settings": self.settings.state(),
            "assembler": self._assembler.state(),
            "allowed_cells": self._allowed_cells,
            "rank_owners": self._rank_owners.state(),
            "pending_attempts": self._pending_attempts.state(),
            "declarations": self._declarations.state(),
            "devices": self.devices.state(),
            "hang_evidence": self._hang_evidence.state(),
            **self._pipeline.state(),
            "job_history": self.history.state(),
            "commands": [[past.action, past.at_unix_ns] for past in self._responder.history],
            "summary": self._summary.state(),
            "received_s": self._received_s,
            "resting": self._is_idle,
            "ownership": [self.ownership.project, self.ownership.owner],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` gave; `detectors_without_snapshot` then names the detectors that begin anew."""
        self.adopt(SettingsInForce.restored(state["settings"]))
        self._assembler, self._allowed_cells = Assembler.restored(state["assembler"]), state["allowed_cells"]
        self._rank_owners = RankOwners.restored(state["rank_owners"])
        self._pending_attempts = PendingAttempts.restored(state["pending_attempts"])
        self._declarations = Declarations.restored(state["declarations"])
        self.devices = DeviceBoards.restored(state["devices"])
        self._hang_evidence = HangEvidence.restored(state["hang_evidence"])
        self.detectors_without_snapshot = self._pipeline.restore(state, self._assembler.start(state["received_s"]))
        self.history = JobHistory.restored(state["job_history"])
        self._responder.restore(state["commands"])
        self._summary.restore(state["summary"])
        self._received_s, self._is_idle = state["received_s"], state["resting"]
        self.ownership = JobOwnership(self.job, *state["ownership"])
