"""Hosts and devices with their incidents over the jobs of a project: ranks move, faulty hardware does not.

A host is a project, a name, and who has the host's key (`access.agents`): a name alone makes no two jobs agree.
"""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query
from sqlalchemy import case, func, select

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies import Ctx, Require
from rankwatch_service.api.http.paging import Page, Wanted, any_of, fetch_page
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import HostRecord, Job, JobHostDevice, JobOwnership

router = APIRouter(prefix="/hosts", tags=["hosts"])

RECORD_NS: Final = 28 * 86_400 * 10**9
"""Age up to which an incident counts for its host."""

HOSTS_MAX: Final = 500
JOBS_MAX: Final = 50
Reader = Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]


class Host(ApiReply):
    """A host's record over the last 28 days."""

    host: str
    host_id: str
    """The id of the host, as agents have proved it; empty: they have not enrolled, and the record belongs to one
    job."""
    project: str
    """Project of the jobs whose agents were there; empty: none."""
    job: str
    """The only job whose incidents these are; empty: any of the project, whose agents have shown to be there."""
    verdict: str
    """ok, watched (one incident), probation (two, or one critical), refused (three, or two critical)."""
    incidents: int
    critical: int
    newest_unix_ns: int


class HostIncident(ApiReply):
    """One incident on a host."""

    id: str
    host: str
    host_id: str
    """The id of the host; empty: its agents have not enrolled."""
    device_uuid: str
    incident_id: str
    job: str
    kind: str
    severity: str
    at_unix_ns: int


class HostJob(ApiReply):
    """A job whose agents have reported from a host."""

    job: str
    last_seen_unix_ns: int


class HostJobs(ApiReply):
    """Jobs that have run on a host, most recently seen first."""

    items: list[HostJob]
    next_cursor: None = None


class Hosts(ApiReply):
    """Hosts with incidents, worst first."""

    items: list[Host]
    next_cursor: None = None


@router.get("")
def list_hosts(
    context: Ctx, _identity: Reader, host: Annotated[list[str] | None, Query(description="Only these names")] = None
) -> Hosts:
    """Hosts with incidents in the last 28 days; all others are ok. Several may have one name."""
    since = context.clock.unix_ns() - RECORD_NS
    # An incident on two devices of one host counts once.
    count = func.count(HostRecord.incident_id.distinct())
    critical = func.count(case((HostRecord.severity == "critical", HostRecord.incident_id)).distinct())
    project = func.coalesce(JobOwnership.project, "")
    only_job = case((HostRecord.host_id == "", HostRecord.job), else_="")
    which = (HostRecord.host, HostRecord.host_id, project, only_job)
    query = (
        select(*which, count, critical, func.max(HostRecord.at_unix_ns))
        .outerjoin(JobOwnership, JobOwnership.job == HostRecord.job)
        .where(HostRecord.at_unix_ns > since)
        .group_by(*which)
        .order_by(critical.desc(), count.desc(), *which)
        .limit(HOSTS_MAX)
    )
    query = any_of(query, HostRecord.host, host)
    with read(context.engine) as connection:
        rows = connection.execute(query).all()
    return Hosts(
        items=[
            Host(
                host=host,
                host_id=host_id,
                project=ownership,
                job=job,
                verdict=verdict(n, worst),
                incidents=n,
                critical=worst,
                newest_unix_ns=newest,
            )
            for host, host_id, ownership, job, n, worst, newest in rows
        ]
    )


@router.get("/{host}")
def show_host(host: str, context: Ctx, window: Wanted, _identity: Reader) -> Page[HostIncident]:
    """Incidents on all hosts of one name, newest first."""
    query = select(HostRecord.__table__).where(HostRecord.host == host)
    order = (HostRecord.at_unix_ns, HostRecord.id)
    with read(context.engine) as connection:
        return fetch_page(
            connection, query, order, window, context.cursors, f"host {host}", HostIncident.model_validate
        )


@router.get("/{host}/jobs")
def list_host_jobs(host: str, context: Ctx, _identity: Reader) -> HostJobs:
    """Jobs whose agents have reported counters of this host, those seen last first, at most 50."""
    here = select(JobHostDevice.job).where(JobHostDevice.host == host)
    query = (
        select(Job.name, Job.last_seen_unix_ns)
        .where(Job.name.in_(here))
        .order_by(Job.last_seen_unix_ns.desc(), Job.name)
        .limit(JOBS_MAX)
    )
    with read(context.engine) as connection:
        rows = connection.execute(query).all()
    return HostJobs(items=[HostJob(job=job, last_seen_unix_ns=at) for job, at in rows])


def verdict(incidents: int, critical: int) -> str:
    """The verdict on a host with this many incidents, of which this many are critical.

    >>> [verdict(0, 0), verdict(1, 0), verdict(1, 1), verdict(4, 0)]
    ['ok', 'watched', 'probation', 'refused']
    """
    if incidents >= 3 or critical >= 2:
        return "refused"
    if incidents >= 2 or critical >= 1:
        return "probation"
    return "watched" if incidents else "ok"
