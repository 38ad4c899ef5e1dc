"""The live feed: changes as server-sent events, with ids to resume from after a reconnect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Header, Query
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.background.change_feed import AGAIN_AFTER_S, FeedFilter, ends
from rankwatch_service.api.background.health_facts import StreamState, partitions, processes
from rankwatch_service.api.dependencies import Ctx, EventStreamDep, Require
from rankwatch_service.store.engine import read
from rankwatch_service.store.errors import StoreError

router = APIRouter()

RETRY_MS: Final = 3_000
"""How long a browser waits before it reconnects."""


@router.get("/events", response_class=EventSourceResponse, tags=["events"])
async def events(
    context: Ctx,
    identity: Annotated[Identity, Depends(Require(Scope.READ))],
    stream: EventStreamDep,
    job: Annotated[list[str] | None, Query()] = None,
    after: Annotated[
        int | None, Query(ge=0, description="like Last-Event-ID, for clients that cannot set that header")
    ] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> AsyncIterator[ServerSentEvent]:
    """All changes from now on, or since an id: `event` is the topic, `data` is {job, at_unix_ns, at, ...}.

    If the id is too old or unknown, the first event is `reset`: read everything again, then continue from its id.
    """
    with suppress(StoreError):  # the client comes back
        oldest, newest = await run_in_threadpool(ends, context.engine)
        since = int(last_event_id) if last_event_id is not None and last_event_id.isdecimal() else after
        position = newest if since is None else since
        if since is not None and not oldest - 1 <= since <= newest:
            position = newest
            yield ServerSentEvent(event="reset", data={"after": newest}, id=str(newest), retry=RETRY_MS)
        else:
            yield ServerSentEvent(event="hello", data={"after": position}, id=str(position), retry=RETRY_MS)
        shown = FeedFilter(identity.jobs, job)
        while not context.changes.stopping and await stream.still_allowed():
            generation = context.changes.generation
            found = await context.tail.after(position, generation, shown)
            position = found.position
            for event in found.events:
                yield event
            if not found.more:
                await context.changes.wait(generation, AGAIN_AFTER_S)


@router.get("/stream", tags=["stream"])
def stream_state(
    context: Ctx, _identity: Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]
) -> StreamState:
    """Partitions and processes of stream."""
    with read(context.engine) as connection:
        in_store = not context.settings.kafka
        return StreamState(partitions=partitions(connection, in_store), processes=processes(connection))
