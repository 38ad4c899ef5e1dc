"""Jobs, their attempts and their checkpoints."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel
from sqlalchemy import Connection, RowMapping, case, func, select

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.numbers import Number
from rankwatch_service.api.http.paging import Page, Wanted, any_of, fetch_page
from rankwatch_service.api.http.problem import not_found
from rankwatch_service.orders.running_attempt import checkpoints, launches_at_once
from rankwatch_service.policy.checkpoint_ledger import SURVIVES_PROCESSES, Entry, newest_good, save_interval_s
from rankwatch_service.policy.rollback import way_back
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Attempt as AttemptRow
from rankwatch_service.store.models import Checkpoint as CheckpointRow
from rankwatch_service.store.models import Incident
from rankwatch_service.store.models import Job as JobRow
from rankwatch_service.store.models import Order as OrderRow

router = APIRouter(prefix="/jobs", tags=["jobs"])
Reader = Annotated[Identity, Depends(Require(Scope.READ))]
State = Literal["running", "stalled", "paused", "lost", "ended"]
Verdict = Literal["incomplete", "unproven", "good", "suspect", "gone"]
GRAVITY: Final = ("info", "warning", "critical")
"""Least first."""


class Job(BaseModel):
    """A job. Fields are the columns of `store.models.Job`, how many incidents are not resolved, and the worst of them.

    Of a job that is stalled or lost, `step_time_s` and `loss` are what they were while it moved.
    """

    name: str
    state: str
    attempt: str
    world_size: int
    ranks_reporting: int
    step: int
    step_time_s: Number | None
    loss: Number | None
    first_seen_unix_ns: int
    last_seen_unix_ns: int
    last_progress_unix_ns: int | None
    incidents: int
    worst_severity: str | None
    launches_at_once: list[str] = []
    """Launches that train under this name right now, where they are several: two jobs with one name."""


class SaveAdvice(BaseModel):
    """What the ledger says about saving."""

    rollback_to: str | None
    """Id of the checkpoint that a rollback goes back to now."""
    rollback_mode: str | None
    """What it would take back: full or relaunch."""
    relaunch_from: str | None
    """The same among those that survive the processes."""
    save_s: Number | None
    """How long the newest complete save took."""
    interval_s: Number | None
    """Seconds between saves at which saving and lost work cost least; null until something has failed."""


class OpenOrder(BaseModel):
    """What the ranks are asked right now."""

    id: str
    command_id: str
    action: str
    phase: str
    step: int
    detail: str


class JobDetail(Job):
    """A job with its current attempt's topology, the ledger's advice and what is being done to it."""

    topology: dict[str, Any]
    can: list[str]
    checkpoints: SaveAdvice
    orders: list[OpenOrder]


class Attempt(BaseModel):
    """One stretch of training."""

    attempt: str
    number: int
    started_unix_ns: int
    ended_unix_ns: int | None
    world_size: int
    first_step: int | None
    last_step: int | None
    topology: dict[str, Any]


class Checkpoint(BaseModel):
    """One entry of the ledger."""

    id: str
    attempt: str
    step: int
    tier: str
    location: str
    shards_expected: int
    shards: list[int]
    seconds: Number
    bytes: int
    verdict: str
    verdict_reason: str
    saved_unix_ns: int


@router.get("")
def list_jobs(
    context: Ctx,
    window: Wanted,
    identity: Reader,
    state: Annotated[list[State] | None, Query()] = None,
) -> Page[Job]:
    """Jobs by when they were last heard of, newest first; of several states those in any of them."""
    query = _jobs()
    if identity.job:
        query = query.where(JobRow.name == identity.job)
    query = any_of(query, JobRow.state, state)
    order = (JobRow.last_seen_unix_ns, JobRow.name)
    with read(context.engine) as connection:
        page = fetch_page(connection, query, order, window, context.cursors, f"jobs {state}", _shown, counted=True)
        several = launches_at_once(connection, [job.name for job in page.items], context.clock.unix_ns())
    for job in page.items:
        job.launches_at_once = several.get(job.name, [])
    return page


@router.get("/{job}")
def show_job(job: str, context: Ctx, _identity: Reader) -> JobDetail:
    """One job."""
    with read(context.engine) as connection:
        row = _find(connection, job)
        current = select(AttemptRow.topology).where(AttemptRow.job == job, AttemptRow.attempt == row["attempt"])
        topology: dict[str, Any] = connection.scalar(current) or {}
        open_orders = select(OrderRow.__table__).where(OrderRow.job == job, OrderRow.phase != "closed")
        orders = [OpenOrder.model_validate(one) for one in connection.execute(open_orders).mappings()]
        entries = checkpoints(connection, job)
        several = launches_at_once(connection, [job], context.clock.unix_ns())
        failures = connection.scalar(select(func.count()).where(AttemptRow.job == job)) or 1
    observed_s = (row["last_seen_unix_ns"] - row["first_seen_unix_ns"]) / 1e9
    return JobDetail(
        **_shown(row).model_dump() | {"launches_at_once": several.get(job, [])},
        topology=topology,
        can=sorted(topology.get("can", ())),
        checkpoints=advise(entries, topology.get("can", ()), failures - 1, observed_s),
        orders=orders,
    )


@router.get("/{job}/attempts")
def list_attempts(job: str, context: Ctx, window: Wanted, _identity: Reader) -> Page[Attempt]:
    """A job's attempts, newest first."""
    query = select(AttemptRow.__table__).where(AttemptRow.job == job)
    with read(context.engine) as connection:
        _find(connection, job)
        order = (AttemptRow.number, AttemptRow.attempt)
        return fetch_page(connection, query, order, window, context.cursors, f"attempts {job}", Attempt.model_validate)


@router.get("/{job}/checkpoints")
def list_checkpoints(
    job: str,
    context: Ctx,
    window: Wanted,
    _identity: Reader,
    verdict: Annotated[list[Verdict] | None, Query()] = None,
) -> Page[Checkpoint]:
    """A job's checkpoints, newest save first."""
    query = select(CheckpointRow.__table__).where(CheckpointRow.job == job)
    query = any_of(query, CheckpointRow.verdict, verdict)
    purpose = f"checkpoints {job} {verdict}"
    order = (CheckpointRow.saved_unix_ns, CheckpointRow.id)
    with read(context.engine) as connection:
        _find(connection, job)
        return fetch_page(connection, query, order, window, context.cursors, purpose, Checkpoint.model_validate)


def advise(entries: list[Entry], can: Collection[str], failures: int, observed_s: float) -> SaveAdvice:
    """The ledger's advice. Every new attempt but the first is counted as a failure that training went back for."""
    complete = [entry for entry in entries if len(entry.shards) >= entry.shards_expected]
    save_s = complete[-1].seconds if complete else None
    back = way_back(entries, can)
    resume = newest_good(entries, SURVIVES_PROCESSES)
    return SaveAdvice(
        rollback_to=back.entry.id if back else None,
        rollback_mode=back.mode if back else None,
        relaunch_from=resume.id if resume else None,
        save_s=save_s,
        interval_s=save_interval_s(save_s, failures, observed_s) if save_s is not None else None,
    )


def _jobs() -> Any:
    def of_unresolved(what: Any) -> Any:
        mine = select(what).where(Incident.job == JobRow.name, Incident.state != "resolved")
        return mine.correlate(JobRow).scalar_subquery()

    gravity = case({severity: place for place, severity in enumerate(GRAVITY)}, value=Incident.severity)
    return select(
        JobRow.__table__,
        of_unresolved(func.count()).label("incidents"),
        of_unresolved(func.max(gravity)).label("gravity"),
    )


def _shown(row: RowMapping) -> Job:
    return Job(**row, worst_severity=None if row["gravity"] is None else GRAVITY[row["gravity"]])


def _find(connection: Connection, job: str) -> RowMapping:
    row: RowMapping | None = connection.execute(_jobs().where(JobRow.name == job)).mappings().one_or_none()
    if row is None:
        raise not_found("job", job)
    return row
