"""What a person decides about an incident. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rankwatch_detectors.base import Kind, Occurrence, Severity
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.hang import asked_ranks
from rankwatch_service.incidents.kinds import KINDS
from rankwatch_service.incidents.model import STACKS, Incident, Part, TransitionKind, Update, unix_ns
from rankwatch_service.policy.actions import Action, CommandRequest
from rankwatch_service.policy.checkpoint_ledger import Ledger, LedgerEntry, Verdict
from rankwatch_service.policy.control_records import IncidentReview
from rankwatch_service.policy.policy import Decision, IncidentFacts, Mode, PastAction, decide
from rankwatch_service.policy.precision import UNREVIEWED
from rankwatch_service.policy.rollback import resumed_from
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.policy.suggestion import PASSED, Figures, suggest


def judged(correlator: Correlator, record: IncidentReview, step: int, now_s: float) -> Update | None:
    """Apply a judgement; None if there is no such incident any more, or it is in that state already."""
    incident = correlator.get(record.incident)
    if incident is None:
        return None
    match record.what:
        case "acknowledged" if incident.state != "resolved" and incident.acknowledged_by != record.actor:
            incident.state, incident.acknowledged_by = "acknowledged", record.actor
            what = TransitionKind.ACKNOWLEDGED
        case "unacknowledged" if incident.state == "acknowledged":
            incident.state, incident.acknowledged_by = "open", None
            what = TransitionKind.UNACKNOWLEDGED
        case "resolved" if incident.state != "resolved":
            correlator.resolve(incident, step, now_s)
            what = TransitionKind.RESOLVED
        case "commented":
            what = TransitionKind.COMMENTED
        case _:
            return None
    return Update(incident, what, record.text, record.actor)


def acceptance(standing: Iterable[Part], attempt: str, now_s: float) -> Occurrence:
    """A person accepts what detectors still observe: its present level is the one to keep from now on.

    Args:
        standing: the open parts of the incident that the person resolved.
        attempt: the newest one.
        now_s: stream time.
    """
    parts = list(standing)
    reported = {
        "kinds": sorted({str(part.kind) for part in parts}),
        "scopes": sorted({str(part.scope) for part in parts}),
    }
    return Occurrence("accepted", attempt, "", now_s, None, None, reported)


HISTORY_S: Final = 3_600.0
"""How long an action counts against the policy's budget and cool-down."""


@dataclass(frozen=True, slots=True)
class JobSituation:
    """The job at the time at which its incident is judged."""

    attempt: str
    world_size: int
    step: int
    step_time_s: float
    can: Collection[str]
    now_s: float
    project: str = ""


def impact_gpu_hours_per_hour(incident: Incident, world_size: int) -> float:
    """GPU-hours per hour that the incident costs: all GPUs if they are idle, or wasted for certain, else the share that
    waits.
    """
    if incident.is_over:
        return 0.0
    # Parts of severity info do not count: a job that was asked to end stands still as well.
    grave = [part for part in incident.parts if part.is_open and part.severity is not Severity.INFO]
    stands_still = any(KINDS[part.kind].stands_still for part in grave)
    wasted = any(part.corrupts_weights and part.severity is Severity.CRITICAL for part in grave)
    if stands_still or wasted:
        return float(world_size)
    if incident.cost_gpu_hours_per_hour is not None:
        return incident.cost_gpu_hours_per_hour
    ratio = incident.evidence.get("ratio")
    if incident.kind is Kind.SLOWDOWN and isinstance(ratio, int | float) and 1 < ratio < math.inf:
        return world_size * (1 - 1 / ratio)
    return 0.0


def facts(incident: Incident, world_size: int, project: str = "") -> IncidentFacts:
    """What the policy needs to know: the facts of the gravest part, whatever caused it.

    The onset is the earliest of that part and of all parts that may have corrupted the weights.
    """
    gravest = incident.gravest
    kinds = {part.kind for part in incident.parts if part.is_open}
    corrupted = [part.onset_step for part in incident.parts if part.corrupts_weights]
    onsets = [step for step in (gravest.onset_step, *corrupted) if step is not None]
    return IncidentFacts(
        id=incident.id,
        job=incident.job,
        kind=str(gravest.kind),
        severity=str(incident.grade(gravest)),
        confidence=gravest.confidence,
        onset_step=min(onsets, default=None),
        ranks=incident.ranks,
        world_size=world_size,
        project=project,
        hung=Kind.HANG in kinds,
        processes_lost=Kind.RANK_LOST in kinds,
        # Silence alone does not show that a host is gone: it may be its agent that is away.
        hosts_lost=Kind.TELEMETRY_LOST in kinds and Kind.RANK_LOST in kinds,
    )


def advice_gone(incidents: Iterable[Incident], entries: Iterable[LedgerEntry]) -> list[Update]:
    """Updates of the incidents whose advised checkpoint is gone, which give them another suggestion.

    Args:
        incidents: the open ones.
        entries: the ledger entries that have just changed.
    """
    gone = {entry.id: entry.reason for entry in entries if entry.verdict is Verdict.GONE}
    return [
        Update(incident, TransitionKind.EVIDENCE, f"Checkpoint {incident.checkpoint} is gone: {reason}.")
        for incident in incidents
        if (reason := gone.get(incident.checkpoint or "")) is not None
    ]


class Responder:
    """Carries out the policy for one job: remembers its actions and requests each command once."""

    def __init__(self) -> None:
        self.history: list[PastAction] = []

    def restore(self, history: Iterable[Sequence[Any]]) -> None:
        """Restore the history from a snapshot's pairs of action and Unix nanoseconds."""
        self.history = [PastAction(action, at_unix_ns) for action, at_unix_ns in history]

    def respond(
        self, incident: Incident, situation: JobSituation, settings: SettingsInForce, ledger: Ledger
    ) -> list[CommandRequest]:
        """Set the incident's cost, suggestion and checkpoint; return the commands that follow from it."""
        incident.impact_gpu_hours_per_hour = impact_gpu_hours_per_hour(incident, situation.world_size)
        if incident.is_over:
            incident.suggestion, incident.checkpoint = dict(PASSED), None
            return []
        looked = facts(incident, situation.world_size, situation.project)
        decision = self._decide(looked, situation, settings, ledger)
        figures = Figures(situation.step, situation.step_time_s, incident.impact_gpu_hours_per_hour)
        policy: dict[str, Any] = {"mode": str(decision.mode), "action": decision.action, "reason": decision.reason}
        ordered = (incident.suggestion.get("policy") or {}).get("ordered")
        if ordered and incident.action_key(ordered["action"]) in incident.actions:
            policy["ordered"] = ordered
        incident.suggestion = {**suggest(looked, decision, figures, situation.can, ledger), "policy": policy}
        # What is suggested to go on from; else what outlives the processes, as captures in memory are replaced by newer
        # ones all the time.
        kept = resumed_from(ledger.entries)
        incident.checkpoint = incident.suggestion["checkpoint"] or (None if kept is None else kept.id)
        commands = self._act(incident, decision, situation)
        hung = next((part for part in incident.parts if part.kind is Kind.HANG and part.is_open), None)
        if hung is not None and incident.action_key(STACKS) not in incident.actions:
            asked = {"ranks": asked_ranks(hung)}
            commands.append(self._command(incident, STACKS, asked, situation, "shows where the ranks hang", False))
        return commands

    def reconsider(
        self, incident: Incident, situation: JobSituation, settings: SettingsInForce, ledger: Ledger
    ) -> list[CommandRequest]:
        """Act on an open incident once an obstacle, such as a cool-down, is gone."""
        looked = facts(incident, situation.world_size, situation.project)
        decision = self._decide(looked, situation, settings, ledger)
        return self._act(incident, decision, situation)

    def _decide(
        self, looked: IncidentFacts, situation: JobSituation, settings: SettingsInForce, ledger: Ledger
    ) -> Decision:
        self.history = [past for past in self.history if unix_ns(situation.now_s - HISTORY_S) < past.at_unix_ns]
        precision = settings.precision.get(looked.kind, UNREVIEWED)
        now = unix_ns(situation.now_s)
        return decide(looked, settings.policy, self.history, situation.can, ledger, now, precision)

    def _act(self, incident: Incident, decision: Decision, situation: JobSituation) -> list[CommandRequest]:
        # A command that is withheld is stored once as refused, and requested again when nothing withholds it any more.
        name = f"withheld {decision.action}" if decision.withheld else decision.action
        wanted = decision.mode is Mode.ACT or decision.withheld
        if not wanted or incident.action_key(name) in incident.actions:
            return []
        if not incident.goes_on:
            # A command must not reach an attempt in which the trouble does not exist.
            return []
        looping = any(part.kind is Kind.RESTART_LOOP and part.is_open for part in incident.parts)
        if looping and decision.action == Action.RELAUNCH:
            # Another launch has not helped so far.
            return []
        params, approval = dict(decision.params), decision.approval_required
        command = self._command(incident, name, params, situation, incident.summary, approval)
        if decision.withheld:
            return [replace(command, action=decision.action, refused_because=decision.reason)]
        self.history.append(PastAction(decision.action, unix_ns(situation.now_s)))
        reported = {name: incident.suggestion.get(name) for name in ("action", "checkpoint", "cost_gpu_hours", "mode")}
        reported |= {"reason": decision.reason, "unix_ns": command.requested_unix_ns, "approval": approval}
        incident.suggestion["policy"] |= {"ordered": reported | {"action": decision.action}}
        return [command]

    def _command(
        self,
        incident: Incident,
        action: str,
        params: dict[str, Any],
        situation: JobSituation,
        reason: str,
        approval_required: bool,
    ) -> CommandRequest:
        incident.actions.append(incident.action_key(action))
        return CommandRequest(
            id=incident.command_id(action),
            job=incident.job,
            attempt=situation.attempt,
            action=action,
            params=params,
            reason=reason,
            requested_by="policy" if action != STACKS else "stream",
            requested_unix_ns=unix_ns(situation.now_s),
            incident_id=incident.id,
            world_size=situation.world_size,
            approval_required=approval_required,
        )
