"""Silences: mute matching notifications until a time. Incidents still open."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, computed_field
from sqlalchemy import Connection, RowMapping, insert, select, update

from rankwatch_detectors.base import Kind
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies import Context, Ctx, IdempotencyDep, PreconditionDep, Require
from rankwatch_service.api.http.paging import Page, Wanted, fetch_page, full_id, new_id
from rankwatch_service.api.http.problem import ProblemError, not_found
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.labels import check_label_name, parse_matchers
from rankwatch_service.names import short
from rankwatch_service.orders import commands
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Silence as SilenceRow

router = APIRouter(prefix="/silences", tags=["notifications"])

LONGEST_NS: Final = 30 * 86_400 * 10**9
"""Longest silence. One that its author has forgotten would hide the next fault."""

ACTIVE_MAX: Final = 500
"""Stream matches every notification against all of them within its transaction."""

Reader = Annotated[Identity, Depends(Require(Scope.READ))]
Operator = Annotated[Identity, Depends(Require(Scope.OPERATE))]


MATCHERS_MAX: Final = 20
"""Matchers of one silence or receiver: each label twice."""


def _checked_matchers(texts: list[str]) -> list[str]:
    """The matchers one by one, in the form in which they are shown.

    Raises:
        ValueError: one is malformed, or names a label that incidents do not have.
    """
    found = [matcher for text in texts for matcher in parse_matchers(text)]
    if len(found) > MATCHERS_MAX:
        raise ValueError(f"there are at most {MATCHERS_MAX} matchers")
    for matcher in found:
        check_label_name(matcher.name)
    return [str(matcher) for matcher in found]


Matchers = Annotated[
    list[Annotated[str, Field(max_length=2_000)]], Field(max_length=MATCHERS_MAX), AfterValidator(_checked_matchers)
]


class NewSilence(BaseModel):
    """Which notifications to mute. An empty job, kind or scope matches all; everything that is given must match."""

    model_config = ConfigDict(extra="forbid")
    job: Annotated[str, Field(max_length=200)] = ""
    kind: Kind | Annotated[str, Field(max_length=0)] = ""
    scope: Annotated[str, Field(max_length=300)] = ""
    matchers: Matchers = []
    """On labels, as Alertmanager writes them: `host="node-a"`, `severity!="critical"`, `owner=~"ann|bob"`."""
    starts_unix_ns: Annotated[int | None, Field(strict=True, ge=0, lt=2**63)] = None
    """null: now."""
    ends_unix_ns: Annotated[int, Field(strict=True, ge=0, lt=2**63)]
    comment: Annotated[str, Field(max_length=1_000, pattern=r"\S")]
    """Why, for whoever wonders that nobody was notified."""


class Silence(ApiReply):
    """A silence."""

    id: str
    job: str
    kind: str
    scope: str
    matchers: list[str]
    starts_unix_ns: int
    ends_unix_ns: int
    created_by: str
    comment: str

    @computed_field  # type: ignore[prop-decorator]
    @property
    def short_id(self) -> str:
        """The id as people type it. Any longer prefix of the id is accepted wherever the id is."""
        return short(self.id)


@router.get("")
def list_silences(
    context: Ctx, window: Wanted, identity: Reader, active: Annotated[bool | None, Query()] = None
) -> Page[Silence]:
    """Silences, latest end first; `active=true` leaves out those that have ended."""
    query = select(SilenceRow.__table__).where((SilenceRow.job == "") | identity.jobs.clause(SilenceRow.job))
    if active is not None:
        current = SilenceRow.ends_unix_ns > context.clock.unix_ns()
        query = query.where(current if active else ~current)
    order = (SilenceRow.ends_unix_ns, SilenceRow.id)
    with read(context.engine) as connection:
        return fetch_page(
            connection, query, order, window, context.cursors, f"silences {active}", Silence.model_validate
        )


@router.get("/{silence_id}")
def show_silence(silence_id: str, context: Ctx, precondition: PreconditionDep, identity: Reader) -> Silence:
    """One silence."""
    with read(context.engine) as connection:
        return precondition.show(Silence.model_validate(_find(connection, silence_id, identity)))


@router.post("", status_code=201, response_model=Silence)
def add_silence(body: NewSilence, context: Ctx, idempotency: IdempotencyDep, identity: Operator) -> Response:
    """Add a silence that starts now or at a given time."""
    if not identity.may_see(body.job):
        raise ProblemError(403, f"this token is restricted to {identity.jobs}")
    now = context.clock.unix_ns()
    starts = now if body.starts_unix_ns is None else body.starts_unix_ns
    if not max(now, starts) < body.ends_unix_ns <= now + LONGEST_NS:
        raise ProblemError(422, "ends_unix_ns must be after the start and within the next 30 days")

    def work(connection: Connection) -> Silence:
        current = select(SilenceRow.id).where(SilenceRow.ends_unix_ns > now).limit(ACTIVE_MAX)
        if len(connection.execute(current).all()) >= ACTIVE_MAX:
            raise ProblemError(409, f"the limit of {ACTIVE_MAX} silences is reached")
        settled = {"id": new_id(SilenceRow), "starts_unix_ns": starts, "created_by": identity.actor}
        silence = Silence(**body.model_dump(mode="json") | settled)
        store_silence(context, connection, silence)
        return silence

    return idempotency.write(identity, body, 201, work)


@router.delete("/{silence_id}", status_code=204)
def end_silence(silence_id: str, context: Ctx, precondition: PreconditionDep, identity: Operator) -> None:
    """End a silence now; with `If-Match`, only if it is still the one that was read."""
    now = context.clock.unix_ns()
    with write(context.engine) as connection:
        silence = Silence.model_validate(_find(connection, silence_id, identity))
        precondition.check(silence)
        if silence.ends_unix_ns <= now:
            return
        ended = silence.model_copy(update={"ends_unix_ns": now})
        connection.execute(update(SilenceRow).where(SilenceRow.id == silence.id).values(ends_unix_ns=now))
        _record(context, connection, identity.actor, "silence.end", ended)


def store_silence(context: Context, connection: Connection, silence: Silence) -> None:
    """Add a silence in this transaction."""
    connection.execute(insert(SilenceRow).values(**silence.model_dump(exclude={"short_id"})))
    _record(context, connection, silence.created_by, "silence.add", silence)


def _find(connection: Connection, silence_id: str, identity: Identity) -> RowMapping:
    full = full_id(connection, SilenceRow, silence_id, identity)
    query = select(SilenceRow.__table__).where(SilenceRow.id == full)
    row = connection.execute(query).mappings().one_or_none()
    if row is None or not identity.may_see(row["job"]):
        raise not_found("silence", silence_id)
    return row


def _record(context: Context, connection: Connection, actor: str, what: str, silence: Silence) -> None:
    """Record a changed silence in the audit trail and the live feed."""
    now = context.clock.unix_ns()
    fields = silence.model_dump()
    audit_trail.append(connection, now, actor, what, silence.id, "ok", fields=fields)
    commands.publish(connection, "silence", silence.job, fields, now)
