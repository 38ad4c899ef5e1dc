"""A job whose state is lost (no readable snapshot, and its log is gone) goes on from what the tables say of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Engine, func, select

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.incidents.model import Incident, Part
from rankwatch_service.job.job import JobStream
from rankwatch_service.orders.running_attempt import checkpoints
from rankwatch_service.policy.checkpoint_ledger import Ledger
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Attempt as AttemptRow
from rankwatch_service.store.models import Incident as IncidentRow
from rankwatch_service.store.models import Job as JobRow
from rankwatch_service.store.models import Outbox


def adopt(engine: Engine, job: JobStream) -> None:
    """Take up open incidents, the numbers given out, and the checkpoint ledger. Detectors begin cold."""
    with read(engine) as connection:
        mine = IncidentRow.job == job.job
        rows = connection.execute(
            select(IncidentRow.__table__).where(mine, IncidentRow.state != "resolved").order_by(IncidentRow.number)
        )
        told: dict[str, list[str]] = {}
        reached = select(Outbox.incident_id, Outbox.receiver).join(IncidentRow, IncidentRow.id == Outbox.incident_id)
        for incident_id, receiver in connection.execute(reached.where(mine, Outbox.state != "silenced").distinct()):
            told.setdefault(incident_id, []).append(receiver)
        incidents = [_incident(row, sorted(told.get(row["id"], []))) for row in rows.mappings()]
        highest = select(func.max(IncidentRow.number), func.max(IncidentRow.episode)).where(mine)
        number, episode = connection.execute(highest).one()
        first_seen = connection.scalar(select(JobRow.first_seen_unix_ns).where(JobRow.name == job.job))
        attempts = select(AttemptRow.attempt, AttemptRow.number).where(AttemptRow.job == job.job)
        newest = connection.execute(attempts.order_by(AttemptRow.number.desc()).limit(1)).one_or_none()
        attempt, attempts_seen = ("", 0) if newest is None else newest
        job.begin_cold(first_seen, attempt, attempts_seen)
        job.books.ledger = Ledger(checkpoints(connection, job.job))
    # A consequence's episode stands in no table: far above the highest one known no id can come twice.
    job.correlator.adopt(incidents, attempt, number or 0, (episode or 0) + 1_000)


def _incident(row: Mapping[Any, Any], told_to: list[str]) -> Incident:
    part = Part(
        kind=Kind(row["kind"]),
        scope=row["scope"],
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
        # No detector remembers it: it is over when a later attempt makes progress, or a person says so.
        ended_with_attempt=False,
    )
    same = ("id", "number", "job", "scope", "score", "confidence", "cause", "summary", "state")
    more = ("hosts", "devices", "changes_before", "impact_gpu_hours_per_hour", "suggestion", "checkpoint")
    return Incident(
        parts=[part],
        severity=Severity(row["severity"]),
        ranks=part.ranks,
        opened_time_s=row["detected_unix_ns"] / 1e9,
        told_to=told_to,
        evidence=dict(row["evidence"]),
        updated_time_s=row["updated_unix_ns"] / 1e9,
        transitions=row["transitions"],
        acknowledged_by=row["acknowledged_by"],
        **{name: row[name] for name in (*same, *more)},
    )
