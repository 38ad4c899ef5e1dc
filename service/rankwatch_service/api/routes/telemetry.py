"""Ingest: takes one `wire.Batch`; 202 once it is durable in the log, a dead letter if it can never be accepted."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from rankwatch.signed import Purpose, split
from rankwatch_service.access.agents import Origin
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies import Context, Ctx, Require, begin_job, verified
from rankwatch_service.api.http.problem import RETRY_AFTER_S, ProblemError
from rankwatch_service.api.ingest import NotNowError
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.log import sql_log
from rankwatch_service.log.base import Entry
from rankwatch_service.store.engine import write
from rankwatch_service.telemetry.envelope import BadBatchError, Reason
from rankwatch_service.telemetry.validate import ValidBatch, validate

router = APIRouter(tags=["ingest"])

STATUS: Final = {Reason.TOO_LARGE: 413, Reason.CONTENT_TYPE: 415, Reason.MALFORMED: 400}
"""HTTP status by reason; 422 for all others, which are well-formed but invalid."""


class AcceptedBatch(ApiReply):
    """The batch is durable in the log; also the reply to a batch that was sent before."""

    accepted: bool = True


@router.post(
    "/telemetry",
    status_code=202,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                "application/msgpack": {"schema": {"type": "string", "format": "binary"}},
                "application/json": {"schema": {"type": "object", "description": "docs/design.md, Wire"}},
            },
        }
    },
)
async def telemetry(
    request: Request, context: Ctx, identity: Annotated[Identity, Depends(Require(Scope.INGEST))]
) -> AcceptedBatch:
    """Accept one batch, as msgpack or as plain JSON."""
    body = b""
    try:
        body = await read_body(request)
        # One thread for all of it: each change of threads waits for the interpreter where many work.
        entry = await run_in_threadpool(admit, request, context, identity, body)
        request.scope["turn"].end()
        with context.counters.append_s.time():
            await context.intake.put(entry, len(entry.value))
    except BadBatchError as error:
        await run_in_threadpool(refuse, context, error, body)
        raise ProblemError(STATUS.get(error.reason, 422), f"{error.reason}: {error.detail}") from error
    except NotNowError as error:
        context.counters.batches.labels("busy").inc()
        detail = f"the batch cannot be stored now ({error}); keep it and try again"
        raise ProblemError(503, detail, headers={"Retry-After": str(RETRY_AFTER_S)}) from error
    context.counters.batches.labels("accepted").inc()
    context.counters.bytes.inc(len(body))
    return AcceptedBatch()


async def read_body(request: Request) -> bytes:
    """The request's body.

    Raises:
        BadBatchError: it is too long.
    """
    try:
        return await request.body()
    except HTTPException as error:
        raise BadBatchError(Reason.TOO_LARGE, str(error.detail)) from error


def admit(request: Request, context: Context, identity: Identity, body: bytes) -> Entry:
    """A batch as the log stores it, if its sender may send it. May query.

    Raises:
        BadBatchError: it can never be accepted.
        ProblemError: see `verified` and `begin_job`; or its token has begun too many jobs (429).
    """
    content_type = request.headers.get("content-type", "")
    encoding = request.headers.get("content-encoding", "identity")
    signed = split(body)
    batch = read_batch(signed.message if signed else body, content_type, encoding)
    verified(context, request, identity, signed, Purpose.BATCH, Origin(batch.job, batch.host))
    if wait_s := context.new_jobs.wait_s(identity, batch.job):
        context.counters.batches.labels("too_many_jobs").inc()
        context.new_jobs.report_due()
        detail = f"token {identity.name!r} has begun too many jobs; job {batch.job!r} may begin later"
        raise ProblemError(429, detail, headers={"Retry-After": str(wait_s)})
    begin_job(context, request, identity, batch.job)
    return Entry(batch.job, body if signed else batch.body)


def read_batch(body: bytes, content_type: str, encoding: str) -> ValidBatch:
    """Validate a batch, in the form in which the log stores it.

    Raises:
        BadBatchError: it can never be accepted.
    """
    if encoding != "identity":
        raise BadBatchError(
            Reason.CONTENT_TYPE, f"Content-Encoding {encoding!r} is not supported: send the body uncompressed"
        )
    return validate(body, content_type)


def refuse(context: Context, error: BadBatchError, body: bytes) -> None:
    """Count a batch that can never be accepted, and store it as a dead letter."""
    context.counters.batches.labels(error.reason).inc()
    with write(context.engine) as connection:
        sql_log.keep(connection, "api", error.reason, error.detail, body, context.clock.unix_ns())
