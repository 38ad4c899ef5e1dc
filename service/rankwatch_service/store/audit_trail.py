"""The audit trail: append-only, each row chained to the one before by its hash.

A row says who did what to what, from where, and with which result. Refused requests have one row for each minute,
address and token, with their number (`access.refusals`). Changing or removing a row breaks the chain from there on, and
`verify` names the first row that does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

from sqlalchemy import Connection, insert, select

from rankwatch_service.store.engine import in_turn
from rankwatch_service.store.models import Audit

FIRST: Final = "0" * 64
"""The predecessor that the first row names."""


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


def verify(connection: Connection) -> int | None:
    """Check the chain from its start. Return the id of the first row that breaks it, None if there is none."""
    previous = FIRST
    for row in connection.execute(select(Audit.__table__).order_by(Audit.id)).mappings():
        content = {key: row[key] for key in row if key not in ("id", "sha256")}
        if row["previous_sha256"] != previous or row["sha256"] != _digest(content):
            return int(row["id"])
        previous = row["sha256"]
    return None


def _digest(row: Mapping[str, Any]) -> str:
    # A fixed form, since `verify` must compute the same hash from the row that the database returns.
    return sha256(json.dumps(row, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
