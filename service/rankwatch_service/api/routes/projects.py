"""Projects: which there are, and which jobs are theirs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from sqlalchemy import Connection, RowMapping, case, distinct, func, select

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.job_projects import project_of, set_project
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.dependencies.idempotency import IdempotencyDep
from rankwatch_service.api.dependencies.precondition import PreconditionDep, entity_tag
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.paging import Page, Wanted, fetch_page
from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.jobs import Job, JobChange, editable, find_job, shown
from rankwatch_service.orders import commands
from rankwatch_service.policy.control_records import JobProject
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Incident
from rankwatch_service.store.models import Job as JobRow
from rankwatch_service.store.models import JobProject as ProjectRow

router = APIRouter(tags=["jobs"])
Reader = Annotated[Identity, Depends(Require(Scope.READ))]
Operator = Annotated[Identity, Depends(Require(Scope.OPERATE))]


class Project(ApiReply):
    """A project, with the jobs that are listed and their unresolved incidents."""

    name: str
    jobs: int
    incidents: int


@router.get("/projects")
def list_projects(context: Ctx, window: Wanted, identity: Reader) -> Page[Project]:
    """Projects that jobs name, by name in descending order."""
    unresolved = case((Incident.state != "resolved", Incident.id))
    counts: Any = (
        select(
            ProjectRow.project,
            func.count(distinct(JobRow.name)).label("jobs"),
            func.count(distinct(unresolved)).label("incidents"),
        )
        .join(JobRow, JobRow.name == ProjectRow.job)
        .outerjoin(Incident, Incident.job == JobRow.name)
        .where(ProjectRow.project != "", identity.jobs.clause(JobRow.name))
        .group_by(ProjectRow.project)
    )

    def shown_project(row: RowMapping) -> Project:
        return Project(name=row["project"], jobs=row["jobs"], incidents=row["incidents"])

    with read(context.engine) as connection:
        order = (ProjectRow.project,)
        return fetch_page(connection, counts, order, window, context.cursors, "projects", shown_project)


@router.patch("/jobs/{job}", response_model=Job)
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
        wanted = JobProject(job, project, before.owner if body.owner is None else body.owner)
        if wanted != before:
            now = context.clock.unix_ns()
            set_project(connection, wanted, context.controls, now, identity.actor, idempotency.source)
            commands.tell(connection, "job", job, {"project": wanted.project, "owner": wanted.owner}, now)
        return shown(find_job(connection, job))

    answer = idempotency.write(identity, body, 200, work)
    answer.headers["ETag"] = entity_tag(editable(Job.model_validate_json(bytes(answer.body))))
    return answer
