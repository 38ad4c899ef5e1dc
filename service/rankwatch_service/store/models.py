"""All tables, the same on SQLite and PostgreSQL; other modules import them from here.

Times are integer nanoseconds since the Unix epoch.

`stream` writes positions, ticks, incidents, announcements and the commands that it requests, in one transaction for
each batch; `api` writes commands, orders, tokens, settings and audit; `notify` turns announcements into the outbox, and
writes deliveries.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, Dialect, Double, ForeignKey, Index, Integer, LargeBinary, MetaData, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator, TypeEngine, UserDefinedType

# SQLite only auto-increments a column that is INTEGER exactly.
AutoId = BigInteger().with_variant(Integer, "sqlite")


class _AsGiven(UserDefinedType[Any]):
    """SQLite's DOUBLE without conversions by SQLAlchemy, so that the text "NaN" passes."""

    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "DOUBLE"


class Measured(TypeDecorator[float]):
    """A number that may be NaN or infinite. SQLite turns NaN into NULL, so there the text "NaN" is stored."""

    impl = Double
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """The column's type in a database."""
        return dialect.type_descriptor(_AsGiven() if dialect.name == "sqlite" else Double())

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        """The value to store for a number or its name."""
        number = None if value is None else float(value)
        return "NaN" if number is not None and math.isnan(number) and dialect.name == "sqlite" else number

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:  # noqa: ARG002 - SQLAlchemy's call
        """The stored value as a number."""
        return None if value is None else float(value)


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


# ---- Jobs, their attempts, and the values of their ranks ----


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


# ---- Incidents, their transitions, people's feedback, and notifications with receivers and silences ----


class Incident(Base):
    """What a person works on."""

    __tablename__ = "incident"
    id: Mapped[str] = mapped_column(primary_key=True)
    """Derived from (job, attempt, kind, scope, episode)."""
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
    detected_unix_ns: Mapped[int] = mapped_column(index=True)
    updated_unix_ns: Mapped[int]
    resolved_unix_ns: Mapped[int | None]
    score: Mapped[float]
    confidence: Mapped[float]
    cause: Mapped[str]
    summary: Mapped[str]
    evidence: Mapped[dict[str, Any]]
    consequences: Mapped[list[Any]]
    """What the first mover caused: {kind, scope, ranks, summary, step}."""
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
    """One change of an incident: opened, updated, acknowledged, unacknowledged, commented, resolved, evidence."""

    __tablename__ = "incident_transition"
    incident_id: Mapped[str] = mapped_column(ForeignKey("incident.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    what: Mapped[str]
    actor: Mapped[str]
    text: Mapped[str]
    fields: Mapped[dict[str, Any]]
    at_unix_ns: Mapped[int]


class IncidentFeedback(Base):
    """One person's feedback on an incident; only the newest is kept."""

    __tablename__ = "incident_feedback"
    incident_id: Mapped[str] = mapped_column(ForeignKey("incident.id", ondelete="CASCADE"), primary_key=True)
    person: Mapped[str] = mapped_column(primary_key=True)
    """As `Identity.person` names people."""
    name: Mapped[str]
    """Name of the token, for people."""
    answer: Mapped[str]
    """useful, noise, duplicate."""
    at_unix_ns: Mapped[int]


class AlertRow(Base):
    """An alert of a Prometheus that fires. It is removed when it ends."""

    __tablename__ = "alert"
    fingerprint: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(primary_key=True)
    """A job that it concerns; empty: it concerns none that is known."""
    name: Mapped[str]
    is_reported: Mapped[bool]
    """Whether the stream has received this alert."""
    labels: Mapped[dict[str, Any]]
    annotations: Mapped[dict[str, Any]]
    url: Mapped[str]
    starts_unix_ns: Mapped[int]
    ends_unix_ns: Mapped[int] = mapped_column(index=True)
    """When it counts as over, unless it is repeated."""
    updated_unix_ns: Mapped[int]
    """When it was reported last."""


class Receiver(Base):
    """A configured webhook target."""

    __tablename__ = "receiver"
    name: Mapped[str] = mapped_column(primary_key=True)
    url: Mapped[str]
    """Encrypted, like `secret`."""
    secret: Mapped[str]
    """whsec_ + base64."""
    kinds: Mapped[list[Any]]
    """Incident kinds it gets; empty = all."""
    severities: Mapped[list[Any]]
    jobs: Mapped[list[Any]]
    projects: Mapped[list[Any]] = mapped_column(default=list)
    matchers: Mapped[list[Any]] = mapped_column(default=list)
    """On labels, as text; all of them must match too."""
    after_s: Mapped[int] = mapped_column(default=0)
    """Delay of notifications in seconds; none is sent if the incident is acknowledged by then."""
    enabled: Mapped[bool] = mapped_column(default=True)
    disabled_reason: Mapped[str] = mapped_column(default="")
    created_unix_ns: Mapped[int]


class Silence(Base):
    """Mutes notifications that match until a time. Incidents open all the same."""

    __tablename__ = "silence"
    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str]
    """Empty: any; the same for kind and scope."""
    kind: Mapped[str]
    scope: Mapped[str]
    starts_unix_ns: Mapped[int]
    ends_unix_ns: Mapped[int]
    created_by: Mapped[str]
    comment: Mapped[str]
    matchers: Mapped[list[Any]] = mapped_column(default=list)
    """On labels, as text; all of them must match too."""


class Announcement(Base):
    """A change of an incident, or a command, that receivers may be notified of: see `policy.announcement`.

    It is written once, in the transaction of the change, and removed when the notifier has decided who gets it.
    """

    __tablename__ = "announcement"
    id: Mapped[int] = mapped_column(AutoId, primary_key=True, autoincrement=True)
    """In the order of the changes."""
    type: Mapped[str]
    job: Mapped[str] = mapped_column(index=True)
    incident_id: Mapped[str]
    transition: Mapped[int]
    command_id: Mapped[str]
    labels: Mapped[dict[str, Any]]
    kinds: Mapped[list[Any]]
    places: Mapped[list[Any]]
    detected_unix_ns: Mapped[int]
    at_unix_ns: Mapped[int]
    data: Mapped[dict[str, Any]]
    held: Mapped[bool] = mapped_column(default=False)
    """The limit of messages keeps it back: it is looked at again until there is room, or nobody needs it any more."""


class MessageLimitRow(Base):
    """What receivers were recently notified of for a job, for the limit of messages."""

    __tablename__ = "message_limit"
    job: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[dict[str, Any]]
    """See `notify.message_limit.MessageLimit.state`."""


class Outbox(Base):
    """One notification to one receiver. The id is the webhook-id, the same for all tries."""

    __tablename__ = "outbox"
    id: Mapped[str] = mapped_column(primary_key=True)
    """msg_ + hash of (incident or command, transition, receiver)."""
    receiver: Mapped[str]
    incident_id: Mapped[str] = mapped_column(index=True)
    """Empty: a command without an incident."""
    transition: Mapped[int]
    """0: it is about a command."""
    command_id: Mapped[str] = mapped_column(default="")
    """Empty: it is about an incident."""
    body: Mapped[bytes]
    """JSON {type, timestamp, data}."""
    state: Mapped[str]
    """waiting, delivered, failed (given up), silenced, held (by the limit), unneeded (acknowledged or over before)."""
    tries: Mapped[int] = mapped_column(default=0)
    next_try_unix_ns: Mapped[int]
    created_unix_ns: Mapped[int]
    """The time from which on it is due."""
    delivered_unix_ns: Mapped[int | None]
    __table_args__ = (Index("ix_outbox_due", "state", "next_try_unix_ns"),)


class UsedLink(Base):
    """A link of a message that has been used: it works once."""

    __tablename__ = "used_link"
    id: Mapped[str] = mapped_column(primary_key=True)
    """Action and id of the message."""
    used_unix_ns: Mapped[int]


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
    """Which of several processes does work that only one may do at a time."""

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


# ---- Commands and their orders, what agents answer, checkpoints, and the record of hosts ----


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
    requester: Mapped[str] = mapped_column(default="")
    """The person behind `requested_by`, as `Identity.person` names people; empty: no person."""
    incident_id: Mapped[str | None]
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    world_size: Mapped[int] = mapped_column(default=0)
    """Ranks that it was requested for; 0: unknown."""
    approval_required: Mapped[bool] = mapped_column(default=False)
    """Whether it waits in `requested` until a person other than its requester approves it."""
    approved_by: Mapped[str | None]
    """The approver, as the audit trail names people."""
    state: Mapped[str] = mapped_column(index=True)
    result: Mapped[str]
    """Why it was refused or failed, or where its checkpoint went."""
    mode: Mapped[str] = mapped_column(default="")
    """For rollback: full or relaunch; "" before it begins."""
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
    """As in wire.OrderView; closed when the order is over."""
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
    mode: Mapped[str] = mapped_column(default="")
    """For rollback: full, or relaunch if the action is that instead."""
    refused: Mapped[bool] = mapped_column(default=False)
    """A rank answered that it cannot do this; another mode or tier may be tried."""


class RankTrace(Base):
    """What one rank answered to a command `trace`."""

    __tablename__ = "rank_trace"
    command_id: Mapped[str] = mapped_column(ForeignKey("command.id", ondelete="CASCADE"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    error: Mapped[str]
    """Why there is no summary, or what is wrong with it; empty: it is whole."""
    summary: Mapped[dict[str, Any]]
    """Fields of `policy.traces.TraceSummary`; empty: none."""
    at_unix_ns: Mapped[int]


class AgentView(Base):
    """The newest progress blocks of one host's ranks, posted while an order is open, and the agent's heartbeat."""

    __tablename__ = "agent_view"
    job: Mapped[str] = mapped_column(primary_key=True)
    host: Mapped[str] = mapped_column(primary_key=True)
    """HOST/AGENT if an agent that has enrolled signed it: two agents may say that they are on one host."""
    attempt: Mapped[str] = mapped_column(primary_key=True)
    """One of the `running_attempt.ATTEMPTS_MAX` that were reported last."""
    agent: Mapped[str] = mapped_column(default="", index=True)
    """Id of the agent that signed it; empty: it was not signed."""
    boot: Mapped[str]
    ranks: Mapped[bytes]
    """msgpack of list[wire.Progress]"""
    at_unix_ns: Mapped[int]


class Checkpoint(Base):
    """One entry of the checkpoint ledger."""

    __tablename__ = "checkpoint"
    job: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[str] = mapped_column(primary_key=True)
    """TIER:ATTEMPT:STEP. Unique only within the job, since launchers name the launches of different jobs alike."""
    attempt: Mapped[str]
    step: Mapped[int]
    tier: Mapped[str]
    """memory, local or remote."""
    location: Mapped[str]
    shards_expected: Mapped[int]
    shards: Mapped[list[Any]]
    """Ranks that have reported their shard."""
    seconds: Mapped[float]
    bytes: Mapped[int]
    verdict: Mapped[str]
    """incomplete, unproven, good, suspect, gone, refused."""
    verdict_reason: Mapped[str]
    saved_unix_ns: Mapped[int]


class HostRecord(Base):
    """An incident on the record of its host and device, which outlive jobs."""

    __tablename__ = "host_record"
    id: Mapped[str] = mapped_column(primary_key=True)
    """Hash of (incident, host, device)."""
    host: Mapped[str] = mapped_column(index=True)
    host_id: Mapped[str] = mapped_column(default="")
    """The id of the host (`signed.host_of` the agent of its ranks); empty: no enrolled agent has reported it."""
    device_uuid: Mapped[str]
    incident_id: Mapped[str]
    job: Mapped[str]
    kind: Mapped[str]
    severity: Mapped[str]
    at_unix_ns: Mapped[int]


# ---- What stream reads, how far it has come, and what it cannot use: logs, positions, ticks, snapshots ----


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


# ---- Tokens, policy, tunings, settings, replies that are kept for repeated requests, and the audit trail ----


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
    """ingest, alert (send alerts), read, operate (acknowledge, silence, comment), command, admin."""
    job: Mapped[str]
    """Empty: every job."""
    secret_sha256: Mapped[str]
    created_unix_ns: Mapped[int]
    expires_unix_ns: Mapped[int | None]
    last_used_unix_ns: Mapped[int | None]
    revoked: Mapped[bool] = mapped_column(default=False)
    hosts_max: Mapped[int | None]
    """For a job's token: how many agents it admits at a time; null: `AGENTS_MAX`."""
    loopback: Mapped[bool] = mapped_column(default=False)
    """Whether it is valid only on the machine of the service."""
    enrolment_key: Mapped[str] = mapped_column(default="")
    """For agents: hexadecimal, and the end of the token's text; by it the service proves itself to who enrols."""
    person: Mapped[str] = mapped_column(default="")
    """For a session of somebody who has logged in with an OIDC provider: who it is."""
    grants: Mapped[list[Any]] = mapped_column(default=list)
    """For such a session: {scopes, jobs} by group, where several groups allow different things."""
    lasts_ns: Mapped[int | None]
    """By how much its expiry moves on while enrolled agents report with it; null: it does not."""
    project: Mapped[str] = mapped_column(default="")
    """Owner of the jobs that it starts. One that is not for one job may access the jobs of this project alone."""
    owner: Mapped[str] = mapped_column(default="")
    """Owner of the jobs that it starts."""
    makers: Mapped[list[Any]] = mapped_column(default=list)
    """The actor that made it, the actor that made that one's token, and so on."""
    admitted: Mapped[bool] = mapped_column(default=True)
    """False: it cannot be used before a second person has approved it."""


class Agent(Base):
    """An agent that has enrolled for one job and host. Its secret is derived from the service's key.

    The row goes when the agent has been silent for a day, or another needs its place; if it comes back, it enrols
    again.
    """

    __tablename__ = "agent"
    id: Mapped[str] = mapped_column(primary_key=True)
    """Its first half is the id of its host (`signed.host_of`)."""
    job: Mapped[str] = mapped_column(index=True)
    host: Mapped[str] = mapped_column(index=True)
    token_id: Mapped[str] = mapped_column(index=True)
    """The token that admitted it."""
    enrolled_unix_ns: Mapped[int]


class SignedJob(Base):
    """A job for which an agent has enrolled: its messages are signed, whatever becomes of the agent's row."""

    __tablename__ = "signed_job"
    job: Mapped[str] = mapped_column(primary_key=True)
    enrolled_unix_ns: Mapped[int]
    """When the newest of its agents did."""


class PolicyRule(Base):
    """A rule of the policy: kind, severity, confidence, job -> notify | suggest | act. The first match decides."""

    __tablename__ = "policy_rule"
    id: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int]
    """Rules are tried in ascending order."""
    kind: Mapped[str]
    """Empty: any; the same for severity, job and project."""
    severity: Mapped[str]
    job: Mapped[str]
    project: Mapped[str] = mapped_column(default="")
    confidence_min: Mapped[float]
    mode: Mapped[str]
    action: Mapped[str]
    """For suggest and act: pause, checkpoint, rollback, relaunch, stop."""
    rollback_mode: Mapped[str] = mapped_column(default="")
    """For rollback: full or relaunch; "": full, else relaunch."""


class MetricRuleRow(Base):
    """A rule on a metric that jobs log."""

    __tablename__ = "metric_rule"
    name: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int]
    """Rules are listed, and judged where a job has too many, in ascending order."""
    rule: Mapped[dict[str, Any]]
    """Fields of `rankwatch_detectors.metric_rule.MetricRule`."""
    updated_by: Mapped[str]
    """As the audit trail names people."""
    updated_unix_ns: Mapped[int]


class Setting(Base):
    """One stored setting, for instance the limits of the policy."""

    __tablename__ = "setting"
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[dict[str, Any]]
    updated_unix_ns: Mapped[int]


class TuningVersion(Base):
    """One version of the tunings of detectors; the newest is in force."""

    __tablename__ = "tuning_version"
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tunings: Mapped[list[Any]]
    """As `tuning.tunings.Tuning`, in the order in which they are tried."""
    actor: Mapped[str]
    at_unix_ns: Mapped[int]


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
    """Append-only: who did what to what, from where, and with which outcome."""

    __tablename__ = "audit"
    id: Mapped[int] = mapped_column(AutoId, primary_key=True, autoincrement=True)
    at_unix_ns: Mapped[int]
    actor: Mapped[str]
    source: Mapped[str]
    action: Mapped[str]
    target: Mapped[str]
    outcome: Mapped[str]
    fields: Mapped[dict[str, Any]]
