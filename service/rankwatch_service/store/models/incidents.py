"""Incidents, their transitions, people's feedback, and notifications with receivers and silences."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKey, Index
from sqlalchemy.orm import Mapped, mapped_column

from rankwatch_service.store.models.base import AutoId, Base


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
