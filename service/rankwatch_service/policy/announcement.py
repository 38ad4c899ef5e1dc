"""What receivers may be notified of: a change of an incident, or a command that a person has to know of. Pure.

Whoever decides the change writes its announcement in the same transaction, once; the notifier alone decides who gets
it (`notify.pipeline`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankwatch_service.incidents.model import IncidentVersion, Transition
from rankwatch_service.labels import Labels, incident_labels
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.policy.control_records import JobOwnership
from rankwatch_service.policy.notification import (
    APPROVAL_NEEDED,
    MESSAGE_TYPES,
    NOBODYS,
    NOT_APPROVED,
    command_data,
    incident_data,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """One change, with what decides who is notified of it, and the data of the message."""

    type: str
    """Type of the message: incident.opened, command.approval_needed and so on."""
    job: str
    """`ALL_JOBS`: a command to all jobs."""
    incident_id: str
    """Empty: a command without an incident."""
    transition: int = 0
    """Number of the incident's transition; 0: it is about a command."""
    command_id: str = ""
    """Empty: it is about an incident."""
    labels: Labels
    """Labels of the incident. A command without an incident has those of its job; a command to all jobs has none."""
    kinds: tuple[str, ...] = ()
    """The incident's kind and those of its consequences."""
    places: tuple[int | str, ...] = ()
    """The incident's ranks; its hosts if it has none, else its scope."""
    detected_unix_ns: int
    """When the incident was found, or the command requested."""
    at_unix_ns: int
    """Time of the change: stream time, or when the command was requested."""
    data: Mapping[str, Any]
    """Field `data` of the message, in JSON types."""


def incident_announcement(
    transition: Transition,
    links: Mapping[str, str],
    ownership: JobOwnership = NOBODYS,
    world_size: int = 0,
    accelerated: bool = True,
) -> Announcement | None:
    """The announcement of a transition; None for transitions for the pages only (acknowledged, commented, evidence).

    Args:
        transition: with the incident as it is after it.
        links: URLs of pages about the incident, by name.
        ownership: project and owner of the job.
        world_size: ranks of the job; 0: unknown.
        accelerated: an hour of a rank is one of a GPU.
    """
    incident = transition.incident
    if transition.what not in MESSAGE_TYPES:
        return None
    return Announcement(
        type=MESSAGE_TYPES[transition.what],
        job=incident.job,
        incident_id=incident.id,
        transition=transition.number,
        labels=labels_of(incident, ownership),
        kinds=_kinds(incident),
        places=tuple(incident.ranks or incident.hosts or (str(incident.scope),)),
        detected_unix_ns=incident.detected_unix_ns,
        at_unix_ns=transition.at_unix_ns,
        data=incident_data(transition, links, ownership, world_size, accelerated),
    )


def command_announcement(
    request: CommandRequest,
    links: Mapping[str, str],
    incident: IncidentVersion | None = None,
    ownership: JobOwnership = NOBODYS,
) -> Announcement | None:
    """The announcement of a command that needs an approval, or weakens approvals; None for any other.

    Args:
        request: the command.
        links: URLs of the pages on which it can be approved or seen, by name.
        incident: that it responds to; None: it concerns the job, or all jobs.
        ownership: project and owner of the job.
    """
    if not request.approval_required and request.job != ALL_JOBS:
        return None
    labels: Labels = {} if request.job == ALL_JOBS else {"job": request.job, "project": ownership.project}
    return Announcement(
        type=APPROVAL_NEEDED if request.approval_required else NOT_APPROVED,
        job=request.job,
        incident_id=request.incident_id or "",
        command_id=request.id,
        labels=labels if incident is None else labels_of(incident, ownership),
        kinds=() if incident is None else _kinds(incident),
        detected_unix_ns=request.requested_unix_ns,
        at_unix_ns=request.requested_unix_ns,
        data=command_data(request, links, ownership),
    )


def labels_of(incident: IncidentVersion, ownership: JobOwnership = NOBODYS) -> dict[str, str]:
    """The labels of an incident of a job with this project and owner."""
    known = {name: getattr(incident, name) for name in ("kind", "severity", "job", "attempt", "scope")}
    places = {"hosts": incident.hosts, "ranks": incident.ranks}
    return incident_labels({**known, **places, "project": ownership.project, "owner": ownership.owner})


def _kinds(incident: IncidentVersion) -> tuple[str, ...]:
    return tuple(sorted(map(str, incident.kinds)))
