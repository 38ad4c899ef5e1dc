"""Jobs, their attempts and checkpoints; deleting jobs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, RowMapping, case, func, or_, select
from starlette.concurrency import run_in_threadpool

from rankwatch_service.access.agents import jobs_with_agents
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies import Ctx, IdempotencyDep, NameOrNone, PreconditionDep, Require
from rankwatch_service.api.http.paging import Contents, Key, Number, Page, Projects, Time, Wanted, any_of, fetch_page
from rankwatch_service.api.http.problem import RETRY_AFTER_S, ProblemError, not_found
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.log.base import Entry
from rankwatch_service.orders.driver import open_orders
from rankwatch_service.orders.running_attempt import checkpoints, launches_at_once
from rankwatch_service.policy.actions import Action
from rankwatch_service.policy.checkpoint_ledger import SURVIVES_PROCESSES, LedgerEntry, newest_good, save_interval_s
from rankwatch_service.policy.control_records import JobDeleted, encode_control
from rankwatch_service.policy.rollback import way_back
from rankwatch_service.series.rows import delete_some
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import AgentView, Incident, JobHostDevice
from rankwatch_service.store.models import Attempt as AttemptRow
from rankwatch_service.store.models import Checkpoint as CheckpointRow
from rankwatch_service.store.models import Job as JobRow
from rankwatch_service.store.models import JobOwnership as OwnershipRow
from rankwatch_service.store.models import Order as OrderRow
from rankwatch_service.store.settings_rows import read_policy

router = APIRouter(prefix="/jobs", tags=["jobs"])
Reader = Annotated[Identity, Depends(Require(Scope.READ))]
State = Literal["running", "stalled", "paused", "log_not_understood", "lost", "ended"]
Verdict = Literal["incomplete", "unproven", "good", "suspect", "gone", "refused"]
QUIET_S: Final = 300
"""How long a job must have reported nothing before it can be deleted. By then the log has no telemetry of it: a record
is kept for two snapshots, which are a minute apart."""
JobOrder = Literal["seen", "newest", "size"]
ORDERS: Final[dict[JobOrder, tuple[Key, ...]]] = {
    "seen": (JobRow.last_seen_unix_ns, JobRow.name),
    "newest": (JobRow.first_seen_unix_ns, JobRow.name),
    "size": (JobRow.world_size, JobRow.name),
}
"""Keys of each order, all descending."""
ORDERS_MEAN: Final = "seen: last seen first; newest: first seen last; size: most ranks first"
SEVERITIES: Final = ("info", "warning", "critical")
"""From the least severe to the most severe."""


class Job(ApiReply):
    """A job. Fields are the columns of `store.models.Job`, whose it is, the number of unresolved incidents and their
    worst severity.

    If the job is stalled or lost, `step_time_s` and `loss` are its last values before that.
    """

    name: str
    project: str
    """Empty: none; the same for owner."""
    owner: str
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
    accelerated: bool
    """Whether an hour of a rank is one of a GPU or another device; true while nothing is known of its ranks."""
    incidents: int
    worst_severity: str | None
    launches_at_once: list[str] = Field(default_factory=list)
    """Launches that train under this name now, if there is more than one: two jobs have the same name."""
    signed: bool = False
    """Agents have enrolled for it: what is not signed by one of them is refused."""


class JobChange(BaseModel):
    """What a person changes of a job. A field that is missing stays; an empty one is removed."""

    model_config = ConfigDict(extra="forbid")
    project: NameOrNone | None = None
    owner: NameOrNone | None = None


class SaveAdvice(ApiReply):
    """What the checkpoint ledger advises."""

    rollback_to: str | None
    """Id of the checkpoint that a rollback would load now."""
    rollback_mode: str | None
    """Mode of that rollback: full or relaunch."""
    relaunch_from: str | None
    """Id of the checkpoint that a relaunch would resume from: the newest good one that is not in memory."""
    save_s: Number | None
    """Duration of the newest complete save."""
    interval_s: Number | None
    """Seconds between saves that minimize the cost of saving plus lost work; null before the first failure."""


class OpenOrder(ApiReply):
    """An order that is being carried out."""

    id: str
    command_id: str
    action: str
    phase: str
    step: int
    detail: str


class ConfigurationChange(ApiReply):
    """A change of the settings that hold for a job, or one that its script declares."""

    what: str
    step: int | None
    """The newest finished step then; null before the first."""
    unix_ns: int


class JobDetail(Job):
    """A job with the topology of its current attempt, the ledger's advice and its open orders."""

    topology: Contents
    can: list[str]
    checkpoints: SaveAdvice
    orders: list[OpenOrder]
    in_use: str
    """Why it cannot be deleted now; empty if it can be."""
    two_people: bool
    """Whether a rollback, relaunch or stop of it needs the approval of another person than its requester."""
    dropped: dict[str, int]
    """Telemetry without effect, counted by reason."""
    configuration: list[ConfigurationChange]
    """The newest changes of the configuration, oldest first: tuning, rules on metrics and policy as far as they concern
    the job, and what its script declares."""


class Attempt(ApiReply):
    """One attempt: training from a start or a checkpoint load to the next."""

    attempt: str
    number: int
    started_unix_ns: int
    ended_unix_ns: int | None
    world_size: int
    first_step: int | None
    last_step: int | None
    topology: Contents


class Checkpoint(ApiReply):
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
    name: Annotated[list[str] | None, Query()] = None,
    search: Annotated[str | None, Query(max_length=200, description="Those with this text in name or owner")] = None,
    state: Annotated[list[State] | None, Query()] = None,
    project: Projects = None,
    owner: Annotated[list[str] | None, Query()] = None,
    host: Annotated[list[str] | None, Query(description="Those whose agents have reported from these hosts")] = None,
    from_unix_ns: Time = None,
    to_unix_ns: Time = None,
    order: Annotated[JobOrder, Query(description=ORDERS_MEAN)] = "seen",
) -> Page[Job]:
    """Jobs, last seen first. With several states, jobs in any of them. `from_unix_ns` and `to_unix_ns` are ends of a
    range in which jobs were seen.
    """
    query = _jobs().where(identity.jobs.clause(JobRow.name))
    query = any_of(query, JobRow.name, name)
    query = any_of(query, JobRow.state, state)
    if search:
        columns = (JobRow.name, OwnershipRow.owner, OwnershipRow.project)
        query = query.where(or_(*(column.icontains(search, autoescape=True) for column in columns)))
    query = any_of(query, OwnershipRow.project, project)
    query = any_of(query, OwnershipRow.owner, owner)
    if host:
        query = query.where(JobRow.name.in_(select(JobHostDevice.job).where(JobHostDevice.host.in_(host))))
    if from_unix_ns is not None:
        query = query.where(JobRow.last_seen_unix_ns >= from_unix_ns)
    if to_unix_ns is not None:
        query = query.where(JobRow.first_seen_unix_ns < to_unix_ns)
    purpose = f"jobs {name} {search} {state} {project} {owner} {host} {from_unix_ns} {to_unix_ns} {order}"
    with read(context.engine) as connection:
        page = fetch_page(connection, query, ORDERS[order], window, context.cursors, purpose, shown, counted=True)
        several = launches_at_once(connection, [job.name for job in page.items], context.clock.unix_ns())
        signed = jobs_with_agents(connection, [job.name for job in page.items])
    for job in page.items:
        job.launches_at_once = several.get(job.name, [])
        job.signed = job.name in signed
    return page


@router.get("/{job}")
def show_job(job: str, context: Ctx, precondition: PreconditionDep, _identity: Reader) -> JobDetail:
    """One job. Its ETag is about what people edit, project and owner, and stays while the job trains."""
    with read(context.engine) as connection:
        row = find_job(connection, job)
        current = select(AttemptRow.topology).where(AttemptRow.job == job, AttemptRow.attempt == row["attempt"])
        topology: dict[str, Any] = connection.scalar(current) or {}
        not_closed = select(OrderRow.__table__).where(OrderRow.job == job, OrderRow.phase != "closed")
        orders = [OpenOrder.model_validate(one) for one in connection.execute(not_closed).mappings()]
        entries = checkpoints(connection, job)
        several = launches_at_once(connection, [job], context.clock.unix_ns())
        signed = bool(jobs_with_agents(connection, [job]))
        failures = connection.scalar(select(func.count()).where(AttemptRow.job == job)) or 1
        used = in_use(connection, row, context.clock.unix_ns())
        two_people = read_policy(connection).needs_second_person(Action.STOP, row["world_size"])
    observed_s = (row["last_seen_unix_ns"] - row["first_seen_unix_ns"]) / 1e9
    detail = JobDetail(
        **shown(row).model_dump() | {"launches_at_once": several.get(job, []), "signed": signed},
        topology=topology,
        can=sorted(topology.get("can", ())),
        checkpoints=advise(entries, topology.get("can", ()), failures - 1, observed_s),
        orders=orders,
        in_use=used,
        two_people=two_people,
        dropped=row["dropped"],
        configuration=row["configuration"],
    )
    return precondition.show(detail, editable(detail))


@router.get("/{job}/attempts")
def list_attempts(
    job: str,
    context: Ctx,
    window: Wanted,
    _identity: Reader,
    topology: Annotated[bool, Query(description="false: the field `topology` of each is empty")] = True,
) -> Page[Attempt]:
    """A job's attempts, newest first. Of thousands of ranks, a topology is hundreds of kilobytes."""
    columns = [column for column in AttemptRow.__table__.columns if topology or column.name != "topology"]
    query = select(*columns).where(AttemptRow.job == job)
    with read(context.engine) as connection:
        find_job(connection, job)
        order = (AttemptRow.number, AttemptRow.attempt)

        def attempt(row: RowMapping) -> Attempt:
            return Attempt.model_validate({"topology": {}, **row})

        return fetch_page(connection, query, order, window, context.cursors, f"attempts {job}", attempt)


@router.get("/{job}/checkpoints")
def list_checkpoints(
    job: str, context: Ctx, window: Wanted, _identity: Reader, verdict: Annotated[list[Verdict] | None, Query()] = None
) -> Page[Checkpoint]:
    """A job's checkpoints, newest save first."""
    query = select(CheckpointRow.__table__).where(CheckpointRow.job == job)
    query = any_of(query, CheckpointRow.verdict, verdict)
    purpose = f"checkpoints {job} {verdict}"
    order = (CheckpointRow.saved_unix_ns, CheckpointRow.id)
    with read(context.engine) as connection:
        find_job(connection, job)
        return fetch_page(connection, query, order, window, context.cursors, purpose, Checkpoint.model_validate)


def in_use(connection: Connection, row: RowMapping, now_unix_ns: int) -> str:
    """Why a job cannot be deleted now; empty if it can be."""
    viewed = select(func.max(AgentView.at_unix_ns)).where(AgentView.job == row["name"])
    quiet_s = (now_unix_ns - max(row["last_seen_unix_ns"], connection.scalar(viewed) or 0)) / 1e9
    if quiet_s < QUIET_S:
        return (
            f"job {row['name']!r} reported {max(quiet_s, 0):.0f} s ago: it can be deleted when it has reported nothing "
            f"for {QUIET_S} s"
        )
    if orders := open_orders(connection, row["name"]):
        return f"job {row['name']!r} has an open order ({orders[0].action}): cancel it first"
    return ""


def advise(entries: list[LedgerEntry], can: Collection[str], failures: int, observed_s: float) -> SaveAdvice:
    """The ledger's advice. Every attempt after the first counts as a failure that cost a rollback or a restart.

    Args:
        entries: the ledger, oldest first.
        can: what the job supports.
        failures: how often training was set back.
        observed_s: how long the job has been seen, in seconds.
    """
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

    severity_place = case({severity: place for place, severity in enumerate(SEVERITIES)}, value=Incident.severity)
    return select(
        JobRow.__table__,
        func.coalesce(OwnershipRow.project, "").label("project"),
        func.coalesce(OwnershipRow.owner, "").label("owner"),
        of_unresolved(func.count()).label("incidents"),
        of_unresolved(func.max(severity_place)).label("severity_place"),
    ).outerjoin(OwnershipRow, OwnershipRow.job == JobRow.name)


def shown(row: RowMapping) -> Job:
    """A job from the row that `find_job` returned."""
    return Job(**row, worst_severity=None if row["severity_place"] is None else SEVERITIES[row["severity_place"]])


def editable(job: Job) -> JobChange:
    """What people edit of a job."""
    return JobChange(project=job.project, owner=job.owner)


def find_job(connection: Connection, job: str) -> RowMapping:
    """The row of a job, with the number of its unresolved incidents and their worst severity.

    Raises:
        ProblemError: there is no such job.
    """
    row: RowMapping | None = connection.execute(_jobs().where(JobRow.name == job)).mappings().one_or_none()
    if row is None:
        raise not_found("job", job)
    return row


SERIES_S: Final = 5.0
"""Longest time in which a request removes series: 100,000 rows. The next request goes on."""

STREAM_WAIT_S: Final = 2.0
"""How long a reply waits for stream to delete a job, which usually takes 100 ms."""

Admin = Annotated[Identity, Depends(Require(Scope.ADMIN))]


class DeletedJob(ApiReply):
    """A job whose deletion was requested."""

    name: str
    deleted: bool
    """Whether stream has deleted it already."""


class _Deletion:
    """Deletes a job, and waits until stream has acted on it."""

    def __init__(self, job: str, context: Ctx, idempotency: IdempotencyDep, identity: Admin) -> None:
        self._job = job
        self._context = context
        self._idempotency = idempotency
        self._identity = identity

    async def __call__(self) -> bool:
        """Request the deletion; returns whether it is done.

        Raises:
            ProblemError: there is no such job, it is still in use, or its series are not removed yet.
        """
        await run_in_threadpool(self._remove_series)
        await run_in_threadpool(self._request)
        _, gone = await self._context.changes.read_until(self._find, lambda row: row is None, STREAM_WAIT_S)
        return gone

    def _remove_series(self) -> None:
        """Remove the bulk in short transactions, so that stream, which decides, has little left to remove."""
        with read(self._context.engine) as connection:
            self._require_unused(connection)
        deadline_s = self._context.clock.monotonic_s() + SERIES_S
        while delete_some(self._context.engine, self._job):
            if self._context.clock.monotonic_s() > deadline_s:
                detail = f"job {self._job!r} has many series, of which a part is removed; send the request again"
                raise ProblemError(503, detail, headers={"Retry-After": str(RETRY_AFTER_S)})

    def _request(self) -> None:
        def work(connection: Connection) -> DeletedJob:
            row = self._require_unused(connection)
            self._context.controls.append_in(connection, [Entry(self._job, encode_control(JobDeleted(self._job)))])
            now, source = self._context.clock.unix_ns(), self._idempotency.source
            fields = {name: row[name] for name in ("first_seen_unix_ns", "last_seen_unix_ns", "step", "incidents")}
            audit_trail.append(
                connection, now, self._identity.actor, "job.delete", self._job, "ok", source=source, fields=fields
            )
            return DeletedJob(name=self._job, deleted=False)

        self._idempotency.write(self._identity, None, 202, work)

    def _require_unused(self, connection: Connection) -> RowMapping:
        row = find_job(connection, self._job)
        if why := in_use(connection, row, self._context.clock.unix_ns()):
            raise ProblemError(409, why)
        return row

    def _find(self) -> RowMapping | None:
        with read(self._context.engine) as connection:
            return connection.execute(select(JobRow.__table__).filter_by(name=self._job)).mappings().one_or_none()


@router.delete("/{job}", responses={202: {"model": DeletedJob}})
async def delete(job: str, deletion: Annotated[_Deletion, Depends()], response: Response) -> DeletedJob:
    """Delete a job with all that is stored of it; the audit trail is kept. It must have reported nothing for 5 minutes,
    and have no open order. If it sends again, a new job begins.
    """
    gone = await deletion()
    response.status_code = 200 if gone else 202
    return DeletedJob(name=job, deleted=gone)
