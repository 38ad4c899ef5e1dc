"""People who log in with the OIDC provider: what their groups allow them, and when they were last here."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Response
from pydantic import Field
from sqlalchemy import Connection, RowMapping, case, distinct, func, select

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.access.job_filter import project_of, set_project
from rankwatch_service.access.tokens import token_state
from rankwatch_service.api.dependencies import Ctx, IdempotencyDep, PreconditionDep, Require, entity_tag
from rankwatch_service.api.http.paging import Page, Wanted, fetch_page
from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.jobs import Job, JobChange, editable, find_job, shown
from rankwatch_service.orders import commands
from rankwatch_service.policy.control_records import JobOwnership
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Incident
from rankwatch_service.store.models import Job as JobRow
from rankwatch_service.store.models import JobOwnership as OwnershipRow
from rankwatch_service.store.models import Token as TokenRow

router = APIRouter()

SESSIONS_MAX: Final = 2_000
"""Newest sessions that are read: those of a week of 280 people who log in daily."""

Admin = Annotated[Identity, Depends(Require(Scope.ADMIN, every_job=True))]


class Permission(ApiReply):
    """What a group of a person allows, and in which jobs."""

    scopes: Annotated[list[str], Field(examples=[["operate", "read"]])]
    jobs: Annotated[list[str], Field(examples=[["nlp-*"]])]
    """Patterns of their names; empty: every job."""


class PersonAccess(ApiReply):
    """Somebody who has logged in with the OIDC provider."""

    person: Annotated[str, Field(examples=["https://login.example.com#248289761001"])]
    """The person's stable id, independent of names."""
    name: Annotated[str, Field(examples=["ada@example.com"])]
    permissions: list[Permission]
    """As of their newest login."""
    projects: Annotated[list[str], Field(examples=[["nlp"]])]
    """Projects of the jobs that they own."""
    sessions: int
    """Sessions that are open now."""
    logged_in_unix_ns: int
    """Their newest login."""
    last_used_unix_ns: int
    """When they were last here, to the minute."""


class People(ApiReply):
    """People, those who were here last first."""

    items: list[PersonAccess]
    next_cursor: None = None


@router.get("/people", tags=["access"])
def list_people(context: Ctx, _identity: Admin) -> People:
    """People with a session that is open or ended within the last 7 days, those who were here last first.

    Whoever uses a token is listed with the tokens. Of sessions, the newest 2,000 count.
    """
    of_people = (TokenRow.kind == "session") & (TokenRow.person != "")
    query = select(TokenRow.__table__).where(of_people).order_by(TokenRow.created_unix_ns.desc(), TokenRow.id)
    sessions = defaultdict[str, list[RowMapping]](list)
    with read(context.engine) as connection:
        for row in connection.execute(query.limit(SESSIONS_MAX)).mappings():
            sessions[row["person"]].append(row)
        projects = _projects(connection, {mine[0]["name"] for mine in sessions.values()})
    now = context.clock.unix_ns()
    people = [_shown(mine, projects[mine[0]["name"]], now) for mine in sessions.values()]
    return People(items=sorted(people, key=lambda one: (-one.last_used_unix_ns, one.person)))


def _projects(connection: Connection, owners: set[str]) -> defaultdict[str, list[str]]:
    """The projects of their jobs, by owner."""
    query = select(OwnershipRow.owner, OwnershipRow.project).where(
        OwnershipRow.owner.in_(owners), OwnershipRow.project != ""
    )
    found = defaultdict[str, list[str]](list)
    for owner, project in connection.execute(query.distinct().order_by(OwnershipRow.owner, OwnershipRow.project)):
        found[owner].append(project)
    return found


def _shown(sessions: list[RowMapping], projects: list[str], now_unix_ns: int) -> PersonAccess:
    newest = sessions[0]
    states = [token_state(one["revoked"], one["admitted"], one["expires_unix_ns"], now_unix_ns) for one in sessions]
    return PersonAccess(
        person=newest["person"],
        name=newest["name"],
        permissions=[Permission(**grant) for grant in newest["grants"]],
        projects=projects,
        sessions=states.count("valid"),
        logged_in_unix_ns=newest["created_unix_ns"],
        last_used_unix_ns=max(one["last_used_unix_ns"] or one["created_unix_ns"] for one in sessions),
    )


Reader = Annotated[Identity, Depends(Require(Scope.READ))]
Operator = Annotated[Identity, Depends(Require(Scope.OPERATE))]


class Project(ApiReply):
    """A project, with the jobs that are listed and their unresolved incidents."""

    name: str
    jobs: int
    incidents: int


@router.get("/projects", tags=["jobs"])
def list_projects(context: Ctx, window: Wanted, identity: Reader) -> Page[Project]:
    """Projects that jobs name, by name in descending order."""
    unresolved = case((Incident.state != "resolved", Incident.id))
    counts: Any = (
        select(
            OwnershipRow.project,
            func.count(distinct(JobRow.name)).label("jobs"),
            func.count(distinct(unresolved)).label("incidents"),
        )
        .join(JobRow, JobRow.name == OwnershipRow.job)
        .outerjoin(Incident, Incident.job == JobRow.name)
        .where(OwnershipRow.project != "", identity.jobs.clause(JobRow.name))
        .group_by(OwnershipRow.project)
    )

    def shown_project(row: RowMapping) -> Project:
        return Project(name=row["project"], jobs=row["jobs"], incidents=row["incidents"])

    with read(context.engine) as connection:
        order = (OwnershipRow.project,)
        return fetch_page(connection, counts, order, window, context.cursors, "projects", shown_project)


@router.patch("/jobs/{job}", response_model=Job, tags=["jobs"])
def edit_job(
    job: str,
    body: JobChange,
    context: Ctx,
    idempotency: IdempotencyDep,
    precondition: PreconditionDep,
    identity: Operator,
) -> Response:
    """Set the project or the owner of a job. Routes and rules of the new project hold for what happens from now on.
    With `If-Match`, only if both are still those that were read: the ETag of a job is about nothing else.
    """

    def work(connection: Connection) -> Job:
        precondition.check(editable(shown(find_job(connection, job))))
        if identity.jobs.project and body.project not in (None, identity.jobs.project):
            raise ProblemError(403, f"this token is restricted to {identity.jobs}")
        before = project_of(connection, job)
        project = before.project if body.project is None else body.project
        wanted = JobOwnership(job, project, before.owner if body.owner is None else body.owner)
        if wanted != before:
            now = context.clock.unix_ns()
            set_project(connection, wanted, context.controls, now, identity.actor, idempotency.source)
            commands.publish(connection, "job", job, {"project": wanted.project, "owner": wanted.owner}, now)
        return shown(find_job(connection, job))

    answer = idempotency.write(identity, body, 200, work)
    answer.headers["ETag"] = entity_tag(editable(Job.model_validate_json(bytes(answer.body))))
    return answer
