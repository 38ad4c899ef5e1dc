"""How many incidents there are, what they cost, and how many jobs make no progress."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query
from sqlalchemy import func, select

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies import Context, Ctx, Require
from rankwatch_service.api.http.paging import Number, Projects, Time, any_of
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.incidents import IncidentFilters
from rankwatch_service.api.routes.jobs import find_job
from rankwatch_service.incidents.lost_time import HOUR_NS, Loss, lost_by_kind
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Incident as IncidentRow
from rankwatch_service.store.models import Job as JobRow
from rankwatch_service.store.models import JobOwnership

router = APIRouter()

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
    log_not_understood: int = 0
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


@router.get("/incidents/totals", tags=["incidents"])
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
        jobs = jobs.where(JobRow.name.in_(select(JobOwnership.job).where(JobOwnership.project.in_(project))))
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


NO_PROGRESS: Final = ("stalled", "lost")
NOT_MEANT_TO_RUN: Final = ("paused", "ended")


class KindLoss(ApiReply):
    """What the incidents of one kind have cost."""

    kind: str
    incidents: int
    gpu_hours: Number


class LostTime(ApiReply):
    """What a job has lost in a period, by kind of incident, most first. Where it is not `accelerated`, a rank counts as
    a GPU.
    """

    items: list[KindLoss]
    gpu_hours: Number
    """Sum of the items."""
    goodput: Number | None
    """Share of the period's GPU-hours that incidents did not cost, 0 to 1; null for an empty period."""
    goodput_now: Number | None
    """Share of the usual work that is done now, 0 to 1; null for a job that is paused or has ended."""
    from_unix_ns: int
    to_unix_ns: int


@router.get("/jobs/{job}/lost-time", tags=["jobs"])
def show_lost_time(
    job: str,
    context: Ctx,
    _identity: Annotated[Identity, Depends(Require(Scope.READ))],
    from_unix_ns: Time = None,
    to_unix_ns: Time = None,
) -> LostTime:
    """What a job has lost to incidents in all its attempts, by kind, and its goodput.

    An incident costs what it cost last, from its onset on. The period begins no earlier than the job, and ends no later
    than now or the job.
    """
    now = context.clock.unix_ns()
    query = select(
        IncidentRow.kind, IncidentRow.onset_unix_ns, IncidentRow.resolved_unix_ns, IncidentRow.impact_gpu_hours_per_hour
    ).where(IncidentRow.job == job, IncidentRow.impact_gpu_hours_per_hour > 0)
    with read(context.engine) as connection:
        row = find_job(connection, job)
        costly = connection.execute(query).all()
    begin = max(row["first_seen_unix_ns"], from_unix_ns or 0)
    last = row["last_seen_unix_ns"] if row["state"] == "ended" else now
    end = max(begin, min(last, now if to_unix_ns is None else to_unix_ns))
    losses = [
        Loss(kind, max(begin, onset), min(end, end if resolved is None else resolved), rate)
        for kind, onset, resolved, rate in costly
    ]
    losses = [one for one in losses if one.to_unix_ns > one.from_unix_ns]
    world_size = row["world_size"]
    lost = lost_by_kind(losses, world_size)
    counts = Counter(one.kind for one in losses)
    in_all = sum(lost.values())
    possible = world_size * (end - begin) / HOUR_NS
    rate_now = sum(rate for _, _, resolved, rate in costly if resolved is None)
    return LostTime(
        items=[KindLoss(kind=kind, incidents=counts[kind], gpu_hours=hours) for kind, hours in lost.items()],
        gpu_hours=in_all,
        goodput=max(0.0, 1 - in_all / possible) if possible else None,
        goodput_now=_goodput_now(row["state"], rate_now, world_size),
        from_unix_ns=begin,
        to_unix_ns=end,
    )


def _goodput_now(state: str, gpu_hours_per_hour: float, world_size: int) -> float | None:
    """Share of the usual work that is done now; None: none is meant to be done."""
    if state in NOT_MEANT_TO_RUN:
        return None
    if state in NO_PROGRESS or not world_size:
        return 0.0
    return max(0.0, 1 - gpu_hours_per_hour / world_size)
