"""Decides who is notified of an incident, and with what. Pure; stream calls it and stores what it returns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rankwatch_detectors.scope import IncidentScope
from rankwatch_service.incidents.transition import Transition
from rankwatch_service.incidents.version import IncidentVersion
from rankwatch_service.policy.control_records import ReceiverRoute, SilenceSet
from rankwatch_service.policy.notification import MESSAGE_TYPES, incident_message, message_id


@dataclass(frozen=True, slots=True)
class Routed:
    """One receiver that an incident concerns, and the silence that mutes it, if one does."""

    receiver: str
    silence_id: str | None


@dataclass(frozen=True, slots=True)
class Notification:
    """One message to one receiver about one transition."""

    id: str
    """Derived, so that the same notification is stored once, however often it is composed."""
    receiver: str
    incident_id: str
    transition: int
    body: bytes
    """JSON {type, timestamp, data}."""
    silenced: bool
    """It is kept to show why nobody was notified, and never delivered."""
    created_unix_ns: int
    """It is due from this time on."""


def receivers_for(
    incident: IncidentVersion, receivers: Iterable[ReceiverRoute], silences: Iterable[SilenceSet], now_unix_ns: int
) -> list[Routed]:
    """Name the receivers that this incident concerns, in order of their names.

    A receiver's empty list of kinds, severities or jobs matches all; receivers that are not enabled are left out. The
    kinds of an incident's consequences count too: whoever subscribes to hangs is notified of one that a slow rank has
    caused. A silence mutes from its start up to, not including, its end; the receiver is still named so that the
    outbox can show why it was not notified.
    """
    muting = [silence.id for silence in silences if mutes(silence, incident, now_unix_ns)]
    # Any of them would do; the least id is the same in every replay.
    silence_id = min(muting, default=None)
    concerned = sorted(receiver.name for receiver in receivers if _concerns(receiver, incident))
    return [Routed(name, silence_id) for name in concerned]


def mutes(silence: SilenceSet, incident: IncidentVersion, now_unix_ns: int) -> bool:
    """Whether a silence mutes an incident now.

    A scope "host:NAME" or "rank:N" also mutes incidents that lie wholly on that host or rank, whatever their own scope.
    """
    if not silence.starts_unix_ns <= now_unix_ns < silence.ends_unix_ns:
        return False
    if silence.job not in ("", incident.job) or silence.kind not in ("", incident.kind):
        return False
    return (
        silence.scope in ("", str(incident.scope))
        or [silence.scope] == [str(IncidentScope.of_host(host)) for host in incident.hosts]
        or [silence.scope] == [str(IncidentScope.of_rank(rank)) for rank in incident.ranks]
    )


def notifications(
    transition: Transition,
    receivers: Iterable[ReceiverRoute],
    silences: Iterable[SilenceSet],
    links: Mapping[str, str],
    now_unix_ns: int,
    told_to: Collection[str] | None = None,
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
        told_to: names of the receivers that were notified of the incident before; None: unknown, and taken as all.
    """
    incident = transition.incident
    if transition.what not in MESSAGE_TYPES:
        return []
    routed = receivers_for(incident, receivers, silences, now_unix_ns)
    new = set() if told_to is None else {route.receiver for route in routed} - set(told_to)
    if transition.what == "resolved":
        routed = [route for route in routed if route.receiver not in new]
    bodies = {first: incident_message(transition, links, first=first) for first in {r.receiver in new for r in routed}}
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


def _concerns(receiver: ReceiverRoute, incident: IncidentVersion) -> bool:
    return bool(
        receiver.enabled
        and (not receiver.kinds or incident.kinds & set(receiver.kinds))
        and (not receiver.severities or incident.severity in receiver.severities)
        and (not receiver.jobs or incident.job in receiver.jobs)
    )
