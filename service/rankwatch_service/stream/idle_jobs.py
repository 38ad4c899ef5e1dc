"""Jobs that rest are put away: one row each instead of memory and of snapshots, until they are heard of again.

Nothing changes about a resting job but by its own records and control records, so where it is kept decides nothing.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Engine, delete, select

from rankwatch_service.store.engine import read
from rankwatch_service.store.models import RestingJob, Snapshot
from rankwatch_service.store.upsert import upsert
from rankwatch_service.stream.commit import Place
from rankwatch_service.stream.packing import checksum, pack, unpack
from rankwatch_service.stream.snapshots import VERSION, Saved


def put_away(connection: Connection, partition: int, job: str, place: Place, state: Any, now_unix_ns: int) -> None:
    """Write down a job in place of its snapshots. `place` must be committed already."""
    data = pack(state)
    row = {"partition": partition, **asdict(place), "version": VERSION, "checksum": checksum(data), "data": data}
    row |= {"job": job, "at_unix_ns": now_unix_ns}
    connection.execute(upsert(connection, RestingJob, row), row)
    connection.execute(delete(Snapshot).where(Snapshot.partition == partition, Snapshot.job == job))


def places(engine: Engine, partition: int, begin: int, up_to: Place) -> dict[str, Place]:
    """Since when each job that a partition put away has been resting; it may have been heard of since.

    Args:
        engine: the store.
        partition: whose.
        begin: position of the oldest record that the log still has, if it lacks any that may be needed; else 0.
        up_to: what is committed: a row beyond it is of another life.
    """
    columns = (RestingJob.position, RestingJob.tick_number, RestingJob.control_position)
    mine = (RestingJob.partition == partition, RestingJob.position >= begin)
    with read(engine) as connection:
        rows = connection.execute(select(RestingJob.job, *columns).where(*mine))
        found = {job: Place(*place) for job, *place in rows}
    return {
        job: at for job, at in found.items() if at.position <= up_to.position and at.tick_number <= up_to.tick_number
    }


def recalled(engine: Engine, partition: int, job: str) -> Saved:
    """A job that a partition put away, as it was.

    Raises:
        ValueError: it cannot be read any more.
    """
    mine = (RestingJob.partition == partition, RestingJob.job == job)
    with read(engine) as connection:
        row = connection.execute(select(RestingJob.__table__).where(*mine)).one_or_none()
    if row is None or row.version != VERSION or checksum(row.data) != row.checksum:
        raise ValueError(f"what was put away of job {job!r} is gone, damaged, or of another version")
    return Saved(job, Place(row.position, row.tick_number, row.control_position), unpack(row.data))
