"""Feedback: whether people find an incident useful, noise, or a duplicate. Each person has one answer.

It changes nothing about the incident, so the api stores it without stream, and tells stream what precision follows.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, ConfigDict
from sqlalchemy import ColumnElement, Connection, RowMapping, delete, select

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.background.housekeeping import tell_precision
from rankwatch_service.api.dependencies.context import Context, Ctx
from rankwatch_service.api.dependencies.idempotency import IdempotencyDep
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.routes.incidents import IncidentDetail, find_incident, incident_detail
from rankwatch_service.orders import commands
from rankwatch_service.policy.precision import Feedback
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import upsert, write
from rankwatch_service.store.models import IncidentFeedback

router = APIRouter(prefix="/incidents", tags=["incidents"])

Operator = Annotated[Identity, Depends(Require(Scope.OPERATE))]


class NewFeedback(BaseModel):
    """What a person says of an incident."""

    model_config = ConfigDict(extra="forbid")
    answer: Feedback


@router.put("/{incident_id}/feedback", response_model=IncidentDetail)
def give_feedback(
    incident_id: str, body: NewFeedback, context: Ctx, idempotency: IdempotencyDep, identity: Operator
) -> Response:
    """Say whether an incident was useful, noise, or a duplicate. It replaces what the same person said before."""

    def work(connection: Connection) -> IncidentDetail:
        row = find_incident(connection, incident_id, identity)
        if _answer(connection, row, identity) != body.answer:
            given = {"incident_id": row["id"], "person": identity.person, "name": identity.name}
            given |= {"answer": str(body.answer), "at_unix_ns": context.clock.unix_ns()}
            connection.execute(upsert(connection, IncidentFeedback, given), given)
            _record(context, connection, identity, row, str(body.answer))
        return incident_detail(connection, row)

    return idempotency.write(identity, body, 200, work)


@router.delete("/{incident_id}/feedback", status_code=204)
def withdraw_feedback(incident_id: str, context: Ctx, identity: Operator) -> None:
    """Withdraw what you said of an incident."""
    with write(context.engine) as connection:
        row = find_incident(connection, incident_id, identity)
        if connection.execute(delete(IncidentFeedback).where(*_mine(row, identity))).rowcount:
            _record(context, connection, identity, row, "")


def _mine(row: RowMapping, identity: Identity) -> tuple[ColumnElement[bool], ...]:
    return IncidentFeedback.incident_id == row["id"], IncidentFeedback.person == identity.person


def _answer(connection: Connection, row: RowMapping, identity: Identity) -> str | None:
    return connection.scalar(select(IncidentFeedback.answer).where(*_mine(row, identity)))


def _record(context: Context, connection: Connection, identity: Identity, row: RowMapping, answer: str) -> None:
    """Tell stream, and write the audit trail and the live feed."""
    now = context.clock.unix_ns()
    tell_precision(connection, context.controls, now)
    fields = {"answer": answer}
    audit_trail.append(connection, now, identity.actor, "incident.feedback", row["id"], "ok", fields=fields)
    brief = {name: row[name] for name in ("id", "kind", "state", "severity")} | {"what": "feedback"}
    commands.tell(connection, "incident", row["job"], brief, now)
