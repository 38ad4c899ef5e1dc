"""Puts incidents into groups and decides when which receiver is notified of which group, as Alertmanager does.

The caller tells the time, stores what changes and sends the messages. An acknowledged incident is not escalated, and a
group in which every open incident is acknowledged is not repeated; both have no equal in Alertmanager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rankwatch_service.labels.incident_labels import incident_labels
from rankwatch_service.labels.matcher import Labels
from rankwatch_service.routing.group import Group, GroupMember, GroupMessage, LastMessage, MessageReason
from rankwatch_service.routing.inhibition import inhibited
from rankwatch_service.routing.member_summary import brief
from rankwatch_service.routing.route import Route, Routing

Silenced = Callable[[Labels], bool]
"""Whether a silence mutes an incident with these labels now."""


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What one flush has led to."""

    messages: tuple[GroupMessage, ...]
    changed: tuple[Group, ...]
    """Groups whose state is to be stored."""
    removed: tuple[str, ...]
    """Keys of groups that have ended."""


class IncidentGroups:
    """The groups of all incidents that are open, and of those whose end has not been reported yet."""

    def __init__(self, routing: Routing, groups: Iterable[Group], now_unix_ns: int) -> None:
        """Continue with stored groups. Those that the present routes would not make send nothing more.

        Open incidents join the groups that the present routes give them, if they are not in them yet.
        """
        self._routing = routing
        self._routes = {route.key: route for route in routing.root.walk()}
        stored = list(groups)
        self.groups = {group.key: group for group in stored if self._makes(group)}
        for group in stored:
            for member in group.members.values():
                if member.is_open:
                    self._join(member, group.began_unix_ns, now_unix_ns)

    def take(self, data: Mapping[str, Any], at_unix_ns: int, now_unix_ns: int) -> set[str]:
        """Apply one transition of an incident.

        Args:
            data: the field `data` of its message.
            at_unix_ns: when it happened.
            now_unix_ns: the time.

        Returns:
            Keys of the groups that changed.
        """
        member = GroupMember(
            data["id"],
            incident_labels(data),
            brief(data),
            is_open=data["state"] != "resolved",
            is_acknowledged=data["state"] == "acknowledged",
        )
        changed = self._update(member)
        return changed | (self._join(member, at_unix_ns, now_unix_ns) if member.is_open else set())

    def forget(self, incident_ids: Collection[str]) -> set[str]:
        """Drop incidents that were deleted; returns the keys of the groups that changed."""
        changed = set()
        for group in self.groups.values():
            for incident_id in group.members.keys() & set(incident_ids):
                del group.members[incident_id]
                changed.add(group.key)
        return changed

    def members(self) -> set[str]:
        """Ids of all incidents in groups."""
        return {incident_id for group in self.groups.values() for incident_id in group.members}

    def flush(self, now_unix_ns: int, silenced: Silenced) -> FlushResult:
        """Send what is due.

        Args:
            now_unix_ns: the time.
            silenced: tells which incidents are muted by people.
        """
        messages: list[GroupMessage] = []
        changed: list[Group] = []
        removed: list[str] = []
        sources = [
            member.labels for group in self.groups.values() for member in group.members.values() if member.is_open
        ]
        for group in list(self.groups.values()):
            route = self._routes[group.route_key]
            is_due = now_unix_ns >= group.next_flush_unix_ns
            if not is_due and not route.escalations:
                continue
            sent = list(self._flush(group, route, now_unix_ns, is_due, sources, silenced))
            messages += sent
            if is_due:
                self._end_flush(group, route, now_unix_ns)
            if not group.members and is_due:
                del self.groups[group.key]
                removed.append(group.key)
            elif is_due or sent:
                changed.append(group)
        return FlushResult(tuple(messages), tuple(changed), tuple(removed))

    def _flush(
        self,
        group: Group,
        route: Route,
        now_unix_ns: int,
        is_due: bool,
        sources: list[dict[str, str]],
        silenced: Silenced,
    ) -> Iterator[GroupMessage]:
        if self._routing.muted_by_time(route, now_unix_ns / 1e9):
            return
        told = [
            member
            for member in group.members.values()
            if not inhibited(self._routing.inhibit_rules, member.labels, sources) and not silenced(member.labels)
        ]
        if not told:
            return
        if is_due and route.receiver:
            reason = group.reason(route.receiver, told, now_unix_ns, route.repeat_interval_s)
            if reason is not None:
                yield _message(group, route.receiver, told, reason, now_unix_ns)
                for member in told:
                    member.notified_unix_ns = member.notified_unix_ns or now_unix_ns
        for escalation in route.escalations:
            late = _escalated(group, escalation.receiver, told, now_unix_ns - int(escalation.after_s * 1e9))
            reason = group.reason(escalation.receiver, late, now_unix_ns, route.repeat_interval_s)
            if reason in (MessageReason.FIRST, MessageReason.NEW):
                yield _message(group, escalation.receiver, late, MessageReason.ESCALATED, now_unix_ns)
            elif reason is not None and is_due:
                yield _message(group, escalation.receiver, late, reason, now_unix_ns)

    def _end_flush(self, group: Group, route: Route, now_unix_ns: int) -> None:
        """Set the time of the next flush and drop incidents whose end has been dealt with."""
        interval_ns = int(route.group_interval_s * 1e9)
        late_ns = now_unix_ns - group.next_flush_unix_ns
        group.has_flushed = True
        group.next_flush_unix_ns += (late_ns // interval_ns + 1) * interval_ns
        group.members = {name: member for name, member in group.members.items() if member.is_open}

    def _makes(self, group: Group) -> bool:
        route = self._routes.get(group.route_key)
        return route is not None and any(route.group_key(one.labels) == group.key for one in group.members.values())

    def _update(self, new: GroupMember) -> set[str]:
        """Update an incident in the groups that have it. Those that it has left unnoticed forget it."""
        stays = {route.group_key(new.labels) for route in self._routing.root.matching(new.labels)}
        changed = set()
        for group in self.groups.values():
            member = group.members.get(new.incident_id)
            if member is None:
                continue
            changed.add(group.key)
            if group.key not in stays and member.notified_unix_ns is None:
                del group.members[new.incident_id]
                continue
            member.brief, member.is_open, member.is_acknowledged = new.brief, new.is_open, new.is_acknowledged
            if group.key in stays and new.is_open:
                member.labels = new.labels
        return changed

    def _join(self, member: GroupMember, at_unix_ns: int, now_unix_ns: int) -> set[str]:
        """Add an open incident to the groups that its labels give it."""
        changed = set()
        for route in self._routing.root.matching(member.labels):
            key = route.group_key(member.labels)
            due_unix_ns = max(at_unix_ns + int(route.group_wait_s * 1e9), now_unix_ns)
            group = self.groups.get(key)
            if group is None:
                group = Group(key, route.key, route.group_labels(member.labels), at_unix_ns, due_unix_ns)
                self.groups[key] = group
            elif not group.has_flushed:
                group.next_flush_unix_ns = min(group.next_flush_unix_ns, due_unix_ns)
            if member.incident_id not in group.members:
                group.members[member.incident_id] = GroupMember(
                    member.incident_id, member.labels, member.brief, is_acknowledged=member.is_acknowledged
                )
            changed.add(key)
        return changed


def _escalated(group: Group, receiver: str, told: Iterable[GroupMember], before_unix_ns: int) -> list[GroupMember]:
    """The members that concern the receiver of an escalation: nobody has acknowledged them in time, or it was told."""
    last = group.last.get(receiver)
    known = last.incidents if last else frozenset()
    return [
        member
        for member in told
        if member.incident_id in known
        or (
            member.is_open
            and not member.is_acknowledged
            and member.notified_unix_ns is not None
            and member.notified_unix_ns <= before_unix_ns
        )
    ]


def _message(
    group: Group, receiver: str, members: Iterable[GroupMember], reason: MessageReason, now_unix_ns: int
) -> GroupMessage:
    still_open = tuple(member for member in members if member.is_open)
    resolved = tuple(member for member in members if not member.is_open)
    group.flushes += 1
    group.last[receiver] = LastMessage(
        now_unix_ns,
        frozenset(member.fingerprint for member in still_open),
        frozenset(member.fingerprint for member in resolved),
        frozenset(member.incident_id for member in still_open),
    )
    return GroupMessage(
        group.message_id(receiver),
        receiver,
        group.key,
        group.flushes,
        reason,
        group.labels,
        still_open,
        resolved,
        now_unix_ns,
    )
