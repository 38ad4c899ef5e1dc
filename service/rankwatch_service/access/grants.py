"""The scopes that a token can grant, and what a group of people may do, and in which jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rankwatch_service.access.job_filter import JobFilter


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


@dataclass(frozen=True, slots=True)
class GroupGrant:
    """Scopes, and the jobs in which they hold. A person of several groups has one of each."""

    scopes: frozenset[str]
    jobs: JobFilter

    def holds(self, scope: Scope) -> bool:
        """Whether it grants this scope."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    def stored(self) -> dict[str, Any]:
        """As JSON for the database."""
        return {"scopes": sorted(self.scopes), "jobs": list(self.jobs.patterns)}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> GroupGrant:
        """The grant of what `stored` returned."""
        return cls(frozenset(stored["scopes"]), JobFilter(tuple(stored["jobs"])))
