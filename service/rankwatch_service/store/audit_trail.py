"""The audit trail: append-only, each row chained to the one before by its hash.

A row says who did what to what, from where, and with which result. Refused requests have one row for each minute,
address and token, with their number (`access.refusals`). Changing or removing a row breaks the chain from there on, and
`verify` names the first row that does not fit. A chain that was written anew as a whole, or cut at its end, is found by
comparing it with an export that was kept elsewhere (`verify_export`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Engine, func, insert, select

from rankwatch_service.store.engine import in_turn, read
from rankwatch_service.store.models import Audit

FIRST: Final = "0" * 64
"""The predecessor that the first row names."""

PAGE_ROWS: Final = 1_000
"""Rows read at once, about 0.5 MB."""


class Flaw(NamedTuple):
    """The first row of a chain that does not fit."""

    id: int
    reason: str
    """A sentence about the row, without its subject."""


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

    Args:
        connection: of a `write`.
        at_unix_ns: now.
        actor: a token's id and name, or "policy".
        action: what was done, for instance "command.request".
        target: what it was done to.
        outcome: ok. How a command ended is part of the action's name.
        source: address of the caller.
        fields: plain JSON details; never a secret.
    """
    assert in_turn(connection), "two rows would name the same predecessor"
    newest = connection.execute(select(Audit.sha256).order_by(Audit.id.desc()).limit(1)).scalar()
    row: dict[str, Any] = {
        "at_unix_ns": at_unix_ns,
        "actor": actor,
        "source": source,
        "action": action,
        "target": target,
        "outcome": outcome,
        "fields": dict(fields or {}),
        "previous_sha256": newest or FIRST,
    }
    connection.execute(insert(Audit).values(**row, sha256=_digest(row)))


def export(engine: Engine, since_unix_ns: int = 0) -> Iterator[dict[str, Any]]:
    """All rows from the first one of this time on, oldest first, with every column. Reads page by page as it goes."""
    with read(engine) as connection:
        first = connection.scalar(select(func.min(Audit.id)).where(Audit.at_unix_ns >= since_unix_ns))
    return iter(()) if first is None else _rows(engine, first)


def verify(engine: Engine) -> Flaw | None:
    """Check the chain from its start; None: it is whole."""
    previous = FIRST
    for row in export(engine):
        if flaw := _flaw(row, previous):
            return flaw
        previous = row["sha256"]
    return None


def verify_export(rows: Iterable[Mapping[str, Any]], engine: Engine | None) -> Flaw | None:
    """Check exported rows: that they are one chain, and that the database has each of them as it is; None: they do.

    Args:
        rows: as `export` returned them. They may begin in the middle of the chain.
        engine: of the database, whose own chain is checked as well; None: the rows are not compared with one.
    """
    previous = ""
    stored: Iterator[dict[str, Any]] = iter(())
    for row in rows:
        if not previous:
            previous = row["previous_sha256"]
            stored = stored if engine is None else _rows(engine, row["id"])
        if flaw := _flaw(row, previous):
            return flaw
        if engine is not None and next(stored, None) != row:
            return Flaw(row["id"], "is not in the database as it was exported")
        previous = row["sha256"]
    return None if engine is None else verify(engine)


def exported_rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The rows of an export in JSON lines.

    Raises:
        ValueError: a line is not a row of the audit trail, or there is none.
    """
    columns, number = set(Audit.__table__.columns.keys()), 0
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or row.keys() != columns or not isinstance(row["id"], int):
            raise ValueError(f"line {number} is not a row of the audit trail")
        yield row
    if not number:
        raise ValueError("it has no row of the audit trail")


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


def _flaw(row: Mapping[str, Any], previous: str) -> Flaw | None:
    if row["previous_sha256"] != previous:
        return Flaw(row["id"], "does not follow the row before it")
    if row["sha256"] != _digest({key: row[key] for key in row if key not in ("id", "sha256")}):
        return Flaw(row["id"], "was changed: its hash is another one")
    return None


def _digest(row: Mapping[str, Any]) -> str:
    # A fixed form, since `verify` must compute the same hash from the row that the database returns.
    return sha256(json.dumps(row, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
