"""The scopes that a token can grant."""

from __future__ import annotations

from enum import StrEnum


class Scope(StrEnum):
    """What a token may be used for. `admin` includes all others."""

    INGEST = "ingest"
    """Send telemetry and receive orders, as agents do."""
    ALERT = "alert"
    """Send alerts, as a Prometheus does."""
    READ = "read"
    OPERATE = "operate"
    """Acknowledge, resolve and comment on incidents; silence notifications."""
    COMMAND = "command"
    """Request, approve, refuse and cancel commands to jobs."""
    ADMIN = "admin"
