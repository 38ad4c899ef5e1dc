"""What stream reads, how far it has come, and what it cannot use: logs, positions, ticks, snapshots."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from rankwatch_service.store.models.base import AutoId, Base


class LogPartition(Base):
    """Where the next record of a partition goes. Its row lock puts appends in order of their positions."""

    __tablename__ = "log_partition"
    partition: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    next_position: Mapped[int]


class LogRecord(Base):
    """One record of the SQL log."""

    __tablename__ = "log_record"
    partition: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    key: Mapped[str]
    """The job's name."""
    value: Mapped[bytes]
    """A wire.Batch as msgpack."""
    appended_unix_ns: Mapped[int]


class ControlEnd(Base):
    """One row: where the next control record goes. Its lock puts appends in order of their positions."""

    __tablename__ = "control_end"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    next_position: Mapped[int]


class ControlRecord(Base):
    """One record of the control log: orders' phases, acknowledgements, silences, settings."""

    __tablename__ = "control_record"
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    key: Mapped[str]
    """The job's name, or "*"."""
    value: Mapped[bytes]
    """A policy.control_records.ControlRecord as JSON."""
    appended_unix_ns: Mapped[int]


class DeadLetter(Base):
    """A record that could not be used, with the reason."""

    __tablename__ = "dead_letter"
    id: Mapped[int] = mapped_column(AutoId, primary_key=True, autoincrement=True)
    source: Mapped[str]
    reason: Mapped[str]
    detail: Mapped[str]
    value: Mapped[bytes]
    at_unix_ns: Mapped[int]


class StreamPosition(Base):
    """How far stream has committed in a partition."""

    __tablename__ = "stream_position"
    partition: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    position: Mapped[int]
    tick_number: Mapped[int]
    control_position: Mapped[int] = mapped_column(default=0)
    """Control records below it are applied."""
    position_needed: Mapped[int] = mapped_column(default=0)
    control_needed: Mapped[int] = mapped_column(default=0)
    """No start of this partition needs records of the two logs below these positions."""
    epoch: Mapped[int] = mapped_column(default=0)
    """Raised by each process that takes the partition over; only the last one can commit."""


class StreamGrant(Base):
    """A job was allowed more cells when this record was processed (`job.admission.CellQuota`)."""

    __tablename__ = "stream_grant"
    partition: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    position: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    job: Mapped[str]
    cells: Mapped[int]


class StreamReport(Base):
    """The last report of a partition's owner: for people and metrics only, no decision depends on it."""

    __tablename__ = "stream_report"
    partition: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    owner: Mapped[str]
    """HOST:PID of the process."""
    epoch: Mapped[int]
    position: Mapped[int]
    end: Mapped[int]
    """Position of the next record to be appended, as far as known: `end` - `position` is the lag."""
    tick_unix_ns: Mapped[int]
    """Time of the newest tick; it stands still while no job is active."""
    lost_records: Mapped[int]
    """Records that the log had removed before this owner could read them."""
    at_unix_ns: Mapped[int]


class StreamProcess(Base):
    """The last report of a stream process."""

    __tablename__ = "stream_process"
    owner: Mapped[str] = mapped_column(primary_key=True)
    started_unix_ns: Mapped[int]
    counters: Mapped[dict[str, Any]]
    """{name: count since the process began}, see `stream.process.Reporter`."""
    at_unix_ns: Mapped[int]


class StreamTick(Base):
    """One stored clock tick.

    Before the record at `position` the time was `time_unix_ns`, and the control records below `control_position` had
    been applied.
    """

    __tablename__ = "stream_tick"
    partition: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    position: Mapped[int]
    control_position: Mapped[int] = mapped_column(default=0)
    time_unix_ns: Mapped[int]


class Snapshot(Base):
    """A trailing snapshot of one job's stream state; valid once `complete`."""

    __tablename__ = "snapshot"
    id: Mapped[int] = mapped_column(AutoId, primary_key=True, autoincrement=True)
    partition: Mapped[int]
    job: Mapped[str]
    position: Mapped[int]
    tick_number: Mapped[int]
    control_position: Mapped[int] = mapped_column(default=0)
    version: Mapped[str]
    checksum: Mapped[str] = mapped_column(default="")
    chunks: Mapped[int] = mapped_column(default=0)
    complete: Mapped[bool] = mapped_column(default=False)
    at_unix_ns: Mapped[int]


class SnapshotChunk(Base):
    """A piece (<= 1 MB) of a snapshot."""

    __tablename__ = "snapshot_chunk"
    snapshot_id: Mapped[int] = mapped_column(ForeignKey("snapshot.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    data: Mapped[bytes]


class IdleJob(Base):
    """The stream's state of an idle job, which continues from here when it sends again."""

    __tablename__ = "resting_job"
    job: Mapped[str] = mapped_column(primary_key=True)
    partition: Mapped[int]
    """The partition that evicted it."""
    position: Mapped[int]
    tick_number: Mapped[int]
    control_position: Mapped[int]
    """The state contains what came before these positions; after them, only its own next record can change it."""
    version: Mapped[str]
    checksum: Mapped[str]
    data: Mapped[bytes]
    at_unix_ns: Mapped[int]
