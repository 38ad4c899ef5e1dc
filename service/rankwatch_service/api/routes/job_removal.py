"""Removing jobs: from the lists (archive), and for good (delete).

Only stream knows the state of a job, so a deletion is a record of the control log. The reply waits for stream to act on
it, and is 202 if that takes longer than `STREAM_WAIT_S`.
"""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Response
from sqlalchemy import Connection, RowMapping, select, update
from starlette.concurrency import run_in_threadpool

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Context, Ctx
from rankwatch_service.api.dependencies.idempotency import IdempotencyDep
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.problem import RETRY_AFTER_S, ProblemError
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.jobs import Job, find_job, in_use, shown
from rankwatch_service.log.base import Entry
from rankwatch_service.orders import commands
from rankwatch_service.policy.control_records import JobDeleted, encode_control
from rankwatch_service.series.retention import delete_some
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Job as JobRow

router = APIRouter(prefix="/jobs", tags=["jobs"])

SERIES_S: Final = 5.0
"""Longest time in which a request removes series: 100,000 rows. The next request goes on."""

STREAM_WAIT_S: Final = 2.0
"""How long a reply waits for stream to delete a job, which usually takes 100 ms."""

Operator = Annotated[Identity, Depends(Require(Scope.OPERATE))]
Admin = Annotated[Identity, Depends(Require(Scope.ADMIN))]


class DeletedJob(ApiReply):
    """A job whose deletion was requested."""

    name: str
    deleted: bool
    """Whether stream has deleted it already."""


@router.post("/{job}/archive", response_model=Job)
def archive(job: str, context: Ctx, idempotency: IdempotencyDep, identity: Operator) -> Response:
    """Hide a job that has ended or is lost from the lists, with its incidents, until it sends telemetry again."""

    def work(connection: Connection) -> Job:
        row = find_job(connection, job)
        if row["state"] not in ("ended", "lost"):
            raise ProblemError(409, f"job {job!r} is {row['state']}: it can be archived when it has ended or is lost")
        if row["archived_unix_ns"] is not None:
            return shown(row)
        return _set_archived(context, connection, identity, idempotency.source, job, context.clock.unix_ns())

    return idempotency.write(identity, None, 200, work)


@router.post("/{job}/unarchive", response_model=Job)
def unarchive(job: str, context: Ctx, idempotency: IdempotencyDep, identity: Operator) -> Response:
    """List an archived job again."""

    def work(connection: Connection) -> Job:
        row = find_job(connection, job)
        if row["archived_unix_ns"] is None:
            return shown(row)
        return _set_archived(context, connection, identity, idempotency.source, job, None)

    return idempotency.write(identity, None, 200, work)


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


def _set_archived(
    context: Context, connection: Connection, identity: Identity, source: str, job: str, archived_unix_ns: int | None
) -> Job:
    connection.execute(update(JobRow).where(JobRow.name == job).values(archived_unix_ns=archived_unix_ns))
    now, action = context.clock.unix_ns(), "job.unarchive" if archived_unix_ns is None else "job.archive"
    audit_trail.append(connection, now, identity.actor, action, job, "ok", source=source)
    commands.tell(connection, "job", job, {"archived": archived_unix_ns is not None}, now)
    return shown(find_job(connection, job))
