"""What agents and the service exchange besides telemetry: enrolment, orders, views."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Annotated, Final, NamedTuple

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from rankwatch import wire
from rankwatch.signed import HEAD_BYTES, Purpose, nonce_of, proof_of, split
from rankwatch_service.access.agents import FullError, HostProof, Origin, enrolments
from rankwatch_service.access.budgets import Rate
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.background.order_feed import OrdersUnreadError
from rankwatch_service.api.dependencies import (
    Ctx,
    EventStream,
    Require,
    begin_job,
    opened_stream,
    require_job,
    spend,
    verified,
)
from rankwatch_service.api.http.problem import RETRY_AFTER_S, ProblemError
from rankwatch_service.api.ingest import NotNowError
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.names import NAME_CHARS_MAX, is_name
from rankwatch_service.orders.running_attempt import ReceivedView
from rankwatch_service.store.errors import StoreError
from rankwatch_service.telemetry.envelope import BadBatchError, check_names, check_progress

router = APIRouter(prefix="/agents", tags=["agents"])

VIEW_RANKS_MAX: Final = 1_024
"""Ranks of one host; the view of so many is 150 KB."""

PROGRESS_BYTES: Final = 160
"""Bytes of a rank in a row beyond those in a view, where usual values may be left out."""

VIEW_BYTES_MAX: Final = 4 * 1024**3
"""Growth of a token's stored views that is allowed in a day: 40 attempts of 16,384 hosts with eight ranks each."""

VIEW_BYTES: Final = Rate("view_bytes", VIEW_BYTES_MAX, 86_400.0)

_VIEW: Final = msgspec.msgpack.Decoder(wire.View)
Name = Annotated[str, Query(min_length=1, max_length=NAME_CHARS_MAX)]
Agent = Annotated[Identity, Depends(Require(Scope.INGEST))]
LISTEN_DIGITS: Final = 2 * (HEAD_BYTES + wire.LISTEN_BYTES)
SignedRequest = Annotated[str, Query(pattern=rf"^([0-9a-f]{{{LISTEN_DIGITS}}})?$")]


class NewAgent(BaseModel):
    """An agent that enrols."""

    model_config = ConfigDict(extra="forbid")
    job: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]
    host: Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]
    nonce: Annotated[str, Field(pattern=r"^([0-9a-f]{32})?$", examples=["5d" * 16])] = ""
    """What the proofs are for."""
    host_id: Annotated[str, Field(pattern=r"^([0-9a-f]{8})?$", examples=["3fa9c1d2"])] = ""
    """The host's id: the prefix of its earlier agent's id; empty: this is the first agent of its host."""
    host_proof: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$", examples=["c4" * 32])] = ""
    """HMAC-SHA256 by the host's key over nonce, job and host."""


class EnrolledAgent(ApiReply):
    """The identity of an agent, with which it signs what it sends."""

    agent: str
    secret: str
    proof: str
    """HMAC-SHA256 by the token's enrolment key over nonce, agent and secret; empty if the token has none."""
    host_key: str
    """Key by which further agents prove that they are on the same host."""


class Listener(NamedTuple):
    """The agent that opens an order stream."""

    agent: str
    nonce: str


def _listener(
    request: Request, context: Ctx, identity: Agent, job: Name, host: Name, signed: SignedRequest = ""
) -> Listener:
    """Refuse before the event stream begins; afterwards there is no way to."""
    asked = bytes.fromhex(signed)
    agent = verified(context, request, identity, split(asked), Purpose.LISTEN, Origin(job, host))
    if not agent:
        raise ProblemError(403, "only an agent that has enrolled has an order stream")
    return Listener(agent, nonce_of(asked))


async def _order_stream(
    context: Ctx, request: Request, listener: Annotated[Listener, Depends(_listener)]
) -> AsyncIterator[EventStream]:
    """The only stream of the agent: one that it opened before ends."""
    if (older := context.listening.pop(listener.agent, None)) is not None:
        older.end()
    async with opened_stream(context, request) as stream:
        context.listening[listener.agent] = stream
        try:
            yield stream
        finally:
            if context.listening.get(listener.agent) is stream:
                del context.listening[listener.agent]


@router.post("/enrol", status_code=201)
def enrol(body: NewAgent, request: Request, context: Ctx, identity: Agent) -> EnrolledAgent:
    """Enrol the agent of a job on a host. The answer holds its secret, which cannot be read again."""
    for what, name in (("job", body.job), ("host", body.host)):
        if not is_name(name):
            raise ProblemError(422, f"{what} {name[:20]!r} is not a valid name")
    require_job(identity, body.job)
    spend(context, identity, enrolments(identity.hosts_max), 1.0)
    if wait_s := context.new_jobs.wait_s(identity, body.job):
        detail = f"token {identity.name!r} has begun too many jobs; job {body.job!r} may begin later"
        raise ProblemError(429, detail, headers={"Retry-After": str(wait_s)})
    begin_job(context, request, identity, body.job)
    claimed = HostProof(body.host_id, body.nonce, body.host_proof) if body.host_id and body.nonce else None
    try:
        reported = context.agents.enrol(Origin(body.job, body.host), identity.id, identity.hosts_max, claimed)
    except FullError as error:
        context.counters.agents_refused.inc()
        raise ProblemError(429, str(error), headers={"Retry-After": str(RETRY_AFTER_S)}) from error
    key = identity.enrolment_key
    proof = proof_of(key, body.nonce, reported.agent, reported.secret) if key else ""
    return EnrolledAgent(agent=reported.agent, secret=reported.secret, proof=proof, host_key=reported.host_key)


@router.get("/orders", response_class=EventSourceResponse)
async def orders(
    context: Ctx,
    listener: Annotated[Listener, Depends(_listener)],
    stream: Annotated[EventStream, Depends(_order_stream)],
    job: Name,
    host: Name,
    boot: Name,
) -> AsyncIterator[ServerSentEvent]:
    """All open orders of the job, sent at once, after every change, and every 10 s.

    `host` and `boot` identify the origin. Only an agent that has enrolled has a stream, and one: `signed` is 16 bytes
    of its choice in their signed form, in hexadecimal. Each event is signed with its secret, and brings back half of
    the code of the request.
    """
    del boot
    origin, sequence = Origin(job, host), itertools.count()
    with suppress(StoreError, OrdersUnreadError):  # the agent comes back
        async with aclosing(context.order_feed.of(job)) as reported:
            async for body in reported:
                if not await stream.still_allowed():
                    break
                data = context.signed_orders(origin, *listener, body, next(sequence))
                yield ServerSentEvent(raw_data=data.decode(), event="orders")


@router.post(
    "/view",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/msgpack": {"schema": {"type": "string", "format": "binary"}}},
        },
        "responses": {"200": {"content": {"application/json": {"schema": {"type": "object"}}}}},
    },
    response_class=Response,
)
async def view(request: Request, context: Ctx, identity: Agent) -> Response:
    """Store the newest view of a host. The reply holds the orders, so that a view is also a poll."""
    body = await request.body()
    # A view of 1,024 ranks takes milliseconds, in which the event loop serves others.
    posted, agent = await run_in_threadpool(_read_view, context, request, identity, body)
    origin = Origin(posted.job, posted.host)
    received, size = ReceivedView(posted, agent), len(body) + PROGRESS_BYTES * len(posted.ranks)
    row = context.view_sizes.of(received)
    if size > row.largest_bytes:
        spend(context, identity, VIEW_BYTES, size - row.largest_bytes)
        row.largest_bytes = size
    context.view_sizes.remember(received, row)  # also if it is not stored now: it comes again
    request.scope["turn"].end()
    try:
        await context.views.put(received._replace(is_first=not row.is_stored), size)
    except NotNowError as error:
        raise ProblemError(
            503, "too many views are waiting to be stored; try again", headers={"Retry-After": str(RETRY_AFTER_S)}
        ) from error
    row.is_stored = True
    context.counters.views.inc()
    context.driver.wake()
    answer = await run_in_threadpool(context.orders.orders, posted.job, context.changes.generation)
    if agent:
        answer = context.signed_orders(origin, agent, nonce_of(body), answer, 0)
    return Response(answer, media_type="application/json")


def _read_view(context: Ctx, request: Request, identity: Identity, body: bytes) -> tuple[wire.View, str]:
    """A view and the agent that signed it, if any."""
    signed = split(body)
    try:
        posted = _VIEW.decode(signed.message if signed else body)
    except msgspec.DecodeError as error:
        raise ProblemError(400, f"the body is not a view: {error}") from error
    check_view(posted)
    return posted, verified(context, request, identity, signed, Purpose.VIEW, Origin(posted.job, posted.host))


def check_view(view: wire.View) -> None:
    """Check a view.

    Raises:
        ProblemError: a text is empty or too long, a number is out of range, or there are too many ranks.
    """
    if len(view.ranks) > VIEW_RANKS_MAX:
        raise ProblemError(422, f"the view has {len(view.ranks)} ranks; a host may have at most {VIEW_RANKS_MAX}")
    try:
        check_names(view.job, view.attempt, view.host, view.boot)
        check_progress(view.ranks)
    except BadBatchError as error:
        raise ProblemError(422, error.detail) from error
