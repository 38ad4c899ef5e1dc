"""Idle jobs: one row each instead of memory and snapshots, until a record or a control record concerns them.

Only such records change an idle job, so eviction changes no decision.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Engine, delete, select

from rankwatch_service.store.engine import read
from rankwatch_service.store.models import RestingJob, Snapshot
from rankwatch_service.store.upsert import upsert
from rankwatch_service.stream.place import Place, Saved
from rankwatch_service.stream.saved.packing import checksum, pack, unpack
from rankwatch_service.stream.saved.snapshots import VERSION


def evict(connection: Connection, partition: int, job: str, place: Place, state: Any, now_unix_ns: int) -> None:
    """Write the row of a job and delete its snapshots. `place` must be committed already."""
    data = pack(state)
    row = {"partition": partition, **asdict(place), "version": VERSION, "checksum": checksum(data), "data": data}
    row |= {"job": job, "at_unix_ns": now_unix_ns}
    connection.execute(upsert(connection, RestingJob, row), row)
    connection.execute(delete(Snapshot).where(Snapshot.partition == partition, Snapshot.job == job))


def places(engine: Engine, partition: int) -> dict[str, Place]:
    """By name, the places of the rows of idle jobs. A job may have come back after its row was written."""
    columns = (RestingJob.position, RestingJob.tick_number, RestingJob.control_position)
    with read(engine) as connection:
        rows = connection.execute(select(RestingJob.job, *columns).where(RestingJob.partition == partition))
        return {job: Place(*place) for job, *place in rows}


def load(engine: Engine, partition: int, job: str) -> Saved:
    """The state of an idle job at its eviction.

    Raises:
        ValueError: its row is missing, damaged, or of another version.
    """
    mine = (RestingJob.partition == partition, RestingJob.job == job)
    with read(engine) as connection:
        row = connection.execute(select(RestingJob.__table__).where(*mine)).one_or_none()
    if row is None or row.version != VERSION or checksum(row.data) != row.checksum:
        raise ValueError(f"the row of the idle job {job!r} is missing, damaged, or of another version")
    return Saved(job, Place(row.position, row.tick_number, row.control_position), unpack(row.data))
