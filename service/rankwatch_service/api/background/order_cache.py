"""What agents of a job need to know now: open orders, stacks, traces, the proven checkpoint, the relaunch advice."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any, Final, NamedTuple

import msgspec
from sqlalchemy import Connection, Engine, func, select

from rankwatch.wire import Orders, ResumeAdvice, StackRequest
from rankwatch_service.clock import Clock
from rankwatch_service.incidents.model import STACKS
from rankwatch_service.names import launch_of
from rankwatch_service.orders import traces
from rankwatch_service.orders.driver import current_orders
from rankwatch_service.orders.running_attempt import checkpoints
from rankwatch_service.policy.actions import FROM_SCRATCH, Action
from rankwatch_service.policy.checkpoint_ledger import CheckpointTier, LedgerEntry, newest_good
from rankwatch_service.policy.rollback import USABLE, resumed_from
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Command, Feed, Job
from rankwatch_service.store.models import Order as OrderRow

CLOSED_NS: Final = 10 * 10**9
"""How long a closed order is still sent, so that agents clear its slots; event streams resend everything that often."""

KEPT_NS: Final = 10 * 10**9
"""How long orders are cached while the feed reports no change."""

TOPICS: Final = ("command", "checkpoint", "job")
"""Topics of the feed that change orders."""

JOBS_MAX: Final = 4_096
"""Jobs in the cache; one entry serves all hosts of a job."""

_ENCODER: Final = msgspec.json.Encoder()


class KeptOrders(NamedTuple):
    """The orders of a job as they were read."""

    body: bytes
    generation: int
    """The generation of the database at which they were read."""
    position: int
    """They contain every change in the feed up to this id."""
    read_unix_ns: int
    is_empty: bool
    """Whether the job has no orders; only a change in the feed can end that."""


class OrderCache:
    """Caches the orders of each job until the feed reports a change of them. Thread-safe: a race costs a reading.

    A busy service commits many times a second, mostly telemetry. Orders of a job of which something is asked are read
    again after each commit, since leases are not in the feed; those of all others after a row of the feed about the
    job's commands, checkpoints or attempt, and every `KEPT_NS`.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._lock = Lock()
        self._cache: dict[str, KeptOrders] = {}
        self._generation = self._place = -1
        """The feed was read up to this id, as of this generation; -1: it was not."""
        self._changed: dict[str, int] = {}
        """The newest id of the feed with a change of its orders, by job."""
        self._forgotten = 0
        """Changes up to this id are not in `_changed` any more."""
        self._attempts: dict[str, Any] = {}
        """Attempt and state in the newest row of the feed about it, by job."""

    def orders(self, job: str, generation: int) -> bytes:
        """`wire.Orders` of a job as JSON, as of a generation of the database (`ChangeFeed.generation`)."""
        kept, now = self._cache.get(job), self._clock.unix_ns()
        if kept is not None and kept.generation >= generation:
            return kept.body
        position = self._follow(generation)
        may_stay = kept is not None and kept.is_empty and now - kept.read_unix_ns < KEPT_NS
        if may_stay and kept is not None and kept.position >= self._changed.get(job, self._forgotten):
            self._cache[job] = kept._replace(generation=generation)
            return kept.body
        with read(self._engine) as connection:
            orders = orders_of(connection, job, now)
        body = _ENCODER.encode(orders)
        if len(self._cache) >= JOBS_MAX:
            self._cache.clear()
        is_empty = not (orders.orders or orders.stacks or orders.traces)
        self._cache[job] = KeptOrders(body, generation, position, now, is_empty)
        return body

    def _follow(self, generation: int) -> int:
        """Note which jobs the feed names, at least up to a generation; return the id up to which it is read."""
        with self._lock:
            if generation <= self._generation:
                return self._place
            with read(self._engine) as connection:
                if self._place < 0:
                    self._place = connection.scalar(select(func.max(Feed.id))) or 0
                else:
                    news = select(Feed.id, Feed.job, Feed.topic, Feed.data).where(Feed.id > self._place)
                    for row in connection.execute(news.where(Feed.topic.in_(TOPICS)).order_by(Feed.id)):
                        self._note(row.id, row.job, row.topic, row.data)
                        self._place = row.id
            self._generation = generation
            return self._place

    def _note(self, position: int, job: str, topic: str, data: Mapping[str, Any]) -> None:
        if topic == "job":  # a row a second while the job trains
            attempt = (data.get("attempt"), data.get("state"))
            if self._attempts.get(job) == attempt:
                return
            self._attempts[job] = attempt
        self._changed[job] = position
        if len(self._changed) > JOBS_MAX:
            self._forgotten = position
            self._changed.clear()
            self._attempts.clear()


def orders_of(connection: Connection, job: str, now_unix_ns: int) -> Orders:
    """`wire.Orders` of a job now. Open orders come first, then those closed in the last `CLOSED_NS`."""
    entries = checkpoints(connection, job)
    advice = _resume(connection, job, entries)
    proven = newest_good(entries, (CheckpointTier.MEMORY,))
    stacks = connection.execute(
        select(Command.id, Command.attempt, Command.params).where(
            Command.job == job, Command.action == STACKS, Command.state == "sent", Command.expires_unix_ns > now_unix_ns
        )
    )
    return Orders(
        orders=tuple(order.wire() for order in current_orders(connection, job, now_unix_ns - CLOSED_NS)),
        resume=ResumeAdvice(job, advice.id, advice.location, advice.step) if advice else ResumeAdvice(job),
        stacks=tuple(StackRequest(row.id, row.attempt, tuple(row.params.get("ranks", ()))) for row in stacks),
        proven=proven.id if proven else "",
        traces=traces.requests(connection, job, now_unix_ns),
    )


def _resume(connection: Connection, job: str, entries: list[LedgerEntry]) -> LedgerEntry | None:
    """The checkpoint that the next launch goes on from; None: it begins from scratch.

    What was requested with the newest relaunch holds until the next launch has begun.
    """
    newest = (
        select(OrderRow.attempt, OrderRow.checkpoint, Command.params)
        .join(Command, Command.id == OrderRow.command_id)
        .where(OrderRow.job == job, OrderRow.action == Action.RELAUNCH, Command.state != "failed")
    )
    order = connection.execute(newest.order_by(OrderRow.phase_unix_ns.desc()).limit(1)).one_or_none()
    attempt = connection.scalar(select(Job.attempt).where(Job.name == job))
    if order is not None and attempt is not None and launch_of(order.attempt) == launch_of(attempt):
        if order.params.get(FROM_SCRATCH):
            return None
        chosen = (entry for entry in entries if entry.id == order.checkpoint and entry.verdict in USABLE)
        return next(chosen, None) or resumed_from(entries)
    return resumed_from(entries)
