"""The change feed: one poll informs all requests of this process of changes, which are read once for all event streams.

Every commit wakes every stream, and a busy service commits many times a second. Streams that have read up to a recent
change therefore share what the tail has read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from fastapi.sse import ServerSentEvent
from sqlalchemy import ColumnElement, Engine, RowMapping, and_, func, select, true
from starlette.concurrency import run_in_threadpool

from rankwatch_service.access.job_filter import JobFilter
from rankwatch_service.api.reply import with_time_texts
from rankwatch_service.store.change_watch import Changes
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Feed

POLL_S: Final = 0.05
"""Time between two polls of the database. A poll takes 3 us on SQLite, less on PostgreSQL."""

Value = TypeVar("Value")


class ChangeFeed:
    """Lives in the event loop. `generation` grows with every change that is detected."""

    def __init__(self, changes: Changes, on_change: Callable[[], None]) -> None:
        """Poll nothing yet.

        Args:
            changes: polled every `POLL_S`.
            on_change: called in the event loop after each change; must not block.
        """
        self._changes = changes
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.generation = 0
        self.stopping = False

    def start(self) -> None:
        """Start polling; call it inside the running loop."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Wake all waiters for the last time; they return when they see `stopping`."""
        self.stopping = True
        self._announce()

    async def close(self) -> None:
        """Stop polling and release the connection."""
        self.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._changes.close()

    async def wait(self, generation: int, timeout_s: float) -> None:
        """Return when the database has changed since `generation`, when the feed stops, or after `timeout_s`."""
        if self.generation != generation or self.stopping:
            return
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return

    async def read_until(
        self, read: Callable[[], Value], accept: Callable[[Value], bool], timeout_s: float
    ) -> tuple[Value, bool]:
        """Read, and read again after each change, until the value is accepted, the feed stops or the time is up.

        Args:
            read: reads the database; runs in a thread. Its errors are raised here.
            accept: whether the caller has waited for this value.
            timeout_s: how long to wait for changes. The last read may end later.

        Returns:
            The last value, and whether it was accepted.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            # Taken before the read: a change during the read causes another one.
            generation = self.generation
            value = await run_in_threadpool(read)
            if accept(value):
                return value, True
            left_s = deadline_s - loop.time()
            if left_s <= 0 or self.stopping:
                return value, False
            await self.wait(generation, left_s)

    async def _run(self) -> None:
        while not self.stopping:
            if self._changes.changed():
                self._announce()
            await asyncio.sleep(POLL_S)

    def _announce(self) -> None:
        self.generation += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._on_change()


READ_MAX: Final = 500
"""Most rows of one read."""

KEPT_MAX: Final = 2_000
"""Newest changes kept in memory."""

AGAIN_AFTER_S: Final = 10.0
"""Longest time between two readings, also if no change of the database was announced."""


class FeedRow(NamedTuple):
    """One row of the feed."""

    id: int
    job: str
    event: ServerSentEvent


class Found(NamedTuple):
    """What a stream sends next."""

    events: list[ServerSentEvent]
    position: int
    """The id up to which the stream has read."""
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

    async def after(self, position: int, generation: int, shown: FeedFilter) -> Found:
        """What comes after an id.

        Args:
            position: the id up to which the stream has read.
            generation: of `ChangeFeed`, taken before the call: what was committed before it is found.
            shown: what the stream shows.

        Raises:
            StoreError: the database does not answer.
        """
        await self._catch_up(generation)
        newest = self._newest
        if position >= self._before and not shown.allowed.project:  # the project of a job is in the database
            events = [one.event for one in self._since(position) if shown.sees(one.job)]
            return Found(events, max(position, newest), more=False)
        found = await run_in_threadpool(_read, self._engine, position, shown.clause)
        if len(found) == READ_MAX:
            return Found([one.event for one in found], found[-1].id, more=True)
        return Found([one.event for one in found], max([position, newest, *(one.id for one in found)]), more=False)

    def _since(self, position: int) -> list[FeedRow]:
        """Kept changes after an id: usually the last few."""
        found = []
        for change in reversed(self._changes):
            if change.id <= position:
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


def _read(engine: Engine, position: int, where: ColumnElement[bool]) -> list[FeedRow]:
    query = select(Feed.__table__).where(Feed.id > position, where).order_by(Feed.id).limit(READ_MAX)
    with read(engine) as connection:
        return [_row(row) for row in connection.execute(query).mappings()]


def _row(row: RowMapping) -> FeedRow:
    data: dict[str, Any] = with_time_texts({"job": row["job"], "at_unix_ns": row["at_unix_ns"], **row["data"]})
    event = ServerSentEvent(event=row["topic"], raw_data=msgspec.json.encode(data).decode(), id=str(row["id"]))
    return FeedRow(row["id"], row["job"], event)
