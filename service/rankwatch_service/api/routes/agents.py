"""Orders and views: what agents and the service exchange about orders."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from rankwatch import wire
from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.dependencies.event_streams import EventStreamDep
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.problem import RETRY_AFTER_S, ProblemError
from rankwatch_service.api.ingest.intake import NotNowError
from rankwatch_service.names import NAME_CHARS_MAX, is_name

router = APIRouter(prefix="/agents", tags=["agents"])

RESEND_S: Final = 10.0
"""How often everything is sent again: an agent that missed a change is out of date for no longer."""

VIEW_RANKS_MAX: Final = 1_024
"""Ranks of one host; the view of so many is 150 KB."""

_VIEW: Final = msgspec.msgpack.Decoder(wire.View)
Name = Annotated[str, Query(min_length=1, max_length=NAME_CHARS_MAX)]
Agent = Annotated[Identity, Depends(Require(Scope.INGEST))]


def _may_listen(identity: Agent, job: Name) -> None:
    """Refuse before the event stream begins; afterwards there is no way to."""
    if not identity.may_see(job):
        raise ProblemError(403, f"this token is restricted to job {identity.job!r}")


@router.get("/orders", response_class=EventSourceResponse, dependencies=[Depends(_may_listen)])
async def orders(
    context: Ctx, _identity: Agent, stream: EventStreamDep, job: Name, host: Name, boot: Name
) -> AsyncIterator[ServerSentEvent]:
    """All open orders of the job, sent at once, after every change, and every 10 s.

    `host` and `boot` identify the agent.
    """
    del host, boot
    sent, sent_at_s = b"", float("-inf")
    async with stream:
        while not context.changes.stopping and await stream.still_allowed():
            generation = context.changes.generation
            body = await run_in_threadpool(context.orders.orders, job, generation)
            now_s = context.clock.monotonic_s()
            if body != sent or now_s - sent_at_s >= RESEND_S:
                yield ServerSentEvent(raw_data=body.decode(), event="orders")
                sent, sent_at_s = body, now_s
            await context.changes.wait(generation, RESEND_S)


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
    try:
        posted = _VIEW.decode(await request.body())
    except msgspec.DecodeError as error:
        raise ProblemError(400, f"the body is not a view: {error}") from error
    check_view(posted)
    if not identity.may_see(posted.job):
        raise ProblemError(403, f"this token is restricted to job {identity.job!r}")
    try:
        await context.views.put(posted, 160 * len(posted.ranks))
    except NotNowError as error:
        raise ProblemError(
            503, "too many views are waiting to be stored; try again", headers={"Retry-After": str(RETRY_AFTER_S)}
        ) from error
    context.counters.views.inc()
    context.driver.wake()
    body = await run_in_threadpool(context.orders.orders, posted.job, context.changes.generation)
    return Response(body, media_type="application/json")


def check_view(view: wire.View) -> None:
    """Check a view.

    Raises:
        ProblemError: a name is empty or too long, a number is out of range, or there are too many ranks.
    """
    for what in ("job", "attempt", "host", "boot"):
        name = getattr(view, what)
        if not is_name(name):
            raise ProblemError(422, f"{what} {name[:20]!r} is not a valid name")
    if len(view.ranks) > VIEW_RANKS_MAX:
        raise ProblemError(422, f"the view has {len(view.ranks)} ranks; a host may have at most {VIEW_RANKS_MAX}")
    if any(not 0 <= rank.rank < 2**31 or not -1 <= rank.step < 2**53 for rank in view.ranks):
        raise ProblemError(422, "a rank or step is out of range")
