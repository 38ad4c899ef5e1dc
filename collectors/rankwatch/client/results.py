"""What the service answers, as the REST API names it. Fields that a newer service adds are ignored."""

from __future__ import annotations

from datetime import datetime
from typing import Any, TypeVar

import msgspec


class Measured(float):
    """A number that may be nan or infinite, which JSON writes as the strings `NaN`, `Inf` and `-Inf`."""


class Transition(msgspec.Struct, frozen=True):
    """One change of an incident."""

    number: int
    what: str
    at: datetime
    actor: str
    text: str


class PersonFeedback(msgspec.Struct, frozen=True):
    """What a person answered about an incident: useful, noise or duplicate."""

    answer: str
    person: str
    name: str
    at: datetime


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """An incident of one job."""

    id: str
    short_id: str
    job: str
    attempt: str
    kind: str
    severity: str
    state: str
    """open, acknowledged or resolved."""
    summary: str
    cause: str
    confidence: float
    """0 to 1."""
    score: Measured
    impact_gpu_hours_per_hour: Measured
    ranks: list[int]
    hosts: list[str]
    devices: list[str]
    scope: str
    evidence: dict[str, Any]
    """What the detector saw, by the kind of incident; numbers that are not finite are strings."""
    suggestion: dict[str, Any]
    """The command that may help; empty if there is none."""
    onset_at: datetime
    onset_step: int | None
    detected_at: datetime
    detected_step: int | None
    updated_at: datetime
    resolved_at: datetime | None = None
    resolved_step: int | None = None
    acknowledged_by: str | None = None
    checkpoint: str | None = None
    """The last one that is known to be good."""


class IncidentDetail(Incident, frozen=True, kw_only=True):
    """An incident with its history."""

    history: list[Transition]
    feedback: list[PersonFeedback] = []
    normal: str = ""
    """What is normal where there is no incident of this kind."""
    impact: str = ""
    """What it does to its job while it lasts."""
    accelerated: bool = True
    """Whether its cost is hours of GPUs or other accelerators; else of ranks."""
    first_steps: list[str] = []
    """What to do first."""
    can: list[str] = []
    """What this token may do with it."""


class IncidentChange(msgspec.Struct, frozen=True):
    """Something happened to an incident; or, where `what` is `reset`, to any: read the list again."""

    what: str
    id: str = ""
    job: str = ""
    kind: str = ""
    state: str = ""
    severity: str = ""
    at: datetime | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A training job."""

    name: str
    project: str
    owner: str
    state: str
    """running, stalled, paused, lost or ended."""
    attempt: str
    step: int
    world_size: int
    ranks_reporting: int
    incidents: int
    """Unresolved ones."""
    worst_severity: str | None
    loss: Measured | None
    step_time_s: Measured | None
    first_seen_at: datetime
    last_seen_at: datetime
    last_progress_at: datetime | None = None
    archived_at: datetime | None = None


class JobDetail(Job, frozen=True, kw_only=True):
    """A job with what it supports."""

    can: list[str]
    """Actions that it supports."""
    two_people: bool = False
    """Whether a costly command needs another person's approval."""
    etag: str = ""
    """Of project and owner as they were read."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A command to a job."""

    id: str
    short_id: str
    job: str
    attempt: str
    action: str
    params: dict[str, Any]
    state: str
    result: str
    reason: str
    requested_by: str
    requested_at: datetime
    expires_at: datetime
    mode: str = ""
    approval_required: bool = False
    approved_by: str | None = None
    incident_id: str | None = None
    applied_at: datetime | None = None
    applied_step: int | None = None
    finished_at: datetime | None = None


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Incidents that nobody is told of for a time; an empty text matches everything."""

    id: str
    short_id: str
    job: str
    kind: str
    scope: str
    comment: str
    created_by: str
    starts_at: datetime
    ends_at: datetime
    matchers: list[str] = []


class Receiver(msgspec.Struct, frozen=True, kw_only=True):
    """Where messages about incidents are sent; an empty list matches everything."""

    name: str
    type: str
    url: str
    enabled: bool
    disabled_reason: str
    severities: list[str]
    jobs: list[str]
    kinds: list[str]
    projects: list[str]
    matchers: list[str]
    after_s: int
    created_at: datetime


Result = TypeVar("Result")


def decoded(content: bytes, form: type[Result]) -> Result:
    """What the service answered.

    Raises:
        ValueError: it is something else.
    """
    return msgspec.json.decode(content, type=form, dec_hook=_measured)


def converted(content: dict[str, Any], form: type[Result]) -> Result:
    """The same of content that has been decoded already.

    Raises:
        ValueError: it is something else.
    """
    return msgspec.convert(content, type=form, dec_hook=_measured)


def _measured(form: type, value: Any) -> Any:
    return form(value)
