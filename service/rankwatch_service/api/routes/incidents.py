"""Incidents: lists by filters, details, and what people do with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, ConfigDict, Field, computed_field
from sqlalchemy import ColumnElement, Connection, Label, RowMapping, Select, Text, case, cast, func, or_, select
from sqlalchemy.orm import InstrumentedAttribute
from starlette.concurrency import run_in_threadpool

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies import Ctx, IdempotencyDep, Require
from rankwatch_service.api.http.paging import (
    Contents,
    Key,
    Number,
    Page,
    Projects,
    Time,
    Wanted,
    any_of,
    fetch_page,
    full_id,
    id_is_any_of,
)
from rankwatch_service.api.http.problem import not_found
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.incidents.answers import cause_words, changed, confidence_words, impact, normal
from rankwatch_service.incidents.correlator import WHY
from rankwatch_service.log.base import Entry
from rankwatch_service.names import NAME_CHARS_MAX, short
from rankwatch_service.policy import precision
from rankwatch_service.policy.control_records import IncidentReview, encode_control
from rankwatch_service.policy.what_now import what_now
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Attempt as AttemptRow
from rankwatch_service.store.models import Delivery as DeliveryRow
from rankwatch_service.store.models import Incident as IncidentRow
from rankwatch_service.store.models import IncidentFeedback, IncidentTransition, JobOwnership, Outbox
from rankwatch_service.store.models import Job as JobRow
from rankwatch_service.store.rows import version_of

SEARCH_CHARS_MAX: Final = 200
RANK_MAX: Final = 2**31 - 1
NO_NUL: Final = r"^[^\x00]+$"
"""PostgreSQL stores no text with a NUL character."""

State = Literal["open", "acknowledged", "resolved", "unresolved"]
Order = Literal["newest", "oldest", "updated", "urgency", "cost"]
Host = Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX, pattern=NO_NUL)]
Rank = Annotated[int, Field(ge=0, le=RANK_MAX)]
Selected = TypeVar("Selected", bound=Select[*tuple[Any, ...]])

URGENCY: Final = case(
    (IncidentRow.state == "resolved", 0),
    else_=case({"open": 3}, value=IncidentRow.state, else_=0)
    + case({"critical": 3, "warning": 2}, value=IncidentRow.severity, else_=1),
).label("urgency")
NEWEST: Final[tuple[Key, ...]] = (IncidentRow.onset_unix_ns, IncidentRow.id)
ORDERS: Final[dict[Order, tuple[Key, ...]]] = {
    "newest": NEWEST,
    "oldest": ((-IncidentRow.onset_unix_ns).label("oldest"), IncidentRow.id),
    "updated": (IncidentRow.updated_unix_ns, IncidentRow.id),
    "urgency": (URGENCY, *NEWEST),
    "cost": (IncidentRow.impact_gpu_hours_per_hour, *NEWEST),
}
"""Keys of each order, all descending."""
ORDERS_MEAN: Final = (
    "newest, oldest: by onset; updated: newest change first; cost: most GPU-hours per hour first; "
    "urgency: open before acknowledged before resolved, and within each of these the most severe first"
)


class IncidentFilters:
    """The filters of a request. All must match; one that is given several times matches each of its values."""

    def __init__(
        self,
        context: Ctx,
        incident_id: Annotated[list[str] | None, Query(alias="id", description="Ids, full or short")] = None,
        job: Annotated[list[str] | None, Query()] = None,
        state: Annotated[list[State] | None, Query(description="unresolved: open and acknowledged")] = None,
        kind: Annotated[list[Kind] | None, Query()] = None,
        severity: Annotated[list[Severity] | None, Query()] = None,
        project: Projects = None,
        rank: Annotated[list[Rank] | None, Query(description="Those that name one of these ranks")] = None,
        host: Annotated[list[Host] | None, Query(description="Those that name one of these hosts")] = None,
        device: Annotated[list[Host] | None, Query(description="Those that name one of these devices, by UUID")] = None,
        attempt: Annotated[list[str] | None, Query(description="Those that began in one of these attempts")] = None,
        from_unix_ns: Time = None,
        to_unix_ns: Time = None,
        search: Annotated[
            str | None,
            Query(
                min_length=1,
                max_length=SEARCH_CHARS_MAX,
                pattern=NO_NUL,
                description="Text in the summary, id, kind, job, hosts or acknowledged_by; case does not matter",
            ),
        ] = None,
    ) -> None:
        """`from_unix_ns` and `to_unix_ns` are ends of a range that incidents overlap: those that were not yet resolved
        at its beginning and that began before its end.
        """
        self._sqlite = context.engine.dialect.name == "sqlite"
        self._ids = incident_id
        self._jobs = job
        self._states = _stored(state)
        self._kinds = kind
        self._severities = severity
        self._projects = project
        self._ranks = rank
        self._hosts = host
        self._devices = device
        self._attempts = attempt
        self._from, self._to = from_unix_ns, to_unix_ns
        self._search = search

    @property
    def purpose(self) -> str:
        """Names the filters, for cursors."""
        return str([value for name, value in sorted(vars(self).items())])

    def apply(self, query: Selected, identity: Identity) -> Selected:
        """Restrict a query of incidents to those that match and that the identity may see."""
        query = query.where(identity.jobs.clause(IncidentRow.job))
        if self._ids:
            query = query.where(id_is_any_of(IncidentRow, self._ids))
        query = any_of(query, IncidentRow.job, self._jobs)
        query = any_of(query, IncidentRow.state, self._states)
        query = any_of(query, IncidentRow.kind, self._kinds)
        query = any_of(query, IncidentRow.severity, self._severities)
        query = any_of(query, IncidentRow.attempt, self._attempts)
        if self._projects:
            query = query.where(
                IncidentRow.job.in_(select(JobOwnership.job).where(JobOwnership.project.in_(self._projects)))
            )
        if self._ranks:
            query = query.where(self._names(IncidentRow.ranks, [str(rank) for rank in self._ranks]))
        if self._hosts:
            query = query.where(self._names(IncidentRow.hosts, self._hosts))
        if self._devices:
            query = query.where(self._names(IncidentRow.devices, self._devices))
        if self._from is not None:
            query = query.where(IncidentRow.resolved_unix_ns.is_(None) | (IncidentRow.resolved_unix_ns >= self._from))
        if self._to is not None:
            query = query.where(IncidentRow.onset_unix_ns < self._to)
        if self._search:
            query = query.where(_contains(self._search))
        return query

    def _names(self, column: InstrumentedAttribute[list[Any]], wanted: Sequence[str]) -> ColumnElement[bool]:
        """Whether a JSON list has one of these texts or numbers."""
        elements = func.json_each(column) if self._sqlite else func.json_array_elements_text(column)
        listed = elements.table_valued("value", name="listed")
        return select(1).select_from(listed).where(cast(listed.c.value, Text).in_(wanted)).exists()


Filters = Annotated[IncidentFilters, Depends()]


def _contains(text: str) -> ColumnElement[bool]:
    columns = (IncidentRow.summary, IncidentRow.id, IncidentRow.kind, IncidentRow.job, IncidentRow.acknowledged_by)
    found = (column.icontains(text, autoescape=True) for column in columns)
    return or_(*found, cast(IncidentRow.hosts, Text).icontains(text, autoescape=True))


def _stored(wanted: list[State] | None) -> list[str] | None:
    """The states as stored, without `unresolved`."""
    if wanted is None or "unresolved" not in wanted:
        return None if wanted is None else [*wanted]
    return sorted({"open", "acknowledged", *wanted} - {"unresolved"})


router = APIRouter(prefix="/incidents", tags=["incidents"])

TEXT_CHARS_MAX: Final = 4_000
STREAM_WAIT_S: Final = 2.0
"""How long a reply waits for stream to act on a judgement, which usually takes 100 ms."""

Reader = Annotated[Identity, Depends(Require(Scope.READ))]
Operator = Annotated[Identity, Depends(Require(Scope.OPERATE))]


class Incident(ApiReply):
    """An incident. Fields are the columns of `store.models.Incident`."""

    id: str
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
    evidence: Contents
    consequences: list[Contents]
    changes_before: list[Contents]
    impact_gpu_hours_per_hour: Number
    suggestion: Contents
    checkpoint: str | None
    transitions: int
    acknowledged_by: str | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def short_id(self) -> str:
        """The id as people type it. Any longer prefix of the id is accepted wherever the id is."""
        return short(self.id)


class Transition(ApiReply):
    """One transition in the history of an incident."""

    number: int
    what: str
    actor: str
    text: str
    fields: Contents
    at_unix_ns: int


class Notification(ApiReply):
    """One notification about an incident or a command that responds to it, and whether it was delivered."""

    id: str
    receiver: str
    transition: int
    command_id: str
    """The command that it is about; empty: the incident's transition."""
    state: str
    tries: int
    created_unix_ns: int
    delivered_unix_ns: int | None
    error: str
    """Error of the newest try; empty if it succeeded."""


class PersonFeedback(ApiReply):
    """One person's feedback on an incident."""

    person: str
    """The same text for all tokens and sessions of one person."""
    name: str
    answer: precision.Feedback
    at_unix_ns: int


class ListedIncident(Incident):
    """An incident of a list, with what to do first."""

    first_step: str


class IncidentDetail(Incident):
    """An incident with the answers about it in words, its history, the first steps, and what its job supports now."""

    confidence_words: str
    """How sure it is that the incident is real: certain, likely or possible."""
    cause_words: str
    """Its likely cause as a clause, or that it is not known."""
    changed: str
    """The newest changes before its onset, as a clause."""
    normal: str
    """What is normal where there is no incident of this kind, as a clause."""
    impact: str
    """What it does to its job while it lasts, as a clause."""
    accelerated: bool
    """Whether an hour of a rank of its job is one of a GPU or another device; true while nothing is known of them."""
    first_steps: list[str]
    can: list[str]
    history: list[Transition]
    notifications: list[Notification]
    feedback: list[PersonFeedback]
    """The newest first."""


class Remark(BaseModel):
    """A judgement with an optional text."""

    model_config = ConfigDict(extra="forbid")
    text: Annotated[str, Field(max_length=TEXT_CHARS_MAX)] = ""


class Comment(Remark):
    """A comment, whose text is not empty."""

    text: Annotated[str, Field(min_length=1, max_length=TEXT_CHARS_MAX)]


@router.get("")
def list_incidents(
    context: Ctx,
    window: Wanted,
    identity: Reader,
    filters: Filters,
    order: Annotated[Order, Query(description=ORDERS_MEAN)] = "newest",
) -> Page[ListedIncident]:
    """Incidents, newest onset first. A filter that is given several times matches each of its values."""
    by = ORDERS[order]
    labels = [key for key in by if not isinstance(key, InstrumentedAttribute)]
    of_job = [
        select(column).where(JobRow.name == IncidentRow.job).scalar_subquery().label(f"job_{column.key}")
        for column in (JobRow.world_size, JobRow.accelerated)
    ]
    query = filters.apply(select(IncidentRow.__table__, *of_job, *labels), identity)
    purpose = f"incidents {filters.purpose} {order}"
    with read(context.engine) as connection:
        return fetch_page(connection, query, by, window, context.cursors, purpose, _listed, counted=True)


def _listed(row: RowMapping) -> ListedIncident:
    now = what_now(version_of(row), row["job_world_size"] or 0, row["job_accelerated"] is not False)
    return ListedIncident.model_validate({**row, "first_step": now.steps[0]})


@router.get("/{incident_id}")
def show_incident(incident_id: str, context: Ctx, identity: Reader) -> IncidentDetail:
    """One incident with its history and notifications."""
    with read(context.engine) as connection:
        return incident_detail(connection, find_incident(connection, incident_id, identity))


class _Recorded(ApiReply):
    transitions: int
    """Transitions of the incident before the stream received the review."""


class _Review:
    """Records a person's review of an incident, and waits until stream has acted on it."""

    def __init__(
        self, incident_id: str, context: Ctx, idempotency: IdempotencyDep, identity: Operator, response: Response
    ) -> None:
        self._incident_id = incident_id
        self._context = context
        self._idempotency = idempotency
        self._identity = identity
        self._response = response

    async def __call__(self, what: str, said: Remark) -> IncidentDetail:
        """Record the judgement; return the incident after stream has acted, or as it is, with 202."""
        recorded = await run_in_threadpool(self._record, what, said)

        def done(detail: IncidentDetail) -> bool:
            if any(one.what == what and one.number > recorded.transitions for one in detail.history):
                return True
            # A judgement that changes nothing, such as resolving a resolved incident, makes no transition.
            match what:
                case "acknowledged":
                    return detail.state == "resolved" or detail.acknowledged_by == self._identity.name
                case "unacknowledged":
                    return detail.state != "acknowledged"
                case _:
                    return what == "resolved" and detail.state == "resolved"

        detail, acted = await self._context.changes.read_until(self._detail, done, STREAM_WAIT_S)
        if not acted:
            self._response.status_code = 202
        return detail

    def _record(self, what: str, said: Remark) -> _Recorded:
        def work(connection: Connection) -> _Recorded:
            row = find_incident(connection, self._incident_id, self._identity)
            record = IncidentReview(incident=row["id"], what=what, actor=self._identity.name, text=said.text)
            self._context.controls.append_in(connection, [Entry(row["job"], encode_control(record))])
            now, actor, fields = self._context.clock.unix_ns(), self._identity.actor, {"text": said.text}
            audit_trail.append(connection, now, actor, f"incident.{what}", row["id"], "ok", fields=fields)
            return _Recorded(transitions=row["transitions"])

        return _Recorded.model_validate_json(bytes(self._idempotency.write(self._identity, said, 200, work).body))

    def _detail(self) -> IncidentDetail:
        with read(self._context.engine) as connection:
            return incident_detail(connection, find_incident(connection, self._incident_id, self._identity))


ReviewDep = Annotated[_Review, Depends()]


@router.post("/{incident_id}/acknowledge", responses={202: {"model": IncidentDetail}})
async def acknowledge(body: Remark, review: ReviewDep) -> IncidentDetail:
    """Acknowledge an incident: you work on it, also if somebody else had acknowledged it before."""
    return await review("acknowledged", body)


@router.post("/{incident_id}/unacknowledge", responses={202: {"model": IncidentDetail}})
async def unacknowledge(body: Remark, review: ReviewDep) -> IncidentDetail:
    """Withdraw an acknowledgement: nobody works on the incident."""
    return await review("unacknowledged", body)


@router.post("/{incident_id}/resolve", responses={202: {"model": IncidentDetail}})
async def resolve(body: Remark, review: ReviewDep) -> IncidentDetail:
    """Resolve an incident. If the trouble continues, its next episode opens a new incident."""
    return await review("resolved", body)


@router.post("/{incident_id}/comment", responses={202: {"model": IncidentDetail}})
async def comment(body: Comment, review: ReviewDep) -> IncidentDetail:
    """Add a comment to an incident's history."""
    return await review("commented", body)


def _without_why(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a transition without explanations, which are a resource of their own."""
    return {name: value for name, value in fields.items() if name != WHY}


def find_incident(connection: Connection, incident_id: str, identity: Identity) -> RowMapping:
    """The row of an incident.

    Raises:
        ProblemError: there is none with this id that the identity may see.
    """
    full = full_id(connection, IncidentRow, incident_id, identity)
    query = select(IncidentRow.__table__).where(IncidentRow.id == full)
    row = connection.execute(query).mappings().one_or_none()
    if row is None or not identity.may_see(row["job"]):
        raise not_found("incident", incident_id)
    return row


def incident_detail(connection: Connection, row: RowMapping) -> IncidentDetail:
    """All that is shown of an incident, given its row."""
    history = connection.execute(
        select(IncidentTransition.__table__)
        .where(IncidentTransition.incident_id == row["id"])
        .order_by(IncidentTransition.number)
    ).mappings()
    feedback = connection.execute(
        select(IncidentFeedback.__table__)
        .where(IncidentFeedback.incident_id == row["id"])
        .order_by(IncidentFeedback.at_unix_ns.desc(), IncidentFeedback.person)
    ).mappings()
    here = (AttemptRow.job == row["job"], AttemptRow.attempt == JobRow.attempt, JobRow.name == row["job"])
    now = connection.execute(
        select(JobRow.state, JobRow.accelerated, JobRow.world_size, AttemptRow.topology).where(*here)
    ).one_or_none()
    accelerated = now is None or now.accelerated
    can = now.topology.get("can", ()) if now and now.state != "ended" else ()
    return IncidentDetail(
        **row,
        confidence_words=confidence_words(row["confidence"]),
        cause_words=cause_words(row["cause"], row["evidence"]),
        changed=changed(row["changes_before"], row["onset_unix_ns"]),
        normal=normal(row["kind"], row["evidence"]),
        impact=impact(row["kind"], row["severity"], row["evidence"], row["state"]),
        accelerated=accelerated,
        first_steps=what_now(version_of(row), now.world_size if now else 0, accelerated).listed,
        can=sorted(can),
        history=[Transition.model_validate({**one, "fields": _without_why(one["fields"])}) for one in history],
        notifications=notifications_about(connection, row["id"]),
        feedback=[PersonFeedback.model_validate(one) for one in feedback],
    )


def last_error() -> Label[str]:
    """What the newest delivery of a row of `Outbox` failed with, as the column `error`; null without a delivery."""
    mine = select(DeliveryRow.error).where(DeliveryRow.outbox_id == Outbox.id)
    return mine.order_by(DeliveryRow.id.desc()).limit(1).scalar_subquery().label("error")


def notifications_about(connection: Connection, incident_id: str) -> list[Notification]:
    """The notifications about an incident and its commands, in the order of its transitions and of the receivers."""
    query = select(Outbox.__table__, last_error()).where(Outbox.incident_id == incident_id)
    found = connection.execute(query.order_by(Outbox.transition, Outbox.receiver)).mappings()
    return [Notification.model_validate({**one, "error": one["error"] or ""}) for one in found]
