"""Grants in the store: what jobs were allowed, and at which record. A replay allows the same at the same records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from sqlalchemy import Connection, Engine, delete, insert, select

from rankwatch_service.job.allowance import Grant
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import StreamGrant
from rankwatch_service.stream.place import Granted


def load(engine: Engine, partition: int) -> Granted:
    """The grants of a partition that a replay may need."""
    columns = (StreamGrant.job, StreamGrant.position, StreamGrant.cells)
    with read(engine) as connection:
        rows = connection.execute(select(*columns).where(StreamGrant.partition == partition))
        cells = {(job, position): cells for job, position, cells in rows}
    return Granted(cells)


def store(connection: Connection, partition: int, grants: Iterable[Grant]) -> None:
    """Add grants, in the write transaction that commits the records."""
    rows = [{"partition": partition, **asdict(grant)} for grant in grants]
    if rows:
        connection.execute(insert(StreamGrant), rows)


def trim(connection: Connection, partition: int, position: int) -> None:
    """Remove grants of records below a position."""
    connection.execute(delete(StreamGrant).where(StreamGrant.partition == partition, StreamGrant.position < position))
