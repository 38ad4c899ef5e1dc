"""Commands and their orders, what agents answer, checkpoints, and the record of hosts."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey
from sqlalchemy.orm import Mapped, mapped_column

from rankwatch_service.store.models.base import Base


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
