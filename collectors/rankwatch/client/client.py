"""The client: its lists and what can be done with their items.

What the service answers, as the REST API names it. Fields that a newer service adds are ignored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec

from rankwatch.client.connection import RestConnection, RestError, RestReply, find_endpoint, user_places


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
    """running, stalled, paused, log_not_understood, lost or ended."""
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


class JobDetail(Job, frozen=True, kw_only=True):
    """A job with what it supports."""

    can: list[str]
    """Actions that it supports."""
    two_people: bool = False
    """Whether a costly command needs another person's approval."""
    etag: str = ""
    """ETag of project and owner as they were read."""


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
    """Incidents of which nobody is notified for a time; an empty text matches everything."""

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


PAGE_ITEMS: Final = 200

POLL_S: Final = 1.0
"""Pause between two looks at a command that is waited for."""

FINAL_STATES: Final = frozenset({"applied", "refused", "expired", "failed", "cancelled"})
"""Final states of commands."""

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Texts = str | Sequence[str] | None
"""One value or several of a filter; None: all."""


class Client:
    """A client of one service. Methods raise `RestError` if the service refuses or does not answer.

    Threads may share it; there is nothing to close.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        """Choose a service; the first request connects to it.

        Args:
            url: of the service. None: `RANKWATCH_URL`, then that of `rankwatch login`, then that of `rankwatch up`.
            token: None: `RANKWATCH_TOKEN`, or the one that is stored for this service.

        Raises:
            ValueError: a stored file, the URL or the token cannot be used, or the URL is not safe enough.
        """
        connection = RestConnection(find_endpoint(url, token, os.environ, user_places(os.environ)))
        self.url = connection.url
        self.jobs = _Jobs(connection)
        self.incidents = _Incidents(connection)
        self.commands = _Commands(connection)
        self.silences = _Silences(connection)
        self.receivers = _Receivers(connection)


class _Page(msgspec.Struct):
    items: list[msgspec.Raw]
    next_cursor: str | None = None


class _Resource:
    def __init__(self, connection: RestConnection) -> None:
        self._connection = connection

    def _one(self, form: type[Result], method: str, path: str, **how: Any) -> Result:
        return _read(self._connection.request(method, f"/api/v1/{path}", **how), form)

    def _all(self, form: type[Result], path: str, **query: Any) -> Iterator[Result]:
        """Items page by page, as they are asked for."""
        cursor: str | None = ""
        while cursor is not None:
            page = self._one(_Page, "GET", path, query={**query, "limit": PAGE_ITEMS, "cursor": cursor or None})
            for item in page.items:
                yield decoded(item, form)
            cursor = page.next_cursor


class _Jobs(_Resource):
    def list(
        self,
        *,
        name: Texts = None,
        state: Texts = None,
        project: Texts = None,
        owner: Texts = None,
        host: Texts = None,
        since: datetime | None = None,
        until: datetime | None = None,
        order: str = "seen",
    ) -> Iterator[Job]:
        """Jobs that match all filters, those that were seen last first."""
        filters: dict[str, Any] = {"name": name, "state": state, "project": project, "owner": owner, "host": host}
        return self._all(Job, "jobs", **filters, **_times(since, until), order=order)

    def get(self, name: str) -> JobDetail:
        """One job."""
        return _job(self._connection.request("GET", f"/api/v1/jobs/{_part(name)}"))

    def edit(self, job: JobDetail, *, project: str | None = None, owner: str | None = None) -> JobDetail:
        """Change a job's project or owner, unless somebody else has since it was read (`RestError` with status 412)."""
        body = {name: value for name, value in (("project", project), ("owner", owner)) if value is not None}
        path = f"/api/v1/jobs/{_part(job.name)}"
        self._connection.request("PATCH", path, body=body, if_match=job.etag)
        return self.get(job.name)


class _Incidents(_Resource):
    def list(
        self,
        *,
        job: Texts = None,
        state: Texts = None,
        kind: Texts = None,
        severity: Texts = None,
        project: Texts = None,
        rank: int | Sequence[int] | None = None,
        host: Texts = None,
        device: Texts = None,
        attempt: Texts = None,
        search: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        order: str = "newest",
    ) -> Iterator[Incident]:
        """Incidents that match all filters and overlap the time from `since` to `until`."""
        filters: dict[str, Any] = {
            "job": job,
            "state": state,
            "kind": kind,
            "severity": severity,
            "project": project,
            "rank": rank,
        }
        more: dict[str, Any] = {"host": host, "device": device, "attempt": attempt, "search": search, "order": order}
        return self._all(Incident, "incidents", **filters, **more, **_times(since, until))

    def get(self, incident: str) -> IncidentDetail:
        """One incident, by its id or its short id."""
        return self._one(IncidentDetail, "GET", f"incidents/{_part(incident)}")

    def acknowledge(self, incident: str, text: str = "") -> Incident:
        """Acknowledge it: somebody works on it."""
        return self._one(Incident, "POST", f"incidents/{_part(incident)}/acknowledge", body={"text": text})

    def resolve(self, incident: str, text: str = "") -> Incident:
        """Resolve it."""
        return self._one(Incident, "POST", f"incidents/{_part(incident)}/resolve", body={"text": text})

    def feedback(self, incident: str, answer: str) -> Incident:
        """Rate it as `useful`, `noise` or a `duplicate`."""
        return self._one(Incident, "PUT", f"incidents/{_part(incident)}/feedback", body={"answer": answer})

    def watch(
        self, job: Texts = None, on_break: Callable[[RestError], None] = lambda _: None
    ) -> Iterator[IncidentChange]:
        """Changes as they happen, without end. After a lost connection those that were missed follow.

        Args:
            job: only incidents of these jobs.
            on_break: receives the reason for which a connection was lost.
        """
        for event in self._connection.changes(on_break, job):
            if event.topic == "reset":
                yield IncidentChange("reset")
            elif event.topic == "incident":
                yield converted(event.data, IncidentChange)


class _Commands(_Resource):
    def request(
        self,
        job: str,
        action: str,
        *,
        params: Mapping[str, Any] | None = None,
        reason: str = "",
        incident: str | None = None,
        expires_s: float | None = None,
    ) -> Command:
        """Request a command of a job: pause, resume, checkpoint, rollback, stop, relaunch or trace."""
        body: dict[str, Any] = {"action": action, "params": dict(params or {}), "reason": reason, "incident": incident}
        body |= {"expires_s": expires_s} if expires_s is not None else {}
        return self._one(Command, "POST", f"jobs/{_part(job)}/commands", body=body)

    def list(
        self,
        *,
        job: Texts = None,
        state: Texts = None,
        action: Texts = None,
        incident: Texts = None,
        attempt: Texts = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Iterator[Command]:
        """Commands that match all filters, newest first."""
        filters: dict[str, Any] = {
            "job": job,
            "state": state,
            "action": action,
            "incident": incident,
            "attempt": attempt,
        }
        return self._all(Command, "commands", **filters, **_times(since, until))

    def get(self, command: str) -> Command:
        """One command."""
        return self._one(Command, "GET", f"commands/{_part(command)}")

    def cancel(self, command: str) -> Command:
        """Cancel a command that has not been sent yet."""
        return self._one(Command, "POST", f"commands/{_part(command)}/cancel", body={})

    def wait(self, command: str, timeout_s: float = 120.0) -> Command:
        """Wait until a command has ended, in whatever way.

        Raises:
            TimeoutError: it has not within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while (found := self.get(command)).state not in FINAL_STATES:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"command {command} is still {found.state} after {timeout_s:g} s")
            time.sleep(POLL_S)
        return found


class _Silences(_Resource):
    def list(self, *, active: bool | None = None) -> Iterator[Silence]:
        """Silences, or only those that are in force or not."""
        return self._all(Silence, "silences", active=active)

    def add(
        self,
        comment: str,
        ends_at: datetime,
        *,
        job: str = "",
        kind: str = "",
        scope: str = "",
        matchers: Sequence[str] = (),
        starts_at: datetime | None = None,
    ) -> Silence:
        """Create a silence for matching incidents until `ends_at`."""
        body: dict[str, Any] = {"comment": comment, "job": job, "kind": kind, "scope": scope, "matchers": [*matchers]}
        body |= {"ends_unix_ns": _unix_ns(ends_at), "starts_unix_ns": _unix_ns(starts_at)}
        return self._one(Silence, "POST", "silences", body=body)

    def expire(self, silence: str) -> None:
        """End a silence."""
        self._connection.request("DELETE", f"/api/v1/silences/{_part(silence)}")


class _Receivers(_Resource):
    def list(self) -> Iterator[Receiver]:
        """All receivers."""
        return self._all(Receiver, "receivers")


def _read(reply: RestReply, form: type[Result]) -> Result:
    try:
        return decoded(reply.content, form)
    except ValueError as error:
        remedy = "is it the URL of rankwatch, and a version that knows this operation?"
        raise RestError(reply.status, "unknown answer", f"the answer cannot be read: {error}", remedy) from error


def _job(reply: RestReply) -> JobDetail:
    return msgspec.structs.replace(_read(reply, JobDetail), etag=reply.headers.get("etag", ""))


def _part(name: str) -> str:
    return quote(name, safe="")


def _times(since: datetime | None, until: datetime | None) -> dict[str, int | None]:
    return {"from_unix_ns": _unix_ns(since), "to_unix_ns": _unix_ns(until)}


def _unix_ns(at: datetime | None) -> int | None:
    """Nanoseconds since the epoch; a time without a zone is local time, as Python has it."""
    return None if at is None else (at.astimezone(UTC) - EPOCH) // timedelta(microseconds=1) * 1000
