"""Tokens, policy, tunings, settings, replies that are kept for repeated requests, and the audit trail."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Mapped, mapped_column

from rankwatch_service.store.models.base import AutoId, Base


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
