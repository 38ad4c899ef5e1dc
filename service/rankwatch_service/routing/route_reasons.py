"""Whom the routes send an incident to, what its next message waits for, or why there is none: for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rankwatch_service.labels.matcher import Labels
from rankwatch_service.policy.notification import iso_time
from rankwatch_service.routing.group import Group, GroupMember, LastMessage
from rankwatch_service.routing.route import Escalation, Route, Routing


@dataclass(frozen=True, slots=True)
class RoutedIncident:
    """What routes decide by."""

    id: str
    labels: Labels
    is_open: bool
    acknowledged_by: str
    """Empty: nobody has acknowledged it."""
    silences: tuple[str, ...] = ()
    """Ids of the silences that mute it now."""


@dataclass(frozen=True, slots=True)
class RouteReason:
    """What one receiver of one route is sent about an incident, and why."""

    receiver: str
    """Empty: nobody."""
    route: str
    """Its place in the tree, by the matchers on the way."""
    group: str
    """Key of the group."""
    notified_unix_ns: int | None
    """Time of the newest message to the receiver that had the incident as unresolved; None: unknown, or there is
    none."""
    outlook: str
    """What the next message waits for, or why there is none."""


def route_reasons(
    routing: Routing, groups: Mapping[str, Group], incident: RoutedIncident, now_unix_ns: int
) -> Iterator[RouteReason]:
    """One answer for the receiver of each route that takes the incident, and one for each of its escalations.

    Args:
        routing: in force.
        groups: by their keys: those of the incident, and where there are inhibit rules, all.
        incident: as it is now.
        now_unix_ns: the time.
    """
    for route in routing.root.matching(incident.labels):
        key = route.group_key(incident.labels)
        group = groups.get(key)
        muted = "; ".join(_muting(routing, route, groups, incident, now_unix_ns))
        for escalation in (None, *route.escalations):
            receiver = escalation.receiver if escalation else route.receiver
            last = _last_message(group, receiver, incident.id)
            if not receiver:
                outlook = "the route names no receiver"
            elif muted and incident.is_open:
                outlook = muted
            else:
                outlook = _outlook(route, escalation, group, last, incident)
            yield RouteReason(receiver, route.key, key, last.at_unix_ns if last else None, outlook)


def _muting(
    routing: Routing, route: Route, groups: Mapping[str, Group], incident: RoutedIncident, now_unix_ns: int
) -> Iterator[str]:
    """All that keeps the incident from being sent now."""
    if time := routing.muted_by_time(route, now_unix_ns / 1e9):
        yield f"the route is {time}"
    for silence in incident.silences:
        yield f"muted by the silence {silence}"
    for group in groups.values():
        for source in group.members.values():
            if source.is_open and any(rule.inhibits(source.labels, incident.labels) for rule in routing.inhibit_rules):
                yield f"inhibited while the incident {source.incident_id} ({source.labels['kind']}) is unresolved"
                return


def _last_message(group: Group | None, receiver: str, incident_id: str) -> LastMessage | None:
    last = group.last.get(receiver) if group else None
    return last if last and incident_id in last.incidents else None


def _outlook(
    route: Route,
    escalation: Escalation | None,
    group: Group | None,
    last: LastMessage | None,
    incident: RoutedIncident,
) -> str:
    """What the next message waits for, where nothing mutes it."""
    member = group.members.get(incident.id) if group else None
    if not incident.is_open:
        due = f", and its group is told so at {iso_time(group.next_flush_unix_ns)}" if group and member and last else ""
        return f"it is resolved{due}"
    if group is None or member is None:
        return "the notifier has not put it into a group yet"
    if last is not None and member.fingerprint in last.open:
        if incident.acknowledged_by:
            return f"not repeated for it: acknowledged by {incident.acknowledged_by}"
        repeated_unix_ns = last.at_unix_ns + int(route.repeat_interval_s * 1e9)
        return f"repeated after {iso_time(repeated_unix_ns)} unless it is acknowledged"
    if escalation is not None and last is None:
        return _escalation_outlook(escalation, member, incident)
    waits = (
        f"group_interval {route.group_interval_s:g} s" if group.has_flushed else f"group_wait {route.group_wait_s:g} s"
    )
    return f"the next message of its group is due at {iso_time(group.next_flush_unix_ns)} ({waits})"


def _escalation_outlook(escalation: Escalation, member: GroupMember, incident: RoutedIncident) -> str:
    if incident.acknowledged_by:
        return f"not escalated: acknowledged by {incident.acknowledged_by}"
    if member.notified_unix_ns is None:
        return f"escalated {escalation.after_s:g} s after the first message, unless it is acknowledged by then"
    due_unix_ns = member.notified_unix_ns + int(escalation.after_s * 1e9)
    return f"escalated at {iso_time(due_unix_ns)}, unless it is acknowledged by then"
