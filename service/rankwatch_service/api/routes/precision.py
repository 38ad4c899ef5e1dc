"""Feedback: whether people find an incident useful, noise, or a duplicate. Each person has one answer.

It changes nothing about the incident, so the api stores it without stream, and sends stream the resulting precision.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, ConfigDict
from sqlalchemy import ColumnElement, Connection, RowMapping, delete, select

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.background.housekeeping import report_precision
from rankwatch_service.api.dependencies import Context, Ctx, IdempotencyDep, Require
from rankwatch_service.api.http.paging import Page, Wanted, fetch_page
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.incidents import IncidentDetail, find_incident, incident_detail
from rankwatch_service.orders import commands
from rankwatch_service.policy import precision
from rankwatch_service.policy.policy import demotion
from rankwatch_service.policy.precision import Feedback
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read, upsert, write
from rankwatch_service.store.models import Incident, IncidentFeedback
from rankwatch_service.store.settings_rows import feedback_counts, policy_action_counts, read_policy

router = APIRouter(tags=["incidents"])

Operator = Annotated[Identity, Depends(Require(Scope.OPERATE))]


class NewFeedback(BaseModel):
    """A person's feedback on an incident."""

    model_config = ConfigDict(extra="forbid")
    answer: Feedback


@router.put("/incidents/{incident_id}/feedback", response_model=IncidentDetail)
def give_feedback(
    incident_id: str, body: NewFeedback, context: Ctx, idempotency: IdempotencyDep, identity: Operator
) -> Response:
    """Rate an incident as useful, noise or a duplicate. It replaces the same person's earlier rating."""

    def work(connection: Connection) -> IncidentDetail:
        row = find_incident(connection, incident_id, identity)
        if _answer(connection, row, identity) != body.answer:
            given = {"incident_id": row["id"], "person": identity.person, "name": identity.name}
            given |= {"answer": str(body.answer), "at_unix_ns": context.clock.unix_ns()}
            connection.execute(upsert(connection, IncidentFeedback, given), given)
            _record(context, connection, identity, row, str(body.answer))
        return incident_detail(connection, row)

    return idempotency.write(identity, body, 200, work)


@router.delete("/incidents/{incident_id}/feedback", status_code=204)
def withdraw_feedback(incident_id: str, context: Ctx, identity: Operator) -> None:
    """Withdraw your feedback on an incident."""
    with write(context.engine) as connection:
        row = find_incident(connection, incident_id, identity)
        if connection.execute(delete(IncidentFeedback).where(*_mine(row, identity))).rowcount:
            _record(context, connection, identity, row, "")


def _mine(row: RowMapping, identity: Identity) -> tuple[ColumnElement[bool], ...]:
    return IncidentFeedback.incident_id == row["id"], IncidentFeedback.person == identity.person


def _answer(connection: Connection, row: RowMapping, identity: Identity) -> str | None:
    return connection.scalar(select(IncidentFeedback.answer).where(*_mine(row, identity)))


def _record(context: Context, connection: Connection, identity: Identity, row: RowMapping, answer: str) -> None:
    """Send it to stream, and write the audit trail and the live feed."""
    now = context.clock.unix_ns()
    report_precision(connection, context.controls, now)
    fields = {"answer": answer}
    audit_trail.append(connection, now, identity.actor, "incident.feedback", row["id"], "ok", fields=fields)
    brief = {name: row[name] for name in ("id", "kind", "state", "severity")} | {"what": "feedback"}
    commands.publish(connection, "incident", row["job"], brief, now)


ReaderOfAll = Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]
Reader = Annotated[Identity, Depends(Require(Scope.READ))]


class Precision(ApiReply):
    """Totals of people's feedback. Each incident counts once, by majority."""

    kind: str
    useful: int
    noise: int
    duplicate: int
    unanswered: int
    ratio: float | None
    """Useful ones of those that are useful or noise; null: there are none."""
    low: float
    """The true ratio lies between `low` and `high` with 95 % confidence."""
    high: float


class KindPrecision(Precision):
    """Precision of a kind of incident in all jobs."""

    known: bool
    """Whether there are enough answers to rely on the ratio."""
    demotion: str
    """What is proposed if the ratio is known and below one half; else empty."""
    withheld: bool
    """Whether the policy takes no action on it, because the ratio is not known to reach `precision_min`."""


class JobPrecision(Precision):
    """Precision of a kind of incident in one job."""

    job: str


class PolicyActions(ApiReply):
    """Actions that the policy carried out, by people's feedback on the incident that each was about."""

    useful: int
    noise: int
    duplicate: int
    unanswered: int
    false_ratio: float | None
    """The share on noise; null: there were none."""


class PrecisionReport(ApiReply):
    """Precision of every kind that has incidents, by name, and the rate of false actions."""

    days: int
    """Incidents detected, and actions requested, in so many days count."""
    kinds: list[KindPrecision]
    actions: PolicyActions


@router.get("/precision")
def show_precision(context: Ctx, _identity: ReaderOfAll) -> PrecisionReport:
    """Precision of each kind of incident in the last 30 days, which kinds are proposed for demotion, and how many
    actions of the policy were false.
    """
    now = context.clock.unix_ns()
    query = feedback_counts(now, Incident.kind).order_by(Incident.kind)
    with read(context.engine) as connection:
        rows, policy = connection.execute(query).mappings().all(), read_policy(connection)
        done = dict(connection.execute(policy_action_counts(now)).mappings().one())
    kinds = []
    for row in rows:
        of_kind = precision.Precision(row["useful"], row["noise"])
        proposed = demotion(row["kind"], of_kind, policy)
        withheld = not of_kind.reaches(policy.limits.precision_min)
        shown = KindPrecision(**_counted(row), known=of_kind.is_known, demotion=proposed, withheld=withheld)
        kinds.append(shown)
    total = sum(done.values())
    actions = PolicyActions(**done, false_ratio=done["noise"] / total if total else None)
    return PrecisionReport(days=precision.WINDOW_DAYS, kinds=kinds, actions=actions)


@router.get("/precision/jobs")
def list_precision_of_jobs(context: Ctx, window: Wanted, identity: Reader) -> Page[JobPrecision]:
    """Precision of each kind of incident in each job in the last 30 days; those with the most answers first."""
    now = context.clock.unix_ns()
    counts = feedback_counts(now, Incident.kind, Incident.job).where(identity.jobs.clause(Incident.job)).subquery()
    judged = (counts.c.useful + counts.c.noise).label("judged")
    order = (judged, counts.c.kind, counts.c.job)

    def shown(row: RowMapping) -> JobPrecision:
        return JobPrecision(**_counted(row), job=row["job"])

    with read(context.engine) as connection:
        return fetch_page(connection, select(counts, judged), order, window, context.cursors, "precision", shown)


def _counted(row: RowMapping) -> dict[str, Any]:
    found = precision.Precision(row["useful"], row["noise"])
    low, high = found.interval
    names = ("kind", "useful", "noise", "duplicate", "unanswered")
    return {name: row[name] for name in names} | {"ratio": found.ratio, "low": low, "high": high}
