"""Event streams: how many may be open, and when one must end."""

from __future__ import annotations

from types import TracebackType
from typing import Annotated, Final

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool

from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies.context import Context, Ctx
from rankwatch_service.api.http.gate import session_of
from rankwatch_service.api.http.problem import RETRY_AFTER_S, ProblemError
from rankwatch_service.store.errors import StoreError

STREAMS_MAX: Final = 4_096
"""Open streams in one process: one for each host, and those of people. A stream costs 80 KB."""

STREAMS_OF_A_PERSON_MAX: Final = 64
"""Open streams of one token of a person; an ingest token, which all hosts share, has no limit of its own."""

CHECK_S: Final = 10.0
"""How often the token of an open stream is checked again."""


class EventStream:
    """One open stream, counted within `async with`. It ends if the database fails; clients then reconnect."""

    max_of_token = STREAMS_MAX

    def __init__(self, request: Request, context: Ctx) -> None:
        self._context: Context = context
        self._identity: Identity = request.scope["identity"]
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        self._token = bearer.strip() if kind.lower() == "bearer" else session_of(request.headers)
        self._checked_s = context.clock.monotonic_s()
        by_token = context.streams.get(self._identity.id, 0)
        if sum(context.streams.values()) >= STREAMS_MAX or by_token >= self.max_of_token:
            context.counters.streams_refused.inc()
            raise ProblemError(503, "too many event streams are open", headers={"Retry-After": str(RETRY_AFTER_S)})

    async def still_allowed(self) -> bool:
        """Whether the token that opened it is still valid; queries the database every `CHECK_S`."""
        now_s = self._context.clock.monotonic_s()
        if now_s - self._checked_s < CHECK_S:
            return True
        self._checked_s = now_s
        return await run_in_threadpool(self._context.authenticator.authenticate, self._token) is not None

    async def __aenter__(self) -> None:
        streams = self._context.streams
        streams[self._identity.id] = streams.get(self._identity.id, 0) + 1

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        streams = self._context.streams
        streams[self._identity.id] -= 1
        if not streams[self._identity.id]:
            del streams[self._identity.id]
        return isinstance(error, StoreError)


class PersonEventStream(EventStream):
    """A stream of a person, who may leave many tabs open."""

    max_of_token = STREAMS_OF_A_PERSON_MAX


EventStreamDep = Annotated[EventStream, Depends()]
PersonEventStreamDep = Annotated[PersonEventStream, Depends()]
