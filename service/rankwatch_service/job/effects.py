"""The effects of records and ticks: what has to be stored. Collected during processing, written by `stream.commit`.

A replay brings the same effects again and discards them, because they are committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rankwatch_detectors.base import Frame
from rankwatch_service.incidents.hang import StacksReceived
from rankwatch_service.incidents.host_incidents import HostIncident
from rankwatch_service.incidents.model import Transition
from rankwatch_service.job.admission import Grant
from rankwatch_service.job.detection import Failure
from rankwatch_service.job.device_boards import DeviceNumber
from rankwatch_service.job.summary import AttemptChange, JobSummary
from rankwatch_service.names import series_of
from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.policy.announcement import Announcement
from rankwatch_service.policy.checkpoint_ledger import LedgerEntry
from rankwatch_service.policy.traces import TraceAnswer

VALUE_BYTES: Final = 9
"""A value, and whether it is present."""

FRAMES_BYTES_MAX: Final = 512 * 1024 * 1024
"""Frames that wait for the commit before they are charted. One record may close a thousand frames, or bring late rows
for a hundred large ones; what a commit usually brings is a hundredth of that."""


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


def brief(transition: Transition) -> dict[str, Any]:
    """The event of the feed for a change of an incident."""
    incident = transition.incident
    reported = {"id": incident.id, "kind": str(incident.kind), "state": incident.state}
    return reported | {"what": str(transition.what), "severity": str(incident.severity)}


@dataclass(slots=True)
class Effects:
    """Changes of one or more jobs, in the order in which they arose."""

    transitions: list[Transition] = field(default_factory=list)
    announcements: list[Announcement] = field(default_factory=list)
    commands: list[CommandRequest] = field(default_factory=list)
    checkpoints: list[tuple[str, LedgerEntry]] = field(default_factory=list)
    """(job, entry)"""
    host_incidents: list[HostIncident] = field(default_factory=list)
    jobs: dict[str, JobSummary] = field(default_factory=dict)
    """The newest summary, by name."""
    attempts: dict[tuple[str, str], AttemptChange] = field(default_factory=dict)
    """Merged, by (job, attempt)."""
    devices: list[tuple[str, DeviceNumber]] = field(default_factory=list)
    """(job, device) of devices that were seen for the first time."""
    feed: list[FeedEntry] = field(default_factory=list)
    refused: list[RefusedRecord] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    frames: list[tuple[str, Frame]] = field(default_factory=list)
    """(one of `series_of` a job; frame), for the series, which are written beside the transaction."""
    frames_bytes: int = 0
    """Size of the values in `frames`."""
    frames_left_out: int = 0
    """Frames that are not charted, because `frames` had no room for them."""
    traces: list[TraceAnswer] = field(default_factory=list)
    stacks: list[tuple[str, StacksReceived]] = field(default_factory=list)
    """(job, how far a command has come)"""
    failures: list[tuple[str, Failure]] = field(default_factory=list)
    """(job, failure)"""
    deleted_jobs: list[str] = field(default_factory=list)
    """Jobs that were deleted. The other fields of such a job are about a new one of its name."""

    def chart(self, series: str, frame: Frame) -> None:
        """Add a closed frame for a series, if there is room."""
        ranks = next((len(present) for present in frame.present.values()), 0)
        size = VALUE_BYTES * len(frame.values) * ranks
        if self.frames_bytes + size > FRAMES_BYTES_MAX:
            self.frames_left_out += 1
            return
        self.frames.append((series, frame))
        self.frames_bytes += size

    def change_attempt(self, job: str, attempt: str, change: AttemptChange) -> None:
        """Merge a change of an attempt into those before it."""
        self.attempts[job, attempt] = self.attempts.get((job, attempt), AttemptChange()).merged(change)

    def delete_job(self, job: str) -> None:
        """Delete a job, with all that was collected of it."""
        self.transitions = [one for one in self.transitions if one.incident.job != job]
        self.announcements = [one for one in self.announcements if one.job != job]
        self.commands = [one for one in self.commands if one.job != job]
        self.checkpoints = [one for one in self.checkpoints if one[0] != job]
        self.host_incidents = [one for one in self.host_incidents if one.job != job]
        self.jobs.pop(job, None)
        self.attempts = {key: change for key, change in self.attempts.items() if key[0] != job}
        self.feed = [one for one in self.feed if one.job != job]
        self.devices = [one for one in self.devices if one[0] != job]
        self.traces = [one for one in self.traces if one.job != job]
        self.stacks = [one for one in self.stacks if one[0] != job]
        self.frames = [one for one in self.frames if one[0] not in series_of(job)]
        self.deleted_jobs.append(job)
