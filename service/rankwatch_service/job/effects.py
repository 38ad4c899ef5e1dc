"""The effects of records and ticks: what has to be stored. Collected during processing, written by `stream.commit`.

A replay brings the same effects again and discards them, because they are committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rankwatch_detectors.base import Frame
from rankwatch_service.incidents.host_incidents import HostIncident
from rankwatch_service.incidents.transition import Transition
from rankwatch_service.job.detector_bank import Failure
from rankwatch_service.job.summary import AttemptChange, JobSummary
from rankwatch_service.policy.checkpoint_ledger import LedgerEntry
from rankwatch_service.policy.command import CommandRequest
from rankwatch_service.policy.routing import Notification


@dataclass(frozen=True, slots=True)
class RefusedRecord:
    """A record that could not be used: it becomes a dead letter."""

    position: int
    reason: str
    """A `telemetry.envelope.Reason`, for counting."""
    detail: str
    """One sentence for a person."""
    value: bytes
    at_unix_ns: int
    """Stream time."""


@dataclass(frozen=True, slots=True)
class FeedEntry:
    """A change that open dashboards are notified of."""

    topic: str
    """incident, checkpoint or job."""
    job: str
    data: Mapping[str, Any]
    """JSON types."""
    at_unix_ns: int


@dataclass(slots=True)
class Effects:
    """Changes of one or more jobs, in the order in which they arose."""

    transitions: list[Transition] = field(default_factory=list)
    notifications: list[Notification] = field(default_factory=list)
    commands: list[CommandRequest] = field(default_factory=list)
    checkpoints: list[tuple[str, LedgerEntry]] = field(default_factory=list)
    """(job, entry)"""
    host_incidents: list[HostIncident] = field(default_factory=list)
    jobs: dict[str, JobSummary] = field(default_factory=dict)
    """By name, the newest summary."""
    attempts: dict[tuple[str, str], AttemptChange] = field(default_factory=dict)
    """By (job, attempt), merged."""
    feed: list[FeedEntry] = field(default_factory=list)
    refused: list[RefusedRecord] = field(default_factory=list)
    frames: list[tuple[str, Frame]] = field(default_factory=list)
    """(job, frame), for the series, which are written beside the transaction."""
    failures: list[tuple[str, Failure]] = field(default_factory=list)
    """(job, failure)"""

    def change_attempt(self, job: str, attempt: str, change: AttemptChange) -> None:
        """Merge a change of an attempt into those before it."""
        self.attempts[job, attempt] = self.attempts.get((job, attempt), AttemptChange()).merged(change)
