"""Telemetry on its way into the log: batches that share one transaction, and names of new jobs."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Final, Generic, Protocol, TypeVar

from sqlalchemy import Engine, select

from rankwatch_service.access.agents import ForgedError, Origin
from rankwatch_service.access.identities import Identity
from rankwatch_service.clock import Clock
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.policy.control_records import TelemetryRefused, encode_control
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Job

Item = TypeVar("Item")

PENDING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes that wait for a flush: 8 bodies of the largest size. More is refused; agents then spool it."""

FLUSH_BYTES_MAX: Final = 16 * 1024 * 1024
FLUSH_ITEMS_MAX: Final = 256
"""In one transaction: 256 batches of 80 KB are the 20 ms that a writer may hold the lock."""


class NotNowError(Exception):
    """The batch cannot be stored now; the text says why. It may be sent again."""


class Batcher(Generic[Item]):
    """Collects items and hands them to `flush` in batches, in the order in which they came."""

    def __init__(self, name: str, flush: Callable[[Sequence[Item]], None]) -> None:
        """Flush nothing until `start`.

        Args:
            name: of the thread.
            flush: stores items durably; runs in a thread of its own, one call at a time.
        """
        self._flush = flush
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: list[tuple[Item, int, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.pending_bytes = 0
        self.refused = 0
        """Items refused because too many bytes were waiting."""

    async def put(self, item: Item, size_bytes: int) -> None:
        """Return once the item is durable.

        Raises:
            NotNowError: too many bytes are waiting.
            Exception: `flush` raised it.
        """
        if self.pending_bytes + size_bytes > PENDING_BYTES_MAX:
            self.refused += 1
            raise NotNowError("too many writes are waiting")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, size_bytes, future))
        self.pending_bytes += size_bytes
        self._wake.set()
        await future

    def start(self) -> None:
        """Start flushing; call it inside the running loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Flush what is waiting, then end."""
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping or self._waiting:
            await self._wake.wait()
            batch = self._take()
            if not self._waiting and not self._stopping:
                self._wake.clear()
            if not batch:
                continue
            items = [item for item, _, _ in batch]
            failed: BaseException | None = None
            try:
                await loop.run_in_executor(self._thread, self._flush, items)
            except Exception as error:  # noqa: BLE001 - raised to those who wait for these items
                failed = error
            for _, size_bytes, future in batch:
                self.pending_bytes -= size_bytes
                if future.done():  # the request was cancelled
                    continue
                if failed is None:
                    future.set_result(None)
                else:
                    future.set_exception(failed)

    def _take(self) -> list[tuple[Item, int, asyncio.Future[None]]]:
        total, count = 0, 0
        for _, size_bytes, _ in self._waiting[:FLUSH_ITEMS_MAX]:
            if count and total + size_bytes > FLUSH_BYTES_MAX:
                break
            total, count = total + size_bytes, count + 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch


NEW_JOBS_MAX: Final = 60
"""Jobs that one token may begin at once; one more each second. A sweep of hundreds of jobs begins within minutes."""

ACTIVE_JOBS_MAX: Final = 256
"""Jobs of one token that sent something within `ACTIVE_S`: a quarter of what a partition takes, so three quarters are
left to jobs of other tokens."""

ACTIVE_S: Final = 3_600.0
"""After this time without telemetry the stream drops a job from memory (`IDLE_AFTER_S`)."""

REPORT_S: Final = 10.0
"""Refused messages of a token are reported this often: a flood of any size is six control records a minute."""


@dataclass(slots=True)
class _TokenJobs:
    """What one token has begun."""

    name: str
    spare: float = NEW_JOBS_MAX
    """Jobs that it may begin now."""
    refilled_s: float = 0.0
    newest: str = ""
    refused: int = 0
    """Messages refused since the last report."""
    what: str = ""
    limit: int = 0
    reported_s: float = -math.inf


Report = Callable[[str, TelemetryRefused], None]
"""(job, record)"""


class NewJobs:
    """The jobs that tokens have begun. Thread-safe."""

    def __init__(self, engine: Engine, clock: Clock, report: Report) -> None:
        """Do no I/O yet.

        Args:
            engine: of a database with this version's tables.
            clock: of the limits.
            report: appends a control record about a job.
        """
        self._engine = engine
        self._clock = clock
        self._report = report
        self._received_s: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """By job, in the order of their newest messages: the token that began it, and the time of its newest
        message."""
        self._tokens: dict[str, _TokenJobs] = {}
        self._active: Counter[str] = Counter()
        """By token id."""
        self._lock = Lock()

    def load(self) -> None:
        """Load the jobs that were active before this process started. They count for no token."""
        now_s, since = self._clock.monotonic_s(), self._clock.unix_ns() - int(ACTIVE_S * 1e9)
        query = select(Job.name, Job.last_seen_unix_ns).where(Job.last_seen_unix_ns >= since)
        with read(self._engine) as connection:
            rows = connection.execute(query.order_by(Job.last_seen_unix_ns)).all()
        with self._lock:
            for job, at_unix_ns in rows:
                self._received_s[job] = "", now_s - max(self._clock.unix_ns() - at_unix_ns, 0) / 1e9

    def wait_s(self, identity: Identity, job: str) -> int:
        """Count a message of a job. Return 0 if it is accepted, else seconds after which another try makes sense."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            known = self._received_s.get(job)
            if known is not None and now_s - known[1] < ACTIVE_S:
                self._received_s[job] = known[0], now_s
                self._received_s.move_to_end(job)
                return 0
            self._forget(now_s)
            token = self._tokens.setdefault(identity.id, _TokenJobs(identity.name, refilled_s=now_s))
            token.spare = min(token.spare + now_s - token.refilled_s, NEW_JOBS_MAX)
            token.refilled_s = now_s
            if self._active[identity.id] >= ACTIVE_JOBS_MAX:
                wait_s, token.what, token.limit = 60, "active jobs of one token", ACTIVE_JOBS_MAX
            elif token.spare < 1:
                wait_s, token.what, token.limit = 1, "new jobs of one token within a minute", NEW_JOBS_MAX
            else:
                token.spare -= 1
                token.newest = job
                self._active[identity.id] += 1
                self._received_s[job] = identity.id, now_s
                return 0
            token.refused += 1
            return wait_s

    def report_due(self) -> None:
        """Report the refused messages of tokens that were not reported for `REPORT_S`, each in its newest job."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            due = [one for one in self._tokens.values() if one.refused and now_s - one.reported_s >= REPORT_S]
            records = [(token.newest, _record(token)) for token in due if token.newest]
            for token in due:
                token.refused, token.reported_s = 0, now_s
        for job, record in records:
            self._report(job, record)

    def _forget(self, now_s: float) -> None:
        """Drop the jobs that are not active any more, and the tokens that have none and are not limited."""
        while self._received_s:
            job, (token_id, received_s) = next(iter(self._received_s.items()))
            if now_s - received_s < ACTIVE_S:
                break
            del self._received_s[job]
            if token_id:
                self._active[token_id] -= 1
        idle = [key for key, token in self._tokens.items() if self._active[key] <= 0 and not token.refused]
        for key in idle:
            if now_s - self._tokens[key].refilled_s >= ACTIVE_S:
                del self._tokens[key], self._active[key]


def _record(token: _TokenJobs) -> TelemetryRefused:
    fields: dict[str, str | int] = {"what": token.what, "limit": token.limit, "token": token.name}
    return TelemetryRefused("limit", {**fields, "figure": token.limit + 1, "count": token.refused})


class Intake(Protocol):
    """Stores entries of the log; many requests may call it at the same time."""

    def start(self) -> None:
        """Start; called inside the running loop."""
        ...

    async def put(self, item: Entry, size_bytes: int) -> None:
        """Return once the entry is durable in the log.

        Raises:
            NotNowError: it cannot be stored now; raised after a bounded wait.
            BadBatchError: it can never be stored.
            StoreError: the database failed.
        """
        ...

    async def stop(self) -> None:
        """Finish the entries that are being stored, then end."""
        ...


EVERY_S: Final = 5.0
"""Between two control records about one kind of forgery in one job; those in between are counted."""

KINDS_MAX: Final = 4_096
"""(job, kind) pairs that are remembered, about 1 MB; the oldest makes room."""


@dataclass(slots=True)
class _Kind:
    sent_s: float
    count: int = 0


class Forgeries:
    """What was refused as forged. Thread-safe."""

    def __init__(self, engine: Engine, controls: ControlLog, clock: Clock) -> None:
        self._engine = engine
        self._controls = controls
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._lock = Lock()

    def add(self, origin: Origin, error: ForgedError, source: str) -> None:
        """Count a forged message, and report it unless one of its kind was reported just now."""
        now_s, key = self._clock.monotonic_s(), (origin.job, error.what)
        with self._lock:
            kind = self._kinds.pop(key, None) or _Kind(float("-inf"))
            if len(self._kinds) >= KINDS_MAX:
                del self._kinds[next(iter(self._kinds))]
            self._kinds[key] = kind
            kind.count += 1
            if now_s - kind.sent_s < EVERY_S:
                return
            kind.sent_s, count, kind.count = now_s, kind.count, 0
        fields: dict[str, str | int] = {"what": error.what, "host": origin.host, "agent": error.agent}
        fields |= {"source": source, "count": count}
        record = TelemetryRefused("forged", fields)
        with write(self._engine) as connection:
            self._controls.append_in(connection, [Entry(origin.job, encode_control(record))])
