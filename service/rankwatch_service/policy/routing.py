"""Decides who is notified of an incident or a command, and with what. Pure: the caller stores what it returns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from rankwatch_service.incidents.transition import Transition
from rankwatch_service.incidents.version import IncidentVersion
from rankwatch_service.labels.incident_labels import incident_labels
from rankwatch_service.labels.matcher import Labels, match_all, parse_matchers
from rankwatch_service.policy.command import CommandRequest
from rankwatch_service.policy.control_records import JobProject, ReceiverRoute, SilenceSet
from rankwatch_service.policy.notification import (
    MESSAGE_TYPES,
    NOBODYS,
    command_message,
    incident_message,
    message_id,
)


@dataclass(frozen=True, slots=True)
class Routed:
    """One receiver that an incident concerns, and the silence that mutes it, if one does."""

    receiver: str
    silence_id: str | None


@dataclass(frozen=True, slots=True)
class Notification:
    """One message to one receiver about one transition of an incident, or about one command."""

    id: str
    """Derived, so that the same notification is stored once, however often it is composed."""
    receiver: str
    incident_id: str
    """Empty: a command without an incident."""
    transition: int
    """0: it is about a command."""
    body: bytes
    """JSON {type, timestamp, data}."""
    silenced: bool
    """It is kept to show why nobody was notified, and never delivered."""
    created_unix_ns: int
    """It is due from this time on."""
    command_id: str = ""
    """Empty: it is about an incident."""


def receivers_for(
    incident: IncidentVersion,
    receivers: Iterable[ReceiverRoute],
    silences: Iterable[SilenceSet],
    now_unix_ns: int,
    whose: JobProject = NOBODYS,
) -> list[Routed]:
    """Name the receivers that this incident concerns, in order of their names.

    A receiver's empty list of kinds, severities, jobs or projects matches all; receivers that are not enabled are left
    out. The kinds of an incident's consequences count too: whoever subscribes to hangs is notified of one that a slow
    rank has caused. A silence mutes from its start up to, not including, its end; the receiver is still named so that
    the outbox can show why it was not notified.
    """
    labels = labels_of(incident, whose)
    muting = [silence.id for silence in silences if mutes(silence, labels, now_unix_ns)]
    # Any of them would do; the least id is the same in every replay.
    silence_id = min(muting, default=None)
    concerned = sorted(receiver.name for receiver in receivers if _concerns(receiver, incident, whose.project))
    return [Routed(name, silence_id) for name in concerned]


def labels_of(incident: IncidentVersion, whose: JobProject = NOBODYS) -> dict[str, str]:
    """The labels of an incident of a job with this project and owner."""
    known = {name: getattr(incident, name) for name in ("kind", "severity", "job", "attempt", "scope")}
    places = {"hosts": incident.hosts, "ranks": incident.ranks}
    return incident_labels({**known, **places, "project": whose.project, "owner": whose.owner})


def mutes(silence: SilenceSet, labels: Labels, now_unix_ns: int) -> bool:
    """Whether a silence mutes an incident with these labels now.

    A scope "host:NAME" or "rank:N" also mutes incidents that lie wholly on that host or rank, whatever their own scope.
    """
    scopes = ("", labels["scope"], f"host:{labels.get('host')}", f"rank:{labels.get('rank')}")
    return (
        silence.starts_unix_ns <= now_unix_ns < silence.ends_unix_ns
        and silence.job in ("", labels["job"])
        and silence.kind in ("", labels["kind"])
        and silence.scope in scopes
        and all(match_all(parse_matchers(text), labels) for text in silence.matchers)
    )


def notifications(
    transition: Transition,
    receivers: Iterable[ReceiverRoute],
    silences: Iterable[SilenceSet],
    links: Mapping[str, str],
    now_unix_ns: int,
    told_to: Collection[str] = (),
    whose: JobProject = NOBODYS,
    world_size: int = 0,
    accelerated: bool = True,
) -> list[Notification]:
    """Compose the notifications of one transition: one for each receiver that it concerns, silenced ones included.

    Transitions for the pages only (acknowledged, commented, evidence) give none. A receiver that was not notified
    before, since the incident was not severe enough for it or was silenced, is notified that the incident opened, but
    not that it is resolved.

    Args:
        transition: with the incident as it is after it.
        receivers: all of them.
        silences: all of them.
        links: URLs of pages about the incident, by name.
        now_unix_ns: stream time.
        told_to: names of the receivers that were notified of the incident before.
        whose: project and owner of the job.
        world_size: ranks of the job; 0: unknown.
        accelerated: an hour of a rank is one of a GPU.
    """
    incident = transition.incident
    if transition.what not in MESSAGE_TYPES:
        return []
    routed = receivers_for(incident, receivers, silences, now_unix_ns, whose)
    new = {route.receiver for route in routed} - set(told_to)
    if transition.what == "resolved":
        routed = [route for route in routed if route.receiver not in new]
    firsts = {route.receiver in new for route in routed}
    bodies = {
        first: incident_message(transition, links, whose, world_size, accelerated, first=first) for first in firsts
    }
    return [
        Notification(
            id=message_id(incident.id, transition.number, route.receiver),
            receiver=route.receiver,
            incident_id=incident.id,
            transition=transition.number,
            body=bodies[route.receiver in new],
            silenced=route.silence_id is not None,
            created_unix_ns=now_unix_ns,
        )
        for route in routed
    ]


def command_notifications(
    request: CommandRequest,
    receivers: Iterable[ReceiverRoute],
    links: Mapping[str, str],
    incident: IncidentVersion | None = None,
    whose: JobProject = NOBODYS,
) -> list[Notification]:
    """Compose the notifications of a command that needs an approval; none for any other.

    Silences do not mute them: somebody waits for an answer.

    Args:
        request: the command.
        receivers: all of them.
        links: URLs of the pages on which it can be approved or seen, by name.
        incident: notify the receivers that it concerns; None: all receivers of the job, whatever kinds and severities
            they subscribe to.
        whose: project and owner of the job.
    """
    if not request.approval_required:
        return []
    body = command_message(request, links, whose)
    return [
        Notification(
            id=message_id(request.id, 0, receiver.name),
            receiver=receiver.name,
            incident_id=request.incident_id or "",
            transition=0,
            body=body,
            silenced=False,
            created_unix_ns=request.requested_unix_ns,
            command_id=request.id,
        )
        for receiver in sorted(receivers, key=attrgetter("name"))
        if (
            _is_of(receiver, request.job, whose.project)
            if incident is None
            else _concerns(receiver, incident, whose.project)
        )
    ]


def _concerns(receiver: ReceiverRoute, incident: IncidentVersion, project: str) -> bool:
    return bool(
        _is_of(receiver, incident.job, project)
        and (not receiver.kinds or incident.kinds & set(receiver.kinds))
        and (not receiver.severities or incident.severity in receiver.severities)
    )


def _is_of(receiver: ReceiverRoute, job: str, project: str) -> bool:
    return (
        receiver.enabled
        and (not receiver.jobs or job in receiver.jobs)
        and (not receiver.projects or project in receiver.projects)
    )
