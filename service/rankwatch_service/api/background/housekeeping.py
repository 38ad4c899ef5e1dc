"""Retention: the rows that an api process removes every minute. Every table that grows has a limit here or in stream.

Stream trims the log, its ticks, the control log, snapshots and series, since it knows which of them a start still
needs. The audit trail is kept for ever, at 200 bytes for each action.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import ColumnElement, Engine, delete, func, inspect, select, tuple_

from rankwatch_service.access.tokens import TokenKind
from rankwatch_service.store.engine import read, write_aside
from rankwatch_service.store.models import (
    AgentView,
    Base,
    Command,
    Delivery,
    Feed,
    HostRecord,
    IdempotentReply,
    Incident,
    IncidentFeedback,
    IncidentTransition,
    Outbox,
    Token,
)

_DAY_NS: Final = 86_400 * 10**9

FEED_ROWS_MAX: Final = 50_000
"""Rows that a browser can catch up with: a week of a busy installation, 15 MB."""

VIEW_NS: Final = _DAY_NS
"""Age at which the last view of a host is removed; its attempt ended long before."""

REPLY_NS: Final = _DAY_NS
"""How long the reply to an `Idempotency-Key` is kept."""

HISTORY_NS: Final = 90 * _DAY_NS
"""Finished commands (with their orders) and settled notifications (with their deliveries)."""

RECORD_NS: Final = 400 * _DAY_NS
"""Records of hosts, and transitions and feedback of resolved incidents. The incidents themselves are kept."""

EXPIRED_NS: Final = 7 * _DAY_NS
"""How long expired sessions and login tokens stay in the list of tokens."""

CHUNK_ROWS: Final = 1_000
"""Rows removed in one transaction, about 10 ms."""

CHUNKS_MAX: Final = 10
"""Chunks of one table in one run, so that other writers wait only briefly. Once a minute this is 166 rows/s, three
times what 48 busy jobs write to the feed."""


def remove_expired(engine: Engine, now_unix_ns: int) -> int:
    """Remove expired rows, at most `CHUNKS_MAX` chunks of each table; return how many were removed."""
    with read(engine) as connection:
        newest = connection.scalar(select(func.max(Feed.id))) or 0
    short_lived = Token.kind.in_((TokenKind.SESSION, TokenKind.LOGIN))
    settled = (Outbox.state != "waiting") & (Outbox.created_unix_ns < now_unix_ns - HISTORY_NS)
    ancient = select(Incident.id).where(Incident.resolved_unix_ns < now_unix_ns - RECORD_NS)
    tried = select(Delivery.id).where(Delivery.outbox_id == Outbox.id).exists()
    expired: tuple[tuple[type[Base], ColumnElement[bool]], ...] = (
        (Feed, Feed.id <= newest - FEED_ROWS_MAX),
        (IdempotentReply, IdempotentReply.at_unix_ns < now_unix_ns - REPLY_NS),
        (AgentView, AgentView.at_unix_ns < now_unix_ns - VIEW_NS),
        (Token, short_lived & (Token.expires_unix_ns < now_unix_ns - EXPIRED_NS)),
        (Command, Command.finished_unix_ns < now_unix_ns - HISTORY_NS),
        (Delivery, Delivery.outbox_id.in_(select(Outbox.id).where(settled))),
        (Outbox, settled & ~tried),
        (IncidentTransition, IncidentTransition.incident_id.in_(ancient)),
        (IncidentFeedback, IncidentFeedback.incident_id.in_(ancient)),
        (HostRecord, HostRecord.at_unix_ns < now_unix_ns - RECORD_NS),
    )
    return sum(_remove(engine, table, where) for table, where in expired)


def _remove(engine: Engine, table: type[Base], where: ColumnElement[bool]) -> int:
    key = tuple_(*inspect(table).primary_key)
    # Skip the rows that another api process is removing now.
    some = select(*inspect(table).primary_key).where(where).limit(CHUNK_ROWS).with_for_update(skip_locked=True)
    removed = 0
    for _ in range(CHUNKS_MAX):
        with write_aside(engine) as connection:
            count = connection.execute(delete(table).where(key.in_(some))).rowcount
        removed += count
        if count < CHUNK_ROWS:
            break
    return removed
