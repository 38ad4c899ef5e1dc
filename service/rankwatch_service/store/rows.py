"""Maps values to rows and back; only this module knows both. Keys are columns of the table that a function names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from rankwatch_detectors.base import Kind, Severity
from rankwatch_detectors.scope import IncidentScope
from rankwatch_service.incidents.host_incidents import HostIncident
from rankwatch_service.incidents.model import Incident, IncidentVersion, Part, Transition
from rankwatch_service.job.effects import FeedEntry
from rankwatch_service.job.summary import AttemptChange, AttemptTopology, JobSummary
from rankwatch_service.numbers import plain
from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.policy.announcement import Announcement
from rankwatch_service.policy.checkpoint_ledger import CheckpointTier, LedgerEntry, Verdict
from rankwatch_service.policy.policy import Mode, Rule


def incident_row(incident: IncidentVersion) -> dict[str, Any]:
    """Columns of `incident`."""
    row = {name: getattr(incident, name) for name in IncidentVersion.__slots__}
    return row | {
        "kind": str(incident.kind),
        "scope": str(incident.scope),
        "severity": str(incident.severity),
        "ranks": list(incident.ranks),
        "hosts": list(incident.hosts),
        "devices": list(incident.devices),
        "consequences": [consequence.fields() for consequence in incident.consequences],
        "changes_before": list(incident.changes_before),
    }


def version_of(row: Mapping[Any, Any]) -> IncidentVersion:
    """The incident of a row of `incident` as it was written, without its consequences."""
    values = {name: row[name] for name in IncidentVersion.__slots__}
    values |= {"kind": Kind(row["kind"]), "severity": Severity(row["severity"])}
    values |= {"scope": IncidentScope.parse(row["scope"]), "consequences": ()}
    values |= {name: tuple(row[name]) for name in ("ranks", "hosts", "devices", "changes_before")}
    return IncidentVersion(**values)


def incident_of(row: Mapping[Any, Any]) -> Incident:
    """The incident of a row of `incident`, without its consequences, for a job that is restored from the tables."""
    part = Part(
        kind=Kind(row["kind"]),
        scope=IncidentScope.parse(row["scope"]),
        episode=row["episode"],
        attempt=row["attempt"],
        ranks=tuple(row["ranks"]),
        onset_step=row["onset_step"],
        onset_time_s=row["onset_unix_ns"] / 1e9,
        summary=row["summary"],
        severity=Severity(row["severity"]),
        confidence=row["confidence"],
        detected_step=row["detected_step"],
        detected_time_s=row["detected_unix_ns"] / 1e9,
        standing=row["evidence"].get("standing") is True,
        # No detector remembers it, so it ends when a later attempt makes progress or a person resolves it.
        ended_with_attempt=False,
    )
    same = ("id", "job", "score", "confidence", "cause", "summary", "state", "transitions")
    more = ("hosts", "devices", "changes_before", "impact_gpu_hours_per_hour", "suggestion", "checkpoint")
    return Incident(
        parts=[part],
        severity=Severity(row["severity"]),
        ranks=part.ranks,
        scope=part.scope,
        opened_time_s=row["detected_unix_ns"] / 1e9,
        evidence=dict(row["evidence"]),
        updated_time_s=row["updated_unix_ns"] / 1e9,
        acknowledged_by=row["acknowledged_by"],
        **{name: row[name] for name in (*same, *more)},
    )


def transition_row(transition: Transition) -> dict[str, Any]:
    """Columns of `incident_transition`."""
    return {
        "incident_id": transition.incident.id,
        "number": transition.number,
        "what": str(transition.what),
        "actor": transition.actor,
        "text": transition.text,
        "fields": plain(transition.fields),
        "at_unix_ns": transition.at_unix_ns,
    }


def announcement_row(announcement: Announcement) -> dict[str, Any]:
    """Columns of `announcement`, but the id."""
    row = {name: getattr(announcement, name) for name in Announcement.__slots__}
    return row | {"kinds": list(announcement.kinds), "places": list(announcement.places)}


def announcement_of(row: Mapping[Any, Any]) -> Announcement:
    """The announcement that a row of `announcement` holds."""
    values = {name: row[name] for name in Announcement.__slots__}
    return Announcement(**values | {"kinds": tuple(row["kinds"]), "places": tuple(row["places"])})


def host_record_row(entry: HostIncident) -> dict[str, Any]:
    """Columns of `host_record`."""
    return {"id": entry.id, **asdict(entry), "kind": str(entry.kind), "severity": str(entry.severity)}


def command_row(request: CommandRequest) -> dict[str, Any]:
    """Columns of `command`, as it is when it is requested."""
    return {
        "id": request.id,
        "job": request.job,
        "attempt": request.attempt,
        "action": request.action,
        "params": dict(request.params),
        "reason": request.reason,
        "requested_by": request.requested_by,
        "requester": request.requester,
        "incident_id": request.incident_id,
        "idempotency_key": request.idempotency_key,
        "world_size": request.world_size,
        "approval_required": request.approval_required,
        "approved_by": None,
        "state": "requested",
        "result": "",
        "mode": "",
        "applied_step": None,
        "requested_unix_ns": request.requested_unix_ns,
        "expires_unix_ns": request.expires_unix_ns,
        "applied_unix_ns": None,
        "finished_unix_ns": None,
    }


def job_row(summary: JobSummary) -> dict[str, Any]:
    """Columns of `job`."""
    return asdict(summary)


def attempt_columns(change: AttemptChange) -> dict[str, Any]:
    """Columns of `attempt` that a change sets."""
    names = ("number", "started_unix_ns", "ended_unix_ns", "first_step", "last_step")
    columns = {name: getattr(change, name) for name in names if getattr(change, name) is not None}
    # A number is set when the attempt starts: an end that was stored before does not hold any more.
    if change.number is not None:
        columns["ended_unix_ns"] = change.ended_unix_ns
    if change.topology is not None:
        columns |= {"world_size": change.topology.world_size, "topology": _topology(change.topology)}
    return columns


def attempt_row(job: str, attempt: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """All columns of `attempt` for a new row, of which `columns` are known."""
    unknown: dict[str, Any] = {
        "started_unix_ns": 0,
        "ended_unix_ns": None,
        "world_size": 0,
        "first_step": None,
        "last_step": None,
        "topology": {},
        "number": 0,
    }
    return {"job": job, "attempt": attempt, **unknown, **columns}


def _topology(topology: AttemptTopology) -> dict[str, Any]:
    elsewhere = (
        "world_size",
        "parameters",
        "replicated",
        "can",
        "watched",
        "checkpoint_roots",
        "checkpoint_shards",
        "slices",
    )
    ranks = [msgspec.structs.asdict(info) for info in topology.ranks]
    return {
        "ranks": [{name: value for name, value in info.items() if name not in elsewhere} for info in ranks],
        "can": sorted(topology.can),
        "replicated": topology.replicated,
        "shared_slices": [list(group) for group in topology.shared_slices],
        "watched": topology.watched,
    }


def checkpoint_row(job: str, entry: LedgerEntry) -> dict[str, Any]:
    """Columns of `checkpoint`."""
    return {
        "job": job,
        "id": entry.id,
        "attempt": entry.attempt,
        "step": entry.step,
        "tier": str(entry.tier),
        "location": entry.location,
        "shards_expected": entry.shards_expected,
        "shards": list(entry.shards),
        "seconds": entry.seconds,
        "bytes": entry.bytes,
        "verdict": str(entry.verdict),
        "verdict_reason": entry.reason,
        "saved_unix_ns": entry.saved_unix_ns,
    }


def checkpoint_of(row: Mapping[Any, Any]) -> LedgerEntry:
    """The ledger's entry that a row of `checkpoint` holds."""
    return LedgerEntry(
        attempt=row["attempt"],
        step=row["step"],
        tier=CheckpointTier(row["tier"]),
        location=row["location"],
        shards_expected=row["shards_expected"],
        shards=tuple(row["shards"]),
        seconds=row["seconds"],
        bytes=row["bytes"],
        saved_unix_ns=row["saved_unix_ns"],
        verdict=Verdict(row["verdict"]),
        reason=row["verdict_reason"],
    )


def policy_rule_row(rule: Rule, position: int) -> dict[str, Any]:
    """Columns of `policy_rule`: the rules are tried in the order of their positions."""
    return {**asdict(rule), "mode": str(rule.mode), "position": position}


def policy_rule_of(row: Mapping[Any, Any]) -> Rule:
    """The rule that a row of `policy_rule` holds."""
    columns = {name: row[name] for name in Rule.__slots__}
    return Rule(**{**columns, "mode": Mode(row["mode"])})


def feed_row(entry: FeedEntry) -> dict[str, Any]:
    """Columns of `feed`."""
    return {"topic": entry.topic, "job": entry.job, "data": dict(entry.data), "at_unix_ns": entry.at_unix_ns}
