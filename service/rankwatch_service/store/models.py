"""Every table, in one file. SQLite and PostgreSQL alike; times are integer nanoseconds since the Unix epoch.

Who writes: `stream` the deciding tables (positions, ticks, incidents, outbox, commands it orders) in one transaction
for each batch; `api` commands, orders, tokens, settings, audit; `notify` the outbox states and deliveries.
"""

from __future__ import annotations

from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, LargeBinary, MetaData, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# SQLite only auto-increments a column that is INTEGER exactly.
AutoId = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """Declarative base with named constraints, so that migrations can name them on both databases."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        int: BigInteger,
        str: Text,
        bytes: LargeBinary,
        dict[str, Any]: JSON,
        list[Any]: JSON,
    }


# ---- log and stream ------------------------------------------------------------------------------------------------


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
    """A control.records.ControlRecord as JSON."""
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
    """No start of this partition needs records of the two logs below these."""
    epoch: Mapped[int] = mapped_column(default=0)
    """Raised by each process that takes the partition over; only who raised it last can commit."""


class StreamReport(Base):
    """What the owner of a partition last said about it: for people and metrics, nothing is decided by it."""

    __tablename__ = "stream_report"
    partition: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    owner: Mapped[str]
    """HOST:PID of the process."""
    epoch: Mapped[int]
    position: Mapped[int]
    end: Mapped[int]
    """Where the next record will lie, as far as is known: `end` - `position` is the lag."""
    tick_unix_ns: Mapped[int]
    """Time of the newest tick; it stands still while no job is awake."""
    lost_records: Mapped[int]
    """Records that the log had forgotten before this owner could read them."""
    at_unix_ns: Mapped[int]


class StreamProcess(Base):
    """What a stream process last said about itself."""

    __tablename__ = "stream_process"
    owner: Mapped[str] = mapped_column(primary_key=True)
    started_unix_ns: Mapped[int]
    counters: Mapped[dict[str, Any]]
    """{name: count since the process began}, see `stream.report.Counts`."""
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


# ---- jobs and their series -----------------------------------------------------------------------------------------


class Job(Base):
    """A logical training run."""

    __tablename__ = "job"
    name: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    """running, paused, lost (no telemetry), ended."""
    attempt: Mapped[str]
    world_size: Mapped[int]
    ranks_reporting: Mapped[int]
    step: Mapped[int]
    step_time_s: Mapped[float | None]
    loss: Mapped[float | None]
    first_seen_unix_ns: Mapped[int]
    last_seen_unix_ns: Mapped[int]
    dropped: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """Records and batches that did not reach detection, counted by reason, those that agents lost included."""


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
    """{"ranks": [{rank, host, device_uuid, local_rank, pid, dp, tp, pp, cp, ep}], "can": [...], "replicated": bool}"""
    number: Mapped[int]
    """Order of attempts within the job, from 1."""


class SeriesChunk(Base):
    """Values of one metric over CHUNK_STEPS steps and all ranks, as `store.chunks` encodes them."""

    __tablename__ = "series_chunk"
    job: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[str] = mapped_column(primary_key=True)
    metric: Mapped[str] = mapped_column(primary_key=True)
    chunk: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """first step // CHUNK_STEPS"""
    first_step: Mapped[int]
    steps: Mapped[int]
    ranks: Mapped[int]
    data: Mapped[bytes]
    size_bytes: Mapped[int] = mapped_column(default=0)
    """Of the data."""
    at_unix_ns: Mapped[int]
    __table_args__ = (
        Index("ix_series_chunk_steps", "job", "metric", "chunk"),
        Index("ix_series_chunk_age", "at_unix_ns", "size_bytes"),
    )


class SeriesRollup(Base):
    """BRANCHES buckets of one metric, as `store.rollup` packs them: what remains when the raw chunks have left."""

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
    """Of low, high, mark and lines."""
    at_unix_ns: Mapped[int]
    __table_args__ = (Index("ix_series_rollup_age", "at_unix_ns", "size_bytes"),)


# ---- incidents and notifications -----------------------------------------------------------------------------------


class Incident(Base):
    """What a person works on."""

    __tablename__ = "incident"
    id: Mapped[str] = mapped_column(primary_key=True)
    """Derived from (job, attempt, kind, scope, episode)."""
    number: Mapped[int]
    """Order within the job, from 1, for people."""
    job: Mapped[str] = mapped_column(index=True)
    attempt: Mapped[str]
    kind: Mapped[str]
    scope: Mapped[str]
    episode: Mapped[int]
    severity: Mapped[str]
    state: Mapped[str] = mapped_column(index=True)
    """open, acknowledged, resolved."""
    ranks: Mapped[list[Any]]
    hosts: Mapped[list[Any]]
    devices: Mapped[list[Any]]
    onset_step: Mapped[int | None]
    detected_step: Mapped[int | None]
    resolved_step: Mapped[int | None]
    onset_unix_ns: Mapped[int]
    detected_unix_ns: Mapped[int]
    updated_unix_ns: Mapped[int]
    resolved_unix_ns: Mapped[int | None]
    score: Mapped[float]
    confidence: Mapped[float]
    cause: Mapped[str]
    summary: Mapped[str]
    evidence: Mapped[dict[str, Any]]
    consequences: Mapped[list[Any]]
    """Findings joined to this incident that did not begin it: {kind, scope, ranks, summary, step}."""
    changes_before: Mapped[list[Any]]
    """What changed shortly before the onset: attempts, checkpoints, orders: {what, step, unix_ns}."""
    impact_gpu_hours_per_hour: Mapped[float]
    suggestion: Mapped[dict[str, Any]]
    """{action, reason, cost_gpu_hours, alternatives: [{action, cost_gpu_hours, reason}]}"""
    checkpoint: Mapped[str | None]
    """Last good checkpoint when it opened."""
    transitions: Mapped[int]
    acknowledged_by: Mapped[str | None]


class IncidentTransition(Base):
    """One change of an incident: opened, updated, acknowledged, commented, resolved, evidence."""

    __tablename__ = "incident_transition"
    incident_id: Mapped[str] = mapped_column(ForeignKey("incident.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    what: Mapped[str]
    actor: Mapped[str]
    text: Mapped[str]
    fields: Mapped[dict[str, Any]]
    at_unix_ns: Mapped[int]


class Receiver(Base):
    """A configured webhook target."""

    __tablename__ = "receiver"
    name: Mapped[str] = mapped_column(primary_key=True)
    url: Mapped[str]
    secret: Mapped[str]
    """whsec_ + base64."""
    kinds: Mapped[list[Any]]
    """Incident kinds it gets; empty = all."""
    severities: Mapped[list[Any]]
    jobs: Mapped[list[Any]]
    enabled: Mapped[bool] = mapped_column(default=True)
    disabled_reason: Mapped[str] = mapped_column(default="")
    created_unix_ns: Mapped[int]


class Silence(Base):
    """Mutes notifications that match until a time. Incidents open all the same."""

    __tablename__ = "silence"
    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str]
    """"" = any, and so for the next two."""
    kind: Mapped[str]
    scope: Mapped[str]
    starts_unix_ns: Mapped[int]
    ends_unix_ns: Mapped[int]
    created_by: Mapped[str]
    comment: Mapped[str]


class Outbox(Base):
    """One notification to one receiver. The id is the webhook-id and the same over all tries."""

    __tablename__ = "outbox"
    id: Mapped[str] = mapped_column(primary_key=True)
    """msg_ + hash of (incident, transition, receiver)."""
    receiver: Mapped[str]
    incident_id: Mapped[str] = mapped_column(index=True)
    transition: Mapped[int]
    body: Mapped[bytes]
    """JSON {type, timestamp, data}."""
    state: Mapped[str]
    """waiting, delivered, failed (given up), silenced."""
    tries: Mapped[int] = mapped_column(default=0)
    next_try_unix_ns: Mapped[int]
    created_unix_ns: Mapped[int]
    delivered_unix_ns: Mapped[int | None]
    __table_args__ = (Index("ix_outbox_due", "state", "next_try_unix_ns"),)


class Delivery(Base):
    """One try to deliver one notification."""

    __tablename__ = "delivery"
    id: Mapped[int] = mapped_column(AutoId, primary_key=True, autoincrement=True)
    outbox_id: Mapped[str] = mapped_column(index=True)
    at_unix_ns: Mapped[int]
    status: Mapped[int | None]
    error: Mapped[str]
    seconds: Mapped[float]


class Lease(Base):
    """Which of several processes does a work that only one may do."""

    __tablename__ = "lease"
    name: Mapped[str] = mapped_column(primary_key=True)
    """The work: notify."""
    holder: Mapped[str]
    epoch: Mapped[int]
    """Raised each time another process takes it over."""
    expires_unix_ns: Mapped[int]


class Feed(Base):
    """What `GET events` streams: the id is the SSE id."""

    __tablename__ = "feed"
    id: Mapped[int] = mapped_column(AutoId, primary_key=True, autoincrement=True)
    topic: Mapped[str]
    """incident, command, job, checkpoint, silence."""
    job: Mapped[str]
    data: Mapped[dict[str, Any]]
    at_unix_ns: Mapped[int]


# ---- commands, checkpoints, hosts ----------------------------------------------------------------------------------


class Command(Base):
    """What someone asked of a job.

    requested -> (approved) -> sent -> accepted -> applied | refused | expired | failed | cancelled.
    """

    __tablename__ = "command"
    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(index=True)
    attempt: Mapped[str]
    """The attempt it was meant for; on another one it is refused."""
    action: Mapped[str]
    params: Mapped[dict[str, Any]]
    reason: Mapped[str]
    requested_by: Mapped[str]
    incident_id: Mapped[str | None]
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    approval_required: Mapped[bool] = mapped_column(default=False)
    """It waits in `requested` until a person approves it."""
    state: Mapped[str] = mapped_column(index=True)
    result: Mapped[str]
    """Why it was refused or failed, or where its checkpoint went."""
    applied_step: Mapped[int | None]
    requested_unix_ns: Mapped[int]
    expires_unix_ns: Mapped[int]
    applied_unix_ns: Mapped[int | None]
    finished_unix_ns: Mapped[int | None]


class Order(Base):
    """One try to carry out a command by hold, do, go. Driven by compare-and-set on `version`."""

    __tablename__ = "command_order"
    id: Mapped[str] = mapped_column(primary_key=True)
    command_id: Mapped[str] = mapped_column(ForeignKey("command.id", ondelete="CASCADE"), index=True)
    job: Mapped[str] = mapped_column(index=True)
    attempt: Mapped[str]
    action: Mapped[str]
    phase: Mapped[str]
    """As in wire.OrderView; closed when nothing more will be said."""
    step: Mapped[int]
    try_number: Mapped[int]
    checkpoint: Mapped[str]
    location: Mapped[str]
    checkpoint_step: Mapped[int]
    k: Mapped[int]
    culprits: Mapped[list[Any]]
    phase_unix_ns: Mapped[int]
    lease_unix_ns: Mapped[int]
    detail: Mapped[str]
    version: Mapped[int]


class AgentView(Base):
    """The newest progress blocks of one host's ranks, posted while an order is open, and the agent's heartbeat."""

    __tablename__ = "agent_view"
    job: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[str] = mapped_column(primary_key=True)
    host: Mapped[str] = mapped_column(primary_key=True)
    boot: Mapped[str]
    ranks: Mapped[bytes]
    """msgpack of list[wire.Progress]"""
    at_unix_ns: Mapped[int]


class Checkpoint(Base):
    """One entry of the checkpoint ledger."""

    __tablename__ = "checkpoint"
    job: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    """TIER:ATTEMPT:STEP; launchers number their launches alike, so it is unique only within the job."""
    attempt: Mapped[str]
    step: Mapped[int]
    tier: Mapped[str]
    """memory, local or remote."""
    location: Mapped[str]
    shards_expected: Mapped[int]
    shards: Mapped[list[Any]]
    """Ranks that have reported theirs."""
    seconds: Mapped[float]
    bytes: Mapped[int]
    verdict: Mapped[str]
    """incomplete, unproven, good, suspect, gone."""
    verdict_reason: Mapped[str]
    saved_unix_ns: Mapped[int]


class HostRecord(Base):
    """A verdict filed under the hardware it is about; devices outlive jobs."""

    __tablename__ = "host_record"
    id: Mapped[str] = mapped_column(primary_key=True)
    """hash of (incident, host, device)"""
    host: Mapped[str] = mapped_column(index=True)
    device_uuid: Mapped[str]
    incident_id: Mapped[str]
    job: Mapped[str]
    kind: Mapped[str]
    severity: Mapped[str]
    at_unix_ns: Mapped[int]


# ---- access, settings, audit ---------------------------------------------------------------------------------------


class Token(Base):
    """An access token; only the hash of its secret is kept."""

    __tablename__ = "token"
    id: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(default="api")
    """api, ingest, login (good for one browser login), session (a browser's)."""
    parent: Mapped[str] = mapped_column(default="")
    """For a session: the token that opened it; revoking that one revokes this one."""
    name: Mapped[str]
    scopes: Mapped[list[Any]]
    """ingest, read, operate (acknowledge, silence, comment), command, admin."""
    job: Mapped[str]
    """"" = every job."""
    secret_sha256: Mapped[str]
    created_unix_ns: Mapped[int]
    expires_unix_ns: Mapped[int | None]
    last_used_unix_ns: Mapped[int | None]
    revoked: Mapped[bool] = mapped_column(default=False)


class PolicyRule(Base):
    """kind, severity, confidence, job -> notify | suggest | act. First match by `position` decides."""

    __tablename__ = "policy_rule"
    id: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int]
    kind: Mapped[str]
    """"" = any, and so for severity and job."""
    severity: Mapped[str]
    job: Mapped[str]
    confidence_min: Mapped[float]
    mode: Mapped[str]
    action: Mapped[str]
    """For act: pause, checkpoint, rollback, relaunch, stop."""


class Setting(Base):
    """One stored setting, for instance policy.hands_off."""

    __tablename__ = "setting"
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[dict[str, Any]]
    updated_unix_ns: Mapped[int]


class IdempotentReply(Base):
    """The stored answer to a write that carried an Idempotency-Key, kept 24 hours."""

    __tablename__ = "idempotent_reply"
    token_id: Mapped[str] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    request_sha256: Mapped[str]
    status: Mapped[int]
    body: Mapped[bytes]
    at_unix_ns: Mapped[int]


class Audit(Base):
    """Append-only, each row chained to the one before by its hash."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(AutoId, primary_key=True, autoincrement=True)
    at_unix_ns: Mapped[int]
    actor: Mapped[str]
    source: Mapped[str]
    action: Mapped[str]
    target: Mapped[str]
    outcome: Mapped[str]
    fields: Mapped[dict[str, Any]]
    previous_sha256: Mapped[str]
    sha256: Mapped[str]
    __table_args__ = (UniqueConstraint("previous_sha256"),)
