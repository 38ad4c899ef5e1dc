"""What agents of a job need to know now: open orders, stacks, traces, the proven checkpoint, the relaunch advice."""

from __future__ import annotations

from typing import Final

import msgspec
from sqlalchemy import Connection, Engine, select

from rankwatch.wire import Orders, ResumeAdvice, StackRequest
from rankwatch_service.clock import Clock
from rankwatch_service.incidents.model import STACKS
from rankwatch_service.names import launch_of
from rankwatch_service.orders import traces
from rankwatch_service.orders.driver import current_orders
from rankwatch_service.orders.running_attempt import checkpoints
from rankwatch_service.policy.checkpoint_ledger import CheckpointTier, LedgerEntry, newest_good
from rankwatch_service.policy.command import FROM_SCRATCH
from rankwatch_service.policy.policy import Action
from rankwatch_service.policy.rollback import USABLE, resumed_from
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Command, Job
from rankwatch_service.store.models import Order as OrderRow

CLOSED_NS: Final = 10 * 10**9
"""How long a closed order is still sent, so that agents clear its slots; event streams resend everything that often."""

JOBS_MAX: Final = 4_096
"""Jobs in the cache; one entry serves all hosts of a job until the database changes."""

_ENCODER: Final = msgspec.json.Encoder()


class OrderCache:
    """Caches the orders of each job until the database changes. Thread-safe: a race costs one extra query."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._cache: dict[str, tuple[int, bytes]] = {}

    def orders(self, job: str, generation: int) -> bytes:
        """`wire.Orders` of a job as JSON, as of a generation of the database (`ChangeFeed.generation`)."""
        entry = self._cache.get(job)
        if entry is not None and entry[0] == generation:
            return entry[1]
        with read(self._engine) as connection:
            body = _ENCODER.encode(orders_of(connection, job, self._clock.unix_ns()))
        if len(self._cache) >= JOBS_MAX:
            self._cache.clear()
        self._cache[job] = (generation, body)
        return body


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
