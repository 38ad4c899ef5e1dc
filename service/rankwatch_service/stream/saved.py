"""What the store keeps of partitions and jobs for a later start: owners, ticks, snapshots, idle jobs and grants.

Who may commit a partition: the process that claimed it last.

A claim raises the partition's epoch, and every commit names the epoch of its claim. A process that was replaced, and
does not know it yet, commits nothing.

Snapshots of jobs: they make a start quick and decide nothing.

A snapshot counts once its last part and its checksum are stored. Two are kept of each job, and both logs from the older
of them on. The newest is the one with the furthest place, not the latest time, because a process may still be writing
one when another takes its partition over.

Idle jobs: one row each instead of memory and snapshots, until a record or a control record concerns them.

Only such records change an idle job, so eviction changes no decision.

Grants in the store: what jobs were allowed, and at which record. A replay allows the same at the same records.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from enum import Enum
from hashlib import sha256
from typing import Any, Final

import msgspec
import numpy as np
import zstandard
from sqlalchemy import Connection, Engine, delete, func, insert, select, update

from rankwatch_service.job.admission import Grant
from rankwatch_service.job.device_boards import DeviceBoards, DeviceNumber
from rankwatch_service.job.job import JobStream
from rankwatch_service.log.base import Claim, Control, Controls, Offsets, Saved, StoredTick, earliest
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.orders.running_attempt import checkpoints
from rankwatch_service.policy.checkpoint_ledger import Ledger
from rankwatch_service.policy.control_records import JobOwnership
from rankwatch_service.store.engine import read, upsert, write_aside
from rankwatch_service.store.models import Attempt as AttemptRow
from rankwatch_service.store.models import (
    IdleJob,
    JobDevice,
    JobHostDevice,
    Snapshot,
    SnapshotChunk,
    StreamGrant,
    StreamPosition,
    StreamTick,
)
from rankwatch_service.store.models import Incident as IncidentRow
from rankwatch_service.store.models import Job as JobRow
from rankwatch_service.store.models import JobOwnership as OwnershipRow
from rankwatch_service.store.rows import incident_of
from rankwatch_service.stream.partition import CONTROLS_MAX


class FencedError(Exception):
    """Another process has taken over this partition: nothing was committed, and nothing may be."""


def claim(connection: Connection, partition: int) -> Claim:
    """Take over a partition, in a write transaction; its previous owner can commit nothing more."""
    # Writers take turns, so no other process can insert the row after it was not found here.
    row = connection.execute(select(StreamPosition.__table__).filter_by(partition=partition)).one_or_none()
    if row is None:
        connection.execute(insert(StreamPosition).values(partition=partition, position=0, tick_number=0, epoch=1))
        return Claim(Offsets(0, 0, 0), 1, 0, 0)
    taken = update(StreamPosition).where(StreamPosition.partition == partition).values(epoch=row.epoch + 1)
    connection.execute(taken)
    offsets = Offsets(row.position, row.tick_number, row.control_position)
    return Claim(offsets, row.epoch + 1, row.position_needed, row.control_needed)


def own(connection: Connection, partition: int, epoch: int, **columns: int) -> None:
    """Set columns of a partition's row in `stream_position`, as its owner; without columns, only check who owns it.

    Raises:
        FencedError: another process has taken it over; the caller must not commit the transaction.
    """
    mine = (StreamPosition.partition == partition, StreamPosition.epoch == epoch)
    # The epoch is set to what it is, because an UPDATE needs a column.
    if connection.execute(update(StreamPosition).where(*mine).values(columns | {"epoch": epoch})).rowcount != 1:
        raise FencedError(f"partition {partition} was taken over by another process")


def stored_ticks(engine: Engine, partition: int, begin: Offsets, committed: Offsets) -> tuple[deque[StoredTick], int]:
    """The ticks after `begin` up to `committed`, and the time before the first of them; 0 if it is not known."""
    with read(engine) as connection:
        rows = connection.execute(
            select(StreamTick.number, StreamTick.position, StreamTick.control_position, StreamTick.time_unix_ns)
            .where(
                StreamTick.partition == partition,
                StreamTick.number >= begin.tick_number,
                StreamTick.number <= committed.tick_number,
            )
            .order_by(StreamTick.number)
        )
        ticks = deque(StoredTick(*row) for row in rows)
    # The tick at `begin` is processed already: a replay needs its time alone.
    if ticks and ticks[0].number == begin.tick_number:
        return ticks, ticks.popleft().time_unix_ns
    return ticks, 0


def applied_controls(
    controls: Controls, concerns: Callable[[Control], bool], begin: Offsets, committed: Offsets
) -> deque[Control]:
    """The control records applied since `begin` that concern the partition: few, between two snapshots."""
    applied: deque[Control] = deque()
    position = begin.control_position
    while position < committed.control_position and (found := controls.read(position, CONTROLS_MAX)):
        position = found[-1].position + 1
        applied.extend(c for c in found if c.position < committed.control_position and concerns(c))
    return applied


_ARRAY: Final = 1
_LEVEL: Final = 1  # a 64 MB state takes 0.2 s at level 1, and 0.7 s at level 3 for a tenth less


def pack(state: Any) -> bytes:
    """Encode a state of JSON types, bytes and arrays."""
    encoded = msgspec.msgpack.encode(state, enc_hook=_encode)
    return zstandard.ZstdCompressor(level=_LEVEL).compress(encoded)


def unpack(data: bytes) -> Any:
    """Decode what `pack` encoded; tuples come back as lists.

    Raises:
        ValueError: the bytes are not a packed state.
    """
    try:
        encoded = zstandard.ZstdDecompressor().decompress(data)
        return msgspec.msgpack.Decoder(ext_hook=_decode).decode(encoded)
    except (zstandard.ZstdError, msgspec.MsgspecError, TypeError) as error:
        raise ValueError(f"not a packed state: {error}") from error


def checksum(data: bytes) -> str:
    """The checksum that is stored with a snapshot."""
    return sha256(data).hexdigest()


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        header = [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(header))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"a state cannot hold {type(value).__name__}")


def _decode(code: int, data: memoryview) -> Any:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    dtype, shape, raw = msgspec.msgpack.decode(data)
    return np.frombuffer(raw, np.dtype(dtype)).reshape(shape).copy()  # without it the array would be read-only


VERSION: Final = "4"
"""Version of the stream's own state; versions of detectors are in it. Raised when older states cannot be read."""

CHUNK_BYTES: Final = 1024 * 1024
"""Written in one transaction. It takes 5 ms, so no other writer waits longer for it."""

ANYWHERE: Final = Offsets(2**62, 2**62, 2**62)
"""No place is beyond it: those of another partition cannot be compared with those of this one."""

KEPT: Final = 2
"""Complete snapshots kept of each job: one may turn out to be unreadable."""


def save_snapshot(
    engine: Engine, partition: int, epoch: int, job: str, offsets: Offsets, state: Any, now_unix_ns: int
) -> None:
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
            **asdict(offsets),
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


def load_snapshots(engine: Engine, partition: int, up_to: Offsets) -> tuple[tuple[Saved, ...], dict[str, Offsets]]:
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
            unreadable[job] = Offsets(rows[-1].position, rows[-1].tick_number, rows[-1].control_position)
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


def needed_from(engine: Engine, partition: int, jobs: Iterable[str]) -> Offsets | None:
    """The place from which both logs and the ticks are kept; None while a job has fewer than `KEPT` snapshots."""
    positions: dict[str, list[Offsets]] = defaultdict(list)
    with read(engine) as connection:
        query = select(Snapshot.job, Snapshot.position, Snapshot.tick_number, Snapshot.control_position)
        for job, *offsets in connection.execute(
            query.where(Snapshot.partition == partition, Snapshot.complete).order_by(
                Snapshot.position, Snapshot.tick_number, Snapshot.id
            )
        ):
            positions[job].append(Offsets(*offsets))
    places = []
    for job in jobs:
        if len(positions[job]) < KEPT:
            return None
        places.append(positions[job][-KEPT])
    if not places:
        return None
    return earliest(places)


def _read(engine: Engine, row: Any, up_to: Offsets) -> Saved | None:
    """The snapshot of a row; None if it is of another version, beyond `up_to`, incomplete or damaged."""
    offsets = Offsets(row.position, row.tick_number, row.control_position)
    if row.version != VERSION or not offsets.is_within(up_to):
        return None
    with read(engine) as connection:
        parts = connection.scalars(
            select(SnapshotChunk.data).where(SnapshotChunk.snapshot_id == row.id).order_by(SnapshotChunk.number)
        ).all()
    data = b"".join(parts)
    if len(parts) != row.chunks or checksum(data) != row.checksum:
        return None
    try:
        return Saved(row.job, offsets, unpack(data))
    except ValueError:
        return None


def store_idle_job(
    connection: Connection, partition: int, job: str, offsets: Offsets, state: Any, now_unix_ns: int
) -> None:
    """Write the row of a job and delete its snapshots. `place` must be committed already."""
    data = pack(state)
    row = {"partition": partition, **asdict(offsets), "version": VERSION, "checksum": checksum(data), "data": data}
    row |= {"job": job, "at_unix_ns": now_unix_ns}
    connection.execute(upsert(connection, IdleJob, row), row)
    connection.execute(delete(Snapshot).where(Snapshot.partition == partition, Snapshot.job == job))


def idle_offsets(engine: Engine, partition: int) -> dict[str, Offsets]:
    """The places of the rows of idle jobs, by name. A job may have come back after its row was written."""
    columns = (IdleJob.position, IdleJob.tick_number, IdleJob.control_position)
    with read(engine) as connection:
        rows = connection.execute(select(IdleJob.job, *columns).where(IdleJob.partition == partition))
        return {job: Offsets(*offsets) for job, *offsets in rows}


def load_idle_job(engine: Engine, partition: int, job: str) -> Saved:
    """The state of an idle job at its eviction.

    Raises:
        ValueError: its row is missing, damaged, or of another version.
    """
    mine = (IdleJob.partition == partition, IdleJob.job == job)
    with read(engine) as connection:
        row = connection.execute(select(IdleJob.__table__).where(*mine)).one_or_none()
    if row is None or row.version != VERSION or checksum(row.data) != row.checksum:
        raise ValueError(f"the row of the idle job {job!r} is missing, damaged, or of another version")
    return Saved(job, Offsets(row.position, row.tick_number, row.control_position), unpack(row.data))


def load_grants(engine: Engine, partition: int) -> dict[tuple[str, int], int]:
    """The grants of a partition that a replay may need: cells by job and position."""
    columns = (StreamGrant.job, StreamGrant.position, StreamGrant.cells)
    with read(engine) as connection:
        rows = connection.execute(select(*columns).where(StreamGrant.partition == partition))
        return {(job, position): cells for job, position, cells in rows}


def store_grants(connection: Connection, partition: int, grants: Iterable[Grant]) -> None:
    """Add grants, in the write transaction that commits the records."""
    rows = [{"partition": partition, **asdict(grant)} for grant in grants]
    if rows:
        connection.execute(insert(StreamGrant), rows)


def trim_grants(connection: Connection, partition: int, position: int) -> None:
    """Remove grants of records below a position."""
    connection.execute(delete(StreamGrant).where(StreamGrant.partition == partition, StreamGrant.position < position))


def restore_from_tables(engine: Engine, job: JobStream) -> None:
    """Restore open incidents, numbering of attempts, and the checkpoint ledger. Detectors begin anew."""
    with read(engine) as connection:
        mine = IncidentRow.job == job.job
        unresolved = select(IncidentRow.__table__).where(mine, IncidentRow.state != "resolved")
        rows = connection.execute(unresolved.order_by(IncidentRow.detected_unix_ns, IncidentRow.id))
        incidents = list(map(incident_of, rows.mappings()))
        episode = connection.scalar(select(func.max(IncidentRow.episode)).where(mine))
        whose = connection.execute(
            select(OwnershipRow.project, OwnershipRow.owner).where(OwnershipRow.job == job.job)
        ).first()
        job.ownership = JobOwnership(job.job, *(whose or ()))
        first_seen = connection.scalar(select(JobRow.first_seen_unix_ns).where(JobRow.name == job.job))
        attempts = select(AttemptRow.attempt, AttemptRow.number).where(AttemptRow.job == job.job)
        newest = connection.execute(attempts.order_by(AttemptRow.number.desc()).limit(1)).one_or_none()
        attempt, attempts_seen = ("", 0) if newest is None else newest
        job.devices = DeviceBoards(_known_devices(connection, job.job))
        job.begin_without_snapshot(first_seen, attempt, attempts_seen)
        job.history.ledger = Ledger(checkpoints(connection, job.job))
    # Ids contain the episode, and episodes of consequences are in no table: begin far above the highest known one.
    job.correlator.restore_open(incidents, attempt, (episode or 0) + 1_000)


def _known_devices(connection: Connection, job: str) -> list[DeviceNumber]:
    """Known devices of each kind, in the order of their numbers."""
    names = ("number", "host", "index", "uuid")
    gpus = select(*(getattr(JobDevice, name) for name in names)).where(JobDevice.job == job)
    others = select(*(getattr(JobHostDevice, name) for name in (*names, "kind"))).where(JobHostDevice.job == job)
    rows = [
        *connection.execute(gpus.order_by(JobDevice.number)).all(),
        *connection.execute(others.order_by(JobHostDevice.number)).all(),
    ]
    return [DeviceNumber(*row) for row in rows]
