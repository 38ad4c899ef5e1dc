"""Snapshots of jobs: they make a start quick and decide nothing.

A snapshot counts once its last part and its checksum are stored. Two are kept of each job, and both logs from the older
of them on. The newest is the one with the furthest place, not the latest time, because a process may still be writing
one when another takes its partition over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, Final

from sqlalchemy import Engine, delete, insert, select, update

from rankwatch_service.names import ALL_JOBS
from rankwatch_service.store.engine import read, write_aside
from rankwatch_service.store.models import Snapshot, SnapshotChunk, StreamPosition
from rankwatch_service.stream.ownership import FencedError
from rankwatch_service.stream.place import Place, Saved, earliest
from rankwatch_service.stream.saved.packing import checksum, pack, unpack

VERSION: Final = "1"
"""Version of the stream's own state; versions of detectors are in it. Raised when older states cannot be read."""

CHUNK_BYTES: Final = 1024 * 1024
"""Written in one transaction. It takes 5 ms, so no other writer waits longer for it."""

ANYWHERE: Final = Place(2**62, 2**62, 2**62)
"""No place is beyond it: those of another partition cannot be compared with those of this one."""

KEPT: Final = 2
"""Complete snapshots kept of each job: one may turn out to be unreadable."""


def save(engine: Engine, partition: int, epoch: int, job: str, place: Place, state: Any, now_unix_ns: int) -> None:
    """Write a snapshot in short transactions, and delete all but the newest `KEPT` of the job.

    `place` must be committed already: a snapshot is never ahead of the database.

    Raises:
        FencedError: another process has taken over the partition.
    """
    data = pack(state)
    parts = [data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)]
    with write_aside(engine) as connection:
        begun = insert(Snapshot).values(
            partition=partition,
            job=job,
            **asdict(place),
            version=VERSION,
            checksum="",
            chunks=len(parts),
            complete=False,
            at_unix_ns=now_unix_ns,
        )
        snapshot_id = connection.scalar(begun.returning(Snapshot.id))
    for number, part in enumerate(parts):
        with write_aside(engine) as connection:
            connection.execute(insert(SnapshotChunk).values(snapshot_id=snapshot_id, number=number, data=part))
    # Ownership is checked where the snapshot becomes complete: parts of an incomplete one are never read.
    with write_aside(engine) as connection:
        owner = select(StreamPosition.epoch).where(StreamPosition.partition == partition)
        if connection.scalar(owner) != epoch:
            raise FencedError(f"partition {partition} was taken over by another process")
        marker = update(Snapshot).where(Snapshot.id == snapshot_id)
        connection.execute(marker.values(complete=True, checksum=checksum(data)))
        complete = connection.scalars(
            select(Snapshot.id)
            .where(Snapshot.partition == partition, Snapshot.job == job, Snapshot.complete)
            .order_by(Snapshot.position.desc(), Snapshot.tick_number.desc(), Snapshot.id.desc())
        ).all()
        # Incomplete ones go as well: those with a smaller id were begun before this one, and abandoned.
        kept = complete[:KEPT]
        old = (Snapshot.partition == partition, Snapshot.job == job, Snapshot.id.not_in(kept))
        connection.execute(delete(Snapshot).where(*old, Snapshot.id < snapshot_id))


def load(engine: Engine, partition: int, up_to: Place) -> tuple[tuple[Saved, ...], dict[str, Place]]:
    """The newest readable snapshot of each job; and by job, the place of the newest if none is readable.

    Args:
        engine: the store.
        partition: whose snapshots.
        up_to: the committed place. A snapshot beyond it belongs to another database or log, and is not used.
    """
    with read(engine) as connection:
        query = (
            select(Snapshot.__table__)
            .where(Snapshot.partition == partition, Snapshot.complete)
            .order_by(Snapshot.position, Snapshot.tick_number, Snapshot.id)
        )
        by_job: dict[str, list[Any]] = defaultdict(list)
        for row in connection.execute(query):
            by_job[row.job].append(row)
    found, unreadable = [], {}
    for job, rows in by_job.items():
        saved = next((saved for row in reversed(rows) if (saved := _read(engine, row, up_to)) is not None), None)
        if saved is None:
            unreadable[job] = Place(rows[-1].position, rows[-1].tick_number, rows[-1].control_position)
        else:
            found.append(saved)
    return tuple(found), unreadable


def newest_settings(engine: Engine) -> Saved | None:
    """The settings in the newest readable snapshot of any partition; a new partition begins with them.

    Control records from its place on are kept for all partitions.
    """
    with read(engine) as connection:
        query = select(Snapshot.__table__).where(Snapshot.job == ALL_JOBS, Snapshot.complete)
        rows = connection.execute(query.order_by(Snapshot.control_position.desc(), Snapshot.id.desc())).all()
    return next((saved for row in rows if (saved := _read(engine, row, ANYWHERE)) is not None), None)


def newest_of(engine: Engine, job: str) -> tuple[Any, int] | None:
    """The state in a job's newest readable snapshot, and its time; None if there is none, as of an idle job."""
    with read(engine) as connection:
        query = select(Snapshot.__table__).where(Snapshot.job == job, Snapshot.complete)
        rows = connection.execute(query.order_by(Snapshot.id.desc())).all()
    read_ones = ((_read(engine, row, ANYWHERE), row.at_unix_ns) for row in rows)
    return next(((saved.state, at_unix_ns) for saved, at_unix_ns in read_ones if saved is not None), None)


def needed_from(engine: Engine, partition: int, jobs: Iterable[str]) -> Place | None:
    """The place from which both logs and the ticks are kept; None while a job has fewer than `KEPT` snapshots."""
    positions: dict[str, list[Place]] = defaultdict(list)
    with read(engine) as connection:
        query = select(Snapshot.job, Snapshot.position, Snapshot.tick_number, Snapshot.control_position)
        for job, *place in connection.execute(
            query.where(Snapshot.partition == partition, Snapshot.complete).order_by(
                Snapshot.position, Snapshot.tick_number, Snapshot.id
            )
        ):
            positions[job].append(Place(*place))
    places = []
    for job in jobs:
        if len(positions[job]) < KEPT:
            return None
        places.append(positions[job][-KEPT])
    if not places:
        return None
    return earliest(places)


def _read(engine: Engine, row: Any, up_to: Place) -> Saved | None:
    """The snapshot of a row; None if it is of another version, beyond `up_to`, incomplete or damaged."""
    place = Place(row.position, row.tick_number, row.control_position)
    if row.version != VERSION or not place.is_within(up_to):
        return None
    with read(engine) as connection:
        parts = connection.scalars(
            select(SnapshotChunk.data).where(SnapshotChunk.snapshot_id == row.id).order_by(SnapshotChunk.number)
        ).all()
    data = b"".join(parts)
    if len(parts) != row.chunks or checksum(data) != row.checksum:
        return None
    try:
        return Saved(row.job, place, unpack(data))
    except ValueError:
        return None
