"""How many incidents there are, what they cost, and how many jobs make no progress."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query
from sqlalchemy import func, select

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Context, Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.numbers import Number
from rankwatch_service.api.http.paging import Projects, any_of
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.incidents import IncidentFilters
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Incident as IncidentRow
from rankwatch_service.store.models import Job as JobRow
from rankwatch_service.store.models import JobProject

router = APIRouter(prefix="/incidents", tags=["incidents"])

STATES: Final = ("open", "acknowledged", "resolved")


class IncidentsBySeverity(ApiReply):
    """Number of incidents of each severity."""

    critical: int = 0
    warning: int = 0
    info: int = 0


class JobsByState(ApiReply):
    """Number of jobs in each state."""

    running: int = 0
    stalled: int = 0
    paused: int = 0
    lost: int = 0
    ended: int = 0


class IncidentTotals(ApiReply):
    """Number of incidents in each state, GPU-hours lost per hour to the unresolved ones, and number of jobs."""

    open: IncidentsBySeverity
    acknowledged: IncidentsBySeverity
    resolved: IncidentsBySeverity
    impact_gpu_hours_per_hour: Number
    accelerated: bool
    """Whether an hour of a rank is one of a GPU or another device in each job that this costs something."""
    jobs: JobsByState
    updated_unix_ns: int | None
    """The newest change of one of these incidents; null if there is none."""
    telemetry_unix_ns: int | None
    """When the newest telemetry of one of these jobs arrived; null if there are none."""


@router.get("/totals")
def count_incidents(
    context: Ctx,
    identity: Annotated[Identity, Depends(Require(Scope.READ))],
    job: Annotated[list[str] | None, Query()] = None,
    project: Projects = None,
) -> IncidentTotals:
    """Number of incidents and jobs, and the current cost of the unresolved incidents."""
    asked = (identity.jobs, tuple(job or ()), tuple(project or ()))
    return context.totals.read(asked, lambda: _totals(context, identity, job, project))


def _totals(context: Context, identity: Identity, job: list[str] | None, project: list[str] | None) -> IncidentTotals:
    filters = IncidentFilters(context, job=job, project=project)
    counts = select(IncidentRow.state, IncidentRow.severity, func.count(), func.max(IncidentRow.updated_unix_ns))
    counts = counts.group_by(IncidentRow.state, IncidentRow.severity)
    cost = (
        select(func.sum(IncidentRow.impact_gpu_hours_per_hour), JobRow.world_size, JobRow.accelerated)
        .join(JobRow, JobRow.name == IncidentRow.job)
        .where(IncidentRow.state != "resolved")
        .group_by(IncidentRow.job, JobRow.world_size, JobRow.accelerated)
    )
    jobs = select(JobRow.state, func.count(), func.max(JobRow.last_seen_unix_ns)).group_by(JobRow.state)
    jobs = any_of(jobs.where(identity.jobs.clause(JobRow.name)), JobRow.name, job)
    if project:
        jobs = jobs.where(JobRow.name.in_(select(JobProject.job).where(JobProject.project.in_(project))))
    with read(context.engine) as connection:
        rows = connection.execute(filters.apply(counts, identity)).all()
        costs = connection.execute(filters.apply(cost, identity)).all()
        states = connection.execute(jobs).all()
    found: dict[str, dict[str, int]] = {}
    for state, severity, count, _ in rows:
        found.setdefault(state, {})[severity] = count
    return IncidentTotals(
        **{state: IncidentsBySeverity(**found.get(state, {})) for state in STATES},
        # The incidents of a job together cannot cost more than all its GPUs.
        impact_gpu_hours_per_hour=sum(min(lost, world_size) for lost, world_size, _ in costs),
        accelerated=all(accelerated for lost, _, accelerated in costs if lost),
        jobs=JobsByState(**{state: count for state, count, _ in states}),
        updated_unix_ns=max((updated for *_, updated in rows), default=None),
        telemetry_unix_ns=max((seen for *_, seen in states), default=None),
    )
