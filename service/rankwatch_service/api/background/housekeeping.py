"""What an api process removes from time to time. Every table that grows by itself and is not stream's has its bound.

Stream removes what only it knows to be of no more use: the log, its ticks, the control log, snapshots, series. The
audit trail is kept for good: 300 bytes for each thing that somebody did.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import ColumnElement, Engine, delete, func, inspect, select, tuple_

from rankwatch_service.access.tokens import TokenKind
from rankwatch_service.api.http.idempotency import KEEP_NS
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
    IncidentTransition,
    Outbox,
    Token,
)

_DAY_NS: Final = 86_400 * 10**9

FEED_ROWS_MAX: Final = 50_000
"""What a browser can catch up with: a week of a busy installation, 15 MB."""

VIEW_NS: Final = _DAY_NS
"""Views of attempts that ended longer ago are of no use."""

HISTORY_NS: Final = 90 * _DAY_NS
"""Finished commands (with their orders) and settled notifications (with their deliveries)."""

RECORD_NS: Final = 400 * _DAY_NS
"""What hosts have on their record, and the course of incidents that are over. The incidents themselves stay."""

EXPIRED_NS: Final = 7 * _DAY_NS
"""Expired sessions and login tokens stay in the list of tokens for so long."""

CHUNK_ROWS: Final = 1_000
"""Removed in one transaction, about 10 ms."""

CHUNKS_MAX: Final = 10
"""Of a table at a time, so that nobody waits long; once a minute that is 166 rows a second, three times what 48 busy
jobs tell the feed."""


def tidy(engine: Engine, now_unix_ns: int) -> int:
    """Remove what is past its time, up to `CHUNKS_MAX` chunks of each table; returns how many rows went."""
    with read(engine) as connection:
        newest = connection.scalar(select(func.max(Feed.id))) or 0
    short_lived = Token.kind.in_((TokenKind.SESSION, TokenKind.LOGIN))
    settled = (Outbox.state != "waiting") & (Outbox.created_unix_ns < now_unix_ns - HISTORY_NS)
    ancient = select(Incident.id).where(Incident.resolved_unix_ns < now_unix_ns - RECORD_NS)
    tried = select(Delivery.id).where(Delivery.outbox_id == Outbox.id).exists()
    past: tuple[tuple[type[Base], ColumnElement[bool]], ...] = (
        (Feed, Feed.id <= newest - FEED_ROWS_MAX),
        (IdempotentReply, IdempotentReply.at_unix_ns < now_unix_ns - KEEP_NS),
        (AgentView, AgentView.at_unix_ns < now_unix_ns - VIEW_NS),
        (Token, short_lived & (Token.expires_unix_ns < now_unix_ns - EXPIRED_NS)),
        (Command, Command.finished_unix_ns < now_unix_ns - HISTORY_NS),
        (Delivery, Delivery.outbox_id.in_(select(Outbox.id).where(settled))),
        (Outbox, settled & ~tried),
        (IncidentTransition, IncidentTransition.incident_id.in_(ancient)),
        (HostRecord, HostRecord.at_unix_ns < now_unix_ns - RECORD_NS),
    )
    return sum(_remove(engine, table, where) for table, where in past)


def _remove(engine: Engine, table: type[Base], where: ColumnElement[bool]) -> int:
    key = tuple_(*inspect(table).primary_key)
    # What another api process is removing just now is left to it.
    some = select(*inspect(table).primary_key).where(where).limit(CHUNK_ROWS).with_for_update(skip_locked=True)
    gone = 0
    for _ in range(CHUNKS_MAX):
        with write_aside(engine) as connection:
            count = connection.execute(delete(table).where(key.in_(some))).rowcount
        gone += count
        if count < CHUNK_ROWS:
            break
    return gone
