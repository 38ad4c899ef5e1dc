"""Dead letters: records that could not be used, kept with the reason."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, delete, func, insert, select

from rankwatch_service.store.models import DeadLetter

VALUE_BYTES_MAX: Final = 64 * 1024
"""Bytes kept of each value, which is enough to see what it was."""

ROWS_MAX: Final = 2_000
"""The newest are kept: 2,000 x 64 KB = 128 MB at most, so that invalid data cannot fill the disk."""


def keep(connection: Connection, source: str, reason: str, detail: str, value: bytes, at_unix_ns: int) -> None:
    """Store one dead letter, and delete the oldest beyond `ROWS_MAX`.

    Args:
        connection: of a write transaction.
        source: who refused it: api or stream.
        reason: one of `telemetry.envelope.Reason`, for counting.
        detail: one sentence for a person.
        value: the record as it came; cut at `VALUE_BYTES_MAX`.
        at_unix_ns: when it was refused.
    """
    connection.execute(
        insert(DeadLetter).values(
            source=source, reason=reason, detail=detail, value=value[:VALUE_BYTES_MAX], at_unix_ns=at_unix_ns
        )
    )
    newest = connection.scalar(select(func.max(DeadLetter.id))) or 0
    connection.execute(delete(DeadLetter).where(DeadLetter.id <= newest - ROWS_MAX))
