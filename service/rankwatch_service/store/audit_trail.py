"""The audit trail: append-only. Each row is also a line `audit` in the service's log.

A row says who did what to what, from where, and with which outcome. Refused requests have one row for each minute,
address and token, with their number (`access.refusals`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import structlog
from sqlalchemy import Connection, Engine, func, insert, select

from rankwatch_service.store.engine import after_commit, read
from rankwatch_service.store.models import Audit

PAGE_ROWS: Final = 1_000
"""Rows read at once, about 0.4 MB."""

_log = structlog.get_logger(__name__)


def append(
    connection: Connection,
    at_unix_ns: int,
    actor: str,
    action: str,
    target: str,
    outcome: str,
    *,
    source: str = "",
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Add a row in the transaction of the change that it describes.

    The line in the log follows the commit. A process that does not log, such as a command, writes none.

    Args:
        connection: of a write.
        at_unix_ns: now.
        actor: a token's id and name, or "policy".
        action: what was done, for instance "command.request".
        target: what it was done to.
        outcome: ok. How a command ended is part of the action's name.
        source: address of the caller.
        fields: plain JSON details; never a secret.
    """
    row: dict[str, Any] = {
        "at_unix_ns": at_unix_ns,
        "actor": actor,
        "source": source,
        "action": action,
        "target": target,
        "outcome": outcome,
        "fields": dict(fields or {}),
    }
    connection.execute(insert(Audit).values(**row))
    if structlog.is_configured():
        after_commit(connection, lambda: _log.info("audit", **row))


def export(engine: Engine, since_unix_ns: int = 0) -> Iterator[dict[str, Any]]:
    """All rows from the first one of this time on, oldest first, with every column. Reads page by page as it goes."""
    with read(engine) as connection:
        first = connection.scalar(select(func.min(Audit.id)).where(Audit.at_unix_ns >= since_unix_ns))
    return iter(()) if first is None else _rows(engine, first)


def _rows(engine: Engine, first: int) -> Iterator[dict[str, Any]]:
    """All rows from this id on."""
    # Rows are never changed, so each page may be read in a transaction of its own.
    query = select(Audit.__table__).order_by(Audit.id).limit(PAGE_ROWS)
    while True:
        with read(engine) as connection:
            page = [dict(row) for row in connection.execute(query.where(Audit.id >= first)).mappings()]
        if not page:
            return
        yield from page
        first = page[-1]["id"] + 1
