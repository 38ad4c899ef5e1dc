"""Tokens, policy, settings, replies that are kept for repeated requests, and the audit trail."""

from __future__ import annotations

from typing import Any

from sqlalchemy import UniqueConstraint
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
    """ingest, read, operate (acknowledge, silence, comment), command, admin."""
    job: Mapped[str]
    """Empty: every job."""
    secret_sha256: Mapped[str]
    created_unix_ns: Mapped[int]
    expires_unix_ns: Mapped[int | None]
    last_used_unix_ns: Mapped[int | None]
    revoked: Mapped[bool] = mapped_column(default=False)


class PolicyRule(Base):
    """A rule of the policy: kind, severity, confidence, job -> notify | suggest | act. The first match decides."""

    __tablename__ = "policy_rule"
    id: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int]
    """Rules are tried in ascending order."""
    kind: Mapped[str]
    """Empty: any; the same for severity and job."""
    severity: Mapped[str]
    job: Mapped[str]
    confidence_min: Mapped[float]
    mode: Mapped[str]
    action: Mapped[str]
    """For suggest and act: pause, checkpoint, rollback, relaunch, stop."""
    rollback_mode: Mapped[str] = mapped_column(default="", server_default="")
    """For rollback: full, weights or relaunch; "": full, else relaunch."""


class Setting(Base):
    """One stored setting, for instance the limits of the policy."""

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
    # A chain has no branches: two rows must not name the same predecessor.
    __table_args__ = (UniqueConstraint("previous_sha256"),)
