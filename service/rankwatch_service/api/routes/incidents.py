"""Incidents: read them, and say something about them.

Their rows have one writer, stream. A judgement goes into the log; the answer waits a moment for stream to act on it,
and is 202 where that takes longer.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, ConfigDict, Field, computed_field
from sqlalchemy import Connection, RowMapping, case, func, select

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.context import Context, Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.idempotency import OnceDep
from rankwatch_service.api.http.lookup import full_id
from rankwatch_service.api.http.numbers import Number
from rankwatch_service.api.http.paging import Page, Wanted, any_of, fetch_page
from rankwatch_service.api.http.problem import not_found
from rankwatch_service.incidents.kinds import first_steps
from rankwatch_service.log.base import Entry
from rankwatch_service.policy.control_records import Judgement, encode_control
from rankwatch_service.short_ids import short
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Attempt as AttemptRow
from rankwatch_service.store.models import Delivery as DeliveryRow
from rankwatch_service.store.models import Incident as IncidentRow
from rankwatch_service.store.models import IncidentTransition, Outbox
from rankwatch_service.store.models import Job as JobRow

router = APIRouter(prefix="/incidents", tags=["incidents"])

TEXT_CHARS_MAX: Final = 4_000
STREAM_WAIT_S: Final = 2.0
"""How long an answer waits for stream, which usually takes 100 ms."""

LOOK_S: Final = 0.02

State = Literal["open", "acknowledged", "resolved", "unresolved"]
STATES: Final = ("open", "acknowledged", "resolved")
URGENCY: Final = case(
    (IncidentRow.state == "resolved", 0),
    else_=case({"open": 3}, value=IncidentRow.state, else_=0)
    + case({"critical": 3, "warning": 2}, value=IncidentRow.severity, else_=1),
).label("urgency")
"""Open before acknowledged before resolved; of those that are not resolved the most severe first."""

Reader = Annotated[Identity, Depends(Require(Scope.READ))]
Operator = Annotated[Identity, Depends(Require(Scope.OPERATE))]


class Incident(BaseModel):
    """An incident. Fields are the columns of `store.models.Incident`."""

    id: str
    number: int
    job: str
    attempt: str
    kind: str
    scope: str
    episode: int
    severity: str
    state: str
    ranks: list[int]
    hosts: list[str]
    devices: list[str]
    onset_step: int | None
    detected_step: int | None
    resolved_step: int | None
    onset_unix_ns: int
    detected_unix_ns: int
    updated_unix_ns: int
    resolved_unix_ns: int | None
    score: Number
    confidence: float
    cause: str
    summary: str
    evidence: dict[str, Any]
    consequences: list[Any]
    changes_before: list[Any]
    impact_gpu_hours_per_hour: Number
    suggestion: dict[str, Any]
    checkpoint: str | None
    transitions: int
    acknowledged_by: str | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def short_id(self) -> str:
        """The id as people say it; like any longer beginning of the id it is taken wherever the id is."""
        return short(self.id)


class BySeverity(BaseModel):
    """How many of each severity."""

    critical: int = 0
    warning: int = 0
    info: int = 0


class Totals(BaseModel):
    """How many incidents there are in each state, and GPU-hours lost an hour to those that are not resolved."""

    open: BySeverity
    acknowledged: BySeverity
    resolved: BySeverity
    impact_gpu_hours_per_hour: Number


class Transition(BaseModel):
    """One line of an incident's history."""

    number: int
    what: str
    actor: str
    text: str
    fields: dict[str, Any]
    at_unix_ns: int


class Notification(BaseModel):
    """Who was told about it, or was not."""

    id: str
    receiver: str
    transition: int
    state: str
    tries: int
    created_unix_ns: int
    delivered_unix_ns: int | None
    error: str
    """Of the newest try; empty if that went well."""


class IncidentDetail(Incident):
    """An incident with its history, what to do about it first, and what its job can be told to do now."""

    first_steps: list[str]
    can: list[str]
    history: list[Transition]
    notifications: list[Notification]


class Said(BaseModel):
    """What a person has to say."""

    model_config = ConfigDict(extra="forbid")
    text: Annotated[str, Field(max_length=TEXT_CHARS_MAX)] = ""


class Comment(Said):
    """A comment says something."""

    text: Annotated[str, Field(min_length=1, max_length=TEXT_CHARS_MAX)]


@router.get("")
def list_incidents(
    context: Ctx,
    window: Wanted,
    identity: Reader,
    job: Annotated[list[str] | None, Query()] = None,
    state: Annotated[list[State] | None, Query()] = None,
    kind: Annotated[list[Kind] | None, Query()] = None,
    severity: Annotated[list[Severity] | None, Query()] = None,
    order: Annotated[Literal["newest", "urgency"], Query()] = "newest",
) -> Page[Incident]:
    """Incidents by onset, newest first. `state=unresolved` is open and acknowledged together; a filter that is given
    several times lets each of its values through. `order=urgency`: open ones first, then those acknowledged, then those
    resolved, and within them the most severe first.
    """
    query = select(IncidentRow.__table__, URGENCY)
    if identity.job:
        query = query.where(IncidentRow.job == identity.job)
    query = any_of(query, IncidentRow.job, job)
    query = any_of(query, IncidentRow.state, _states(state))
    query = any_of(query, IncidentRow.kind, kind)
    query = any_of(query, IncidentRow.severity, severity)
    purpose = f"incidents {job} {state} {kind} {severity} {order}"
    newest = (IncidentRow.onset_unix_ns, IncidentRow.id)
    by = newest if order == "newest" else (URGENCY, *newest)
    with read(context.engine) as connection:
        return fetch_page(connection, query, by, window, context.seal, purpose, Incident.model_validate, counted=True)


@router.get("/totals")
def count_incidents(context: Ctx, identity: Reader, job: Annotated[list[str] | None, Query()] = None) -> Totals:
    """How many incidents there are, and what those that are not resolved cost now."""
    counts = select(IncidentRow.state, IncidentRow.severity, func.count()).group_by(
        IncidentRow.state, IncidentRow.severity
    )
    cost = (
        select(func.sum(IncidentRow.impact_gpu_hours_per_hour), func.max(JobRow.world_size))
        .join(JobRow, JobRow.name == IncidentRow.job)
        .where(IncidentRow.state != "resolved")
        .group_by(IncidentRow.job)
    )
    if identity.job:
        counts, cost = counts.where(IncidentRow.job == identity.job), cost.where(IncidentRow.job == identity.job)
    with read(context.engine) as connection:
        rows = connection.execute(any_of(counts, IncidentRow.job, job)).all()
        costs = connection.execute(any_of(cost, IncidentRow.job, job)).all()
    found: dict[str, dict[str, int]] = {}
    for state, severity, count in rows:
        found.setdefault(state, {})[severity] = count
    return Totals(
        **{state: BySeverity(**found.get(state, {})) for state in STATES},
        # Two incidents of one job cannot cost more than all its GPUs.
        impact_gpu_hours_per_hour=sum(min(lost, world_size) for lost, world_size in costs),
    )


@router.get("/{incident_id}")
def show_incident(incident_id: str, context: Ctx, identity: Reader) -> IncidentDetail:
    """One incident with its history and who was told."""
    with read(context.engine) as connection:
        return _detail(connection, _find(connection, incident_id, identity))


@router.post("/{incident_id}/acknowledge", responses={202: {"model": IncidentDetail}})
def acknowledge(
    incident_id: str, body: Said, context: Ctx, once: OnceDep, identity: Operator, response: Response
) -> IncidentDetail:
    """Say that somebody is on it."""
    return _judge(context, once, identity, response, incident_id, "acknowledged", body)


@router.post("/{incident_id}/resolve", responses={202: {"model": IncidentDetail}})
def resolve(
    incident_id: str, body: Said, context: Ctx, once: OnceDep, identity: Operator, response: Response
) -> IncidentDetail:
    """Say that it is over. If the trouble lasts, a new episode opens another incident."""
    return _judge(context, once, identity, response, incident_id, "resolved", body)


@router.post("/{incident_id}/comment", responses={202: {"model": IncidentDetail}})
def comment(
    incident_id: str, body: Comment, context: Ctx, once: OnceDep, identity: Operator, response: Response
) -> IncidentDetail:
    """Add a line to its history."""
    return _judge(context, once, identity, response, incident_id, "commented", body)


def _states(wanted: list[State] | None) -> list[str] | None:
    """The states that stand in rows."""
    if wanted is None or "unresolved" not in wanted:
        return None if wanted is None else [*wanted]
    return sorted({"open", "acknowledged", *wanted} - {"unresolved"})


class _Noted(BaseModel):
    transitions: int
    """The incident's, before stream has heard."""


def _judge(
    context: Context, once: OnceDep, identity: Identity, response: Response, incident_id: str, what: str, body: Said
) -> IncidentDetail:
    def work(connection: Connection) -> _Noted:
        row = _find(connection, incident_id, identity)
        record = Judgement(incident=row["id"], what=what, actor=identity.name, text=body.text)
        context.controls.append_in(connection, [Entry(row["job"], encode_control(record))])
        now = context.clock.unix_ns()
        audit_trail.append(
            connection, now, identity.actor, f"incident.{what}", row["id"], "ok", fields={"text": body.text}
        )
        return _Noted(transitions=row["transitions"])

    before = _Noted.model_validate_json(bytes(once.write(identity, body, 200, work).body))
    deadline_s = context.clock.monotonic_s() + STREAM_WAIT_S
    while True:
        with read(context.engine) as connection:
            found = _detail(connection, _find(connection, incident_id, identity))
        if any(one.what == what and one.number > before.transitions for one in found.history):
            return found
        if (what == "acknowledged" and found.state != "open") or (what == "resolved" and found.state == "resolved"):
            return found
        if context.clock.monotonic_s() >= deadline_s:
            response.status_code = 202
            return found
        context.clock.sleep(LOOK_S)


def _find(connection: Connection, incident_id: str, identity: Identity) -> RowMapping:
    full = full_id(connection, IncidentRow, incident_id, identity)
    query = select(IncidentRow.__table__).where(IncidentRow.id == full)
    row = connection.execute(query).mappings().one_or_none()
    if row is None or not identity.may_see(row["job"]):
        raise not_found("incident", incident_id)
    return row


def _detail(connection: Connection, row: RowMapping) -> IncidentDetail:
    history = connection.execute(
        select(IncidentTransition.__table__)
        .where(IncidentTransition.incident_id == row["id"])
        .order_by(IncidentTransition.number)
    ).mappings()
    newest = (
        select(DeliveryRow.error)
        .where(DeliveryRow.outbox_id == Outbox.id)
        .order_by(DeliveryRow.id.desc())
        .limit(1)
        .scalar_subquery()
    )
    told = connection.execute(
        select(Outbox.__table__, newest.label("error"))
        .where(Outbox.incident_id == row["id"])
        .order_by(Outbox.transition, Outbox.receiver)
    ).mappings()
    here = (AttemptRow.job == row["job"], AttemptRow.attempt == JobRow.attempt, JobRow.name == row["job"])
    topology = connection.scalar(select(AttemptRow.topology).where(*here, JobRow.state != "ended")) or {}
    return IncidentDetail(
        **row,
        first_steps=first_steps(row["kind"], row["severity"], row["evidence"]),
        can=sorted(topology.get("can", ())),
        history=[Transition.model_validate(one) for one in history],
        notifications=[Notification.model_validate({**one, "error": one["error"] or ""}) for one in told],
    )
