"""The newest changes, read once for all event streams of this process.

Every commit wakes every stream, and a busy service commits many times a second. Streams that have read up to a recent
change get the next ones from memory; one that resumes from an older id reads the database until it has caught up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
from fastapi.sse import ServerSentEvent
from sqlalchemy import ColumnElement, Engine, RowMapping, and_, func, select, true
from starlette.concurrency import run_in_threadpool

from rankwatch_service.access.job_filter import JobFilter
from rankwatch_service.api.reply import with_time_texts
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Feed

READ_MAX: Final = 500
"""Most rows of one read."""

KEPT_MAX: Final = 2_000
"""Newest changes kept in memory."""

AGAIN_AFTER_S: Final = 10.0
"""Longest time between two readings, also if nobody said that the database has changed."""


class FeedRow(NamedTuple):
    """One row of the feed."""

    id: int
    job: str
    event: ServerSentEvent


class Found(NamedTuple):
    """What a stream sends next."""

    events: list[ServerSentEvent]
    place: int
    """Up to which id the stream has now read."""
    more: bool
    """Whether there is more to read already."""


@dataclass(frozen=True, slots=True)
class FeedFilter:
    """Which changes a stream shows: those of these jobs, and those of no job."""

    allowed: JobFilter
    wanted: Sequence[str] | None = None
    """The jobs that were asked for; None: all."""

    def sees(self, job: str) -> bool:
        """Whether it shows changes of this job."""
        return not job or (self.allowed.includes(job) and (self.wanted is None or job in self.wanted))

    @property
    def clause(self) -> ColumnElement[bool]:
        """The same as a condition on the feed."""
        wanted = true() if self.wanted is None else Feed.job.in_(self.wanted)
        return (Feed.job == "") | and_(self.allowed.clause(Feed.job), wanted)


class FeedTail:
    """Lives in the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._reading = asyncio.Lock()
        self._changes: deque[FeedRow] = deque()
        self._before = self._newest = -1
        """The kept changes are those after `_before`, up to `_newest`; -1: nothing was read yet."""
        self._generation = -1
        self._read_s = 0.0

    async def after(self, place: int, generation: int, shown: FeedFilter) -> Found:
        """What comes after an id.

        Args:
            place: up to which id the stream has read.
            generation: of `ChangeFeed`, taken before the call: what was committed before it is found.
            shown: what the stream shows.

        Raises:
            StoreError: the database does not answer.
        """
        await self._catch_up(generation)
        newest = self._newest
        if place >= self._before and not shown.allowed.project:  # the project of a job is in the database
            events = [one.event for one in self._since(place) if shown.sees(one.job)]
            return Found(events, max(place, newest), more=False)
        found = await run_in_threadpool(_read, self._engine, place, shown.clause)
        if len(found) == READ_MAX:
            return Found([one.event for one in found], found[-1].id, more=True)
        return Found([one.event for one in found], max([place, newest, *(one.id for one in found)]), more=False)

    def _since(self, place: int) -> list[FeedRow]:
        """Kept changes after an id: usually the last few."""
        found = []
        for change in reversed(self._changes):
            if change.id <= place:
                break
            found.append(change)
        return found[::-1]

    async def _catch_up(self, generation: int) -> None:
        async with self._reading:
            now_s = asyncio.get_running_loop().time()
            if generation <= self._generation and now_s - self._read_s < AGAIN_AFTER_S:
                return
            if self._newest < 0:
                _, self._newest = await run_in_threadpool(ends, self._engine)
                self._before = self._newest
            more = True
            while more:
                found = await run_in_threadpool(_read, self._engine, self._newest, true())
                self._keep(found)
                more = len(found) == READ_MAX
            self._generation, self._read_s = generation, now_s

    def _keep(self, found: Sequence[FeedRow]) -> None:
        if found:
            self._changes.extend(found)
            self._newest = found[-1].id
        while len(self._changes) > KEPT_MAX:
            self._before = self._changes.popleft().id


def ends(engine: Engine) -> tuple[int, int]:
    """The oldest and the newest id in the feed; (1, 0) if it is empty."""
    with read(engine) as connection:
        oldest, newest = connection.execute(select(func.min(Feed.id), func.max(Feed.id))).one()
    return oldest or 1, newest or 0


def _read(engine: Engine, place: int, where: ColumnElement[bool]) -> list[FeedRow]:
    query = select(Feed.__table__).where(Feed.id > place, where).order_by(Feed.id).limit(READ_MAX)
    with read(engine) as connection:
        return [_row(row) for row in connection.execute(query).mappings()]


def _row(row: RowMapping) -> FeedRow:
    data: dict[str, Any] = with_time_texts({"job": row["job"], "at_unix_ns": row["at_unix_ns"], **row["data"]})
    event = ServerSentEvent(event=row["topic"], raw_data=msgspec.json.encode(data).decode(), id=str(row["id"]))
    return FeedRow(row["id"], row["job"], event)
