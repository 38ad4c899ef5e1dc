"""Jobs, their attempts, and the values of their ranks."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Index
from sqlalchemy.orm import Mapped, mapped_column

from rankwatch_service.store.models.base import Base, Measured


class Job(Base):
    """A logical training run."""

    __tablename__ = "job"
    name: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    """running, stalled (no step is finished), paused, log_not_understood, lost (no telemetry), ended."""
    attempt: Mapped[str]
    world_size: Mapped[int]
    ranks_reporting: Mapped[int]
    step: Mapped[int]
    step_time_s: Mapped[float | None]
    loss: Mapped[float | None] = mapped_column(Measured)
    first_seen_unix_ns: Mapped[int]
    last_seen_unix_ns: Mapped[int]
    last_progress_unix_ns: Mapped[int | None]
    """When the newest step was finished on all ranks; null before the first."""
    dropped: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """Records and batches that did not reach detection, counted by reason, those that agents lost included."""
    configuration: Mapped[list[Any]] = mapped_column(default=list)
    """The newest changes of the configuration, oldest first: {what, step, unix_ns}."""
    accelerated: Mapped[bool] = mapped_column(default=True)
    """An hour of a rank is one of a GPU or another device; true while nothing is known of its ranks."""


class JobOwnership(Base):
    """Project and owner of a job. The row may precede the job's first telemetry; without one, none are assigned."""

    __tablename__ = "job_project"
    job: Mapped[str] = mapped_column(primary_key=True)
    project: Mapped[str] = mapped_column(index=True)
    """Empty: none; the same for owner."""
    owner: Mapped[str]


class Attempt(Base):
    """One stretch of training."""

    __tablename__ = "attempt"
    job: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[str] = mapped_column(primary_key=True)
    started_unix_ns: Mapped[int]
    ended_unix_ns: Mapped[int | None]
    world_size: Mapped[int]
    first_step: Mapped[int | None]
    last_step: Mapped[int | None]
    topology: Mapped[dict[str, Any]]
    """{"ranks": [{rank, host, device_type, device_uuid, local_rank, pid, dp, tp, pp, cp, ep, switch}], "can": [...],
    "replicated": bool, "watched": str}"""
    number: Mapped[int]
    """Order of attempts within the job, from 1."""


class JobDevice(Base):
    """A GPU of a job's hosts, whose counters are series."""

    __tablename__ = "job_device"
    job: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Its index in the series of the job's GPUs."""
    host: Mapped[str]
    index: Mapped[int]
    """On its host, in the driver's order; not an ordinal of CUDA."""
    uuid: Mapped[str]
    """Empty where the driver does not report it."""


class JobHostDevice(Base):
    """A network port of a job's hosts, or a host as a whole, whose counters are series."""

    __tablename__ = "job_host_device"
    job: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    """port or host (`wire.DEVICE_KINDS`)."""
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """Its index in the series of the job's devices of this kind."""
    host: Mapped[str] = mapped_column(index=True)
    index: Mapped[int]
    uuid: Mapped[str]
    """UUID of a GPU, name of a port; empty for a host."""


class SeriesChunk(Base):
    """Values of one metric over CHUNK_STEPS steps and all ranks, as `series.chunks` encodes them.

    For counters of devices, steps are slots of time and ranks are numbers of `JobDevice`.
    """

    __tablename__ = "series_chunk"
    job: Mapped[str] = mapped_column(primary_key=True)
    """The job, or another of `names.series_of` it."""
    attempt: Mapped[str] = mapped_column(primary_key=True)
    metric: Mapped[str] = mapped_column(primary_key=True)
    chunk: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """first step // CHUNK_STEPS"""
    first_step: Mapped[int]
    steps: Mapped[int]
    ranks: Mapped[int]
    data: Mapped[bytes]
    size_bytes: Mapped[int] = mapped_column(default=0)
    """Size of `data`."""
    at_unix_ns: Mapped[int]
    __table_args__ = (
        # Charts read a metric over all attempts, which stand before it in the primary key.
        Index("ix_series_chunk_steps", "job", "metric", "chunk"),
        # Retention sums the sizes without reading the data.
        Index("ix_series_chunk_age", "at_unix_ns", "size_bytes"),
    )


class SeriesRollup(Base):
    """BRANCHES buckets of one metric, as `series.rollups` packs them: they remain when the raw chunks are removed."""

    __tablename__ = "series_rollup"
    job: Mapped[str] = mapped_column(primary_key=True)
    metric: Mapped[str] = mapped_column(primary_key=True)
    level: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """A bucket has CHUNK_STEPS * BRANCHES ** (level - 1) steps."""
    chunk: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """first step // steps of all buckets"""
    attempt: Mapped[str] = mapped_column(primary_key=True)
    ranks: Mapped[int]
    low: Mapped[bytes]
    high: Mapped[bytes]
    mark: Mapped[bytes]
    lines: Mapped[bytes]
    size_bytes: Mapped[int]
    """Size of low, high, mark and lines together."""
    at_unix_ns: Mapped[int]
    __table_args__ = (Index("ix_series_rollup_age", "at_unix_ns", "size_bytes"),)
