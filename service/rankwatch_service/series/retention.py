"""Removes series that are too old or too many, oldest first. Raw chunks and roll-ups have limits of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, Engine, delete, func, select, tuple_

from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import read, write_aside
from rankwatch_service.store.models import SeriesChunk, SeriesRollup

TRIM_ROWS: Final = 500
"""Rows removed in one transaction."""

PASS_ROWS: Final = 20_000
"""Rows removed in one pass, which takes about a second; the next pass goes on."""


@dataclass(frozen=True, slots=True)
class Tier:
    """The limits of one tier, of which the first that is reached counts."""

    keep_ns: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Rows that one pass removed."""

    chunks: int
    rollups: int


def tiers(settings: Settings) -> tuple[Tier, Tier]:
    """The limits of raw chunks and of roll-ups."""
    raw = Tier(settings.series_raw_hours * 3_600 * 10**9, settings.series_raw_bytes)
    return raw, Tier(settings.series_rollup_days * 86_400 * 10**9, settings.series_rollup_bytes)


def trim(engine: Engine, raw: Tier, rolled: Tier, now_unix_ns: int) -> Trimmed:
    """Remove what is beyond the limits, up to `PASS_ROWS` of each tier. A row's age counts from its last write."""
    chunks = _trimmed(engine, SeriesChunk, raw, now_unix_ns)
    return Trimmed(chunks, _trimmed(engine, SeriesRollup, rolled, now_unix_ns))


def kept_bytes(connection: Connection) -> tuple[int, int]:
    """Bytes of raw chunks and of roll-ups, without the overhead of rows."""
    raw, rolled = (connection.scalar(select(func.sum(model.size_bytes))) for model in (SeriesChunk, SeriesRollup))
    return int(raw or 0), int(rolled or 0)


def _trimmed(engine: Engine, model: type[SeriesChunk | SeriesRollup], tier: Tier, now_unix_ns: int) -> int:
    keys = list(model.__table__.primary_key)
    with read(engine) as connection:
        raw, rolled = kept_bytes(connection)
    excess = (raw if model is SeriesChunk else rolled) - tier.bytes_max
    gone = 0
    while gone < PASS_ROWS:
        with read(engine) as connection:
            oldest = connection.execute(
                select(*keys, model.at_unix_ns, model.size_bytes).order_by(model.at_unix_ns).limit(TRIM_ROWS)
            ).all()
        leaving = []
        for *key, at_unix_ns, size_bytes in oldest:
            if excess <= 0 and at_unix_ns >= now_unix_ns - tier.keep_ns:
                break
            excess -= size_bytes
            leaving.append(tuple(key))
        if not leaving:
            break
        # Sorted: `write_aside` asks for rows in the order of their keys.
        with write_aside(engine) as connection:
            connection.execute(delete(model).where(tuple_(*keys).in_(sorted(leaving))))
        gone += len(leaving)
    return gone
