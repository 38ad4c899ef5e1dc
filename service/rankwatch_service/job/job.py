"""One job: bundles, ticks and control records in, effects out. Pure and deterministic: a replay ends in the same state.

Connects the parts: assembler -> detectors -> correlator -> ledger, policy and notifications.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rankwatch import wire
from rankwatch_detectors.base import AttemptStart, Frame, Kind, Observation, Occurrence
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.host_incidents import host_incidents
from rankwatch_service.incidents.model import unix_ns
from rankwatch_service.incidents.stack_dumps import attach_stack
from rankwatch_service.incidents.transition import Transition, TransitionKind, Update
from rankwatch_service.job.assembler import Assembler
from rankwatch_service.job.detection import DetectionPipeline, MakeDetectors
from rankwatch_service.job.effects import Effects, FeedEntry
from rankwatch_service.job.history import JobHistory
from rankwatch_service.job.summary import AttemptChange, SummaryBuilder
from rankwatch_service.policy.checkpoint_ledger import LedgerEntry
from rankwatch_service.policy.control_records import ControlRecord, Judgement, OrderPhase
from rankwatch_service.policy.response import JobSituation, Responder
from rankwatch_service.policy.routing import notifications
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.telemetry.bundle import Bundle

REST_AFTER_S: Final = 3_600.0
"""A job without telemetry for this long becomes idle: it drops its frames and detectors and keeps its incidents."""

MATTERS: Final = (TransitionKind.OPENED, TransitionKind.UPDATED, TransitionKind.EVIDENCE)
"""Transitions after which cost, suggestion and the policy's action are decided again."""

SHOWN: Final = ("state", "attempt", "step", "step_time_s", "loss", "ranks_reporting", "last_progress_unix_ns")
"""Fields of the summary that the feed carries."""

Links = Callable[[str, str], Mapping[str, str]]
"""(job, incident id) -> URLs of pages about the incident, by name."""


class JobStream:
    """The state of one job at one place in the log."""

    def __init__(self, job: str, make_detectors: MakeDetectors, links: Links, settings: SettingsInForce) -> None:
        self.job = job
        self.settings = settings
        self.history = JobHistory()
        self.detectors_without_snapshot: list[str] = []
        """Detectors whose state could not be restored."""
        self._links = links
        self._assembler = Assembler()
        self._pipeline = DetectionPipeline(job, make_detectors)
        self._responder = Responder()
        self._summary = SummaryBuilder(job)
        self._heard_s = 0.0
        self._resting = False

    @property
    def correlator(self) -> Correlator:
        """The incidents."""
        return self._pipeline.correlator

    @property
    def resting(self) -> bool:
        """Whether the job is idle: only its incidents are kept until telemetry arrives again."""
        return self._resting

    def begin_without_snapshot(self, first_seen_unix_ns: int | None, attempt: str, attempts: int) -> None:
        """Begin as an idle job whose past is lost; its row in the table of jobs stays as it is until telemetry comes.

        Args:
            first_seen_unix_ns: when the job was first seen; None if that is not known.
            attempt: its newest attempt; empty if there is none.
            attempts: how many attempts it had.
        """
        self._resting = True
        self._summary.begin_without_snapshot(first_seen_unix_ns, attempt, attempts)

    def may_join(self, batch: wire.Batch) -> bool:
        """Whether `take` accepts this batch in a bundle of several."""
        return not self._summary.is_new and self._assembler.may_join(batch)

    def take(self, bundle: Bundle, now_s: float, effects: Effects) -> bool:
        """Take the next bundle in log order, with the same outcome as taking its batches one by one.

        Returns:
            False if that is not possible for the whole bundle; then nothing has changed.
        """
        if not self._assembler.fits(bundle, now_s):
            return False
        self._heard_s, self._resting = now_s, False
        self._observe(self._assembler.take(bundle, now_s), now_s, effects)
        if self._summary.is_new:
            self._summarize(now_s, effects)  # so that a new job is listed before its first tick
        return True

    def control(self, record: ControlRecord, now_s: float, effects: Effects) -> None:
        """Take the next control record about this job, or about all jobs."""
        match record:
            case OrderPhase():
                self._summary.order(record.action, record.phase, now_s)
                if record.phase in ("do", "go", "kill"):
                    what = f"{record.action} ({record.mode})" if record.mode else record.action
                    self.history.note(f"{what}: {record.phase}", record.step, now_s)
                fields = {
                    "order": record.order,
                    "phase": record.phase,
                    "action": record.action,
                    "step": record.step,
                }
                step = record.step if record.step >= 0 else None
                occurrence = Occurrence("order", record.attempt, "", now_s, None, step, fields)
                self._observe([occurrence], now_s, effects)
            case Judgement():
                self._judgement(record, now_s, effects)
            case _:
                self.settings.take(record)

    def tick(self, now_s: float, blind_s: float, effects: Effects) -> None:
        """Advance to `now_s`.

        Args:
            now_s: stream time.
            blind_s: for how much of the time since the last tick the service could not receive anything.
            effects: gets what follows.
        """
        if self._resting:
            return
        self._observe(self._assembler.tick(now_s, blind_s), now_s, effects)
        situation = self._situation(now_s)
        # What kept the policy from acting, such as a cool-down, may have passed.
        for incident in self.correlator.open:
            if incident.state == "open" and incident.goes_on:
                effects.commands += self._responder.reconsider(
                    incident, situation, self.settings.policy, self.history.ledger
                )
        if self._assembler.finished:
            self._tell(self.correlator.finish(self._assembler.last_step, now_s), now_s, effects)
        self._summarize(now_s, effects)
        if now_s - self._heard_s > REST_AFTER_S:
            self._resting = True
            self._assembler = Assembler()
            self._pipeline.rest()

    # ---- observations ----------------------------------------------------------------------------------------------

    def _observe(self, observations: Iterable[Observation], now_s: float, effects: Effects) -> None:
        for observation in observations:
            if isinstance(observation, AttemptStart):
                self._attempt_start(observation, now_s, effects)
            told, failures = self._pipeline.observe(observation, self._assembler.topology_state)
            effects.failures += [(self.job, failure) for failure in failures]
            self._tell(told, now_s, effects)
            if isinstance(observation, Frame):
                self._frame(observation, now_s, effects)
            elif isinstance(observation, Occurrence):
                self._occurrence(observation, now_s, effects)

    def _attempt_start(self, start: AttemptStart, now_s: float, effects: Effects) -> None:
        before = self._summary.attempt
        if start.attempt != before:
            if before:
                effects.change_attempt(self.job, before, AttemptChange(ended_unix_ns=unix_ns(now_s)))
            self.history.begin(start.attempt, now_s)
        change = self._summary.attempt_started(start, self._assembler.topology_state, now_s)
        effects.change_attempt(self.job, start.attempt, change)

    def _frame(self, frame: Frame, now_s: float, effects: Effects) -> None:
        effects.frames.append((self.job, frame))
        if frame.late:
            return
        self._summary.frame(frame, now_s)
        if frame.family != "steps":
            return
        self._store(self.history.progressed(frame.attempt, frame.step, self.correlator.open), now_s, effects)

    def _occurrence(self, occurrence: Occurrence, now_s: float, effects: Effects) -> None:
        if occurrence.kind == "checkpoint_saved":
            changed = self.history.saved(occurrence, self._assembler.topology_state.world_size)
            self._store(changed, now_s, effects)
        elif occurrence.kind in ("checkpoint_gone", "process_exit"):
            self._store(self.history.gone(occurrence), now_s, effects)
        elif occurrence.kind == "declared":
            self.history.note(f"declared: {occurrence.fields.get('what')}", occurrence.step, now_s)
        elif occurrence.kind == "checkpoint_loaded":
            self.history.note("checkpoint loaded", occurrence.step, now_s)
        elif occurrence.kind == "stack_dump":
            self._tell(attach_stack(occurrence, self.correlator.open), now_s, effects)

    def _judgement(self, record: Judgement, now_s: float, effects: Effects) -> None:
        incident = self.correlator.get(record.incident)
        if incident is None:
            return
        standing: list[str] = []
        match record.what:
            case "acknowledged" if incident.state == "open":
                incident.state, incident.acknowledged_by = "acknowledged", record.actor
                what = TransitionKind.ACKNOWLEDGED
            case "resolved" if incident.state != "resolved":
                standing = sorted({str(part.kind) for part in incident.parts if part.is_open})
                self.correlator.resolve(incident, self._assembler.last_step, now_s)
                what = TransitionKind.RESOLVED
            case "commented":
                what = TransitionKind.COMMENTED
            case _:
                return
        self._tell([Update(incident, what, record.text, record.actor)], now_s, effects)
        if what is TransitionKind.RESOLVED:
            # The person accepts what detectors still observe: its present level is the one to keep from now on.
            fields = {"kinds": standing}
            accepted = Occurrence("accepted", self._summary.attempt, "", now_s, None, None, fields)
            self._observe([accepted], now_s, effects)

    # ---- effects ---------------------------------------------------------------------------------------------------

    def _tell(self, told: Sequence[Update], now_s: float, effects: Effects) -> None:
        for item in told:
            incident = item.incident
            if item.what in MATTERS and incident.state != "resolved":
                self._respond(item, now_s, effects)
            incident.transitions += 1
            incident.updated_time_s = now_s
            transition = Transition(
                incident.transitions, item.what, item.actor, item.text, item.fields, now_s, incident.version()
            )
            effects.transitions.append(transition)
            messages = notifications(
                transition,
                self.settings.receivers,
                self.settings.silences.values(),
                self._links(self.job, incident.id),
                unix_ns(now_s),
                incident.told_to,
            )
            # A silenced notification does not count: the first that a receiver gets is `incident.opened`.
            incident.tell(message.receiver for message in messages if not message.silenced)
            effects.notifications += messages
            brief = {"id": incident.id, "number": incident.number, "kind": str(incident.kind)}
            brief |= {"state": incident.state, "what": str(item.what), "severity": str(incident.severity)}
            effects.feed.append(self._feed("incident", brief, now_s))

    def _respond(self, item: Update, now_s: float, effects: Effects) -> None:
        incident = item.incident
        if item.what is TransitionKind.OPENED:
            incident.changes_before = self.history.before(incident.first.onset_time_s)
        self._store(self.history.doubt(incident), now_s, effects)
        commands = self._responder.respond(incident, self._situation(now_s), self.settings.policy, self.history.ledger)
        effects.commands += commands
        effects.host_incidents += host_incidents(incident, self._assembler.topology_state, now_s)

    def _store(self, entries: Sequence[LedgerEntry], now_s: float, effects: Effects) -> None:
        for entry in entries:
            effects.checkpoints.append((self.job, entry))
            brief = {"id": entry.id, "step": entry.step, "tier": str(entry.tier), "verdict": str(entry.verdict)}
            effects.feed.append(self._feed("checkpoint", brief, now_s))

    def _summarize(self, now_s: float, effects: Effects) -> None:
        summary = self._summary.changed(self._assembler, self._heard_s, now_s, self._hung())
        if summary is None:
            return
        effects.jobs[self.job] = summary
        ended_ns = unix_ns(now_s) if summary.state == "ended" else None
        for attempt, change in self._summary.attempts_progressed(ended_ns).items():
            effects.change_attempt(self.job, attempt, change)
        brief = {name: getattr(summary, name) for name in SHOWN}
        effects.feed.append(self._feed("job", brief, now_s))

    def _hung(self) -> bool:
        """Whether a hang of the running attempt is open."""
        attempt = self._assembler.attempt
        parts = (part for one in self.correlator.open for part in one.parts)
        return any(part.kind is Kind.HANG and part.is_open and part.attempt == attempt for part in parts)

    def _feed(self, topic: str, data: dict[str, Any], now_s: float) -> FeedEntry:
        return FeedEntry(topic, self.job, data, unix_ns(now_s))

    def _situation(self, now_s: float) -> JobSituation:
        assembler = self._assembler
        return JobSituation(
            attempt=assembler.attempt or "",
            world_size=assembler.topology_state.world_size,
            step=assembler.last_step,
            step_time_s=assembler.step_time_s or 0.0,
            can=assembler.topology_state.can,
            now_s=now_s,
        )

    # ---- snapshot --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything that decides the future: JSON types, bytes and arrays. Copy it before the next call."""
        # Keys are those of the first version, so that its snapshots stay readable.
        return {
            "desk": self.settings.state(),
            "assembler": self._assembler.state(),
            **self._pipeline.state(),
            "books": self.history.state(),
            "history": [[past.action, past.at_unix_ns] for past in self._responder.history],
            "portrait": self._summary.state(),
            "heard_s": self._heard_s,
            "resting": self._resting,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` gave; `detectors_without_snapshot` then names the detectors that begin anew."""
        self.settings = SettingsInForce.restored(state["desk"])
        self._assembler = Assembler.restored(state["assembler"])
        assembler, start = self._assembler, None
        if assembler.attempt is not None and assembler.board is not None:
            start = AttemptStart(assembler.attempt, assembler.topology_state.topology(), state["heard_s"])
        self.detectors_without_snapshot = self._pipeline.restore(state, start)
        self.history = JobHistory.restored(state["books"])
        self._responder.restore(state["history"])
        self._summary.restore(state["portrait"])
        self._heard_s, self._resting = state["heard_s"], state["resting"]
