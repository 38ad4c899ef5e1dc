"""What the routes in force send about an incident, and why: their answers, and the messages that the outbox has."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Final

import msgspec
from sqlalchemy import Connection, RowMapping, select

from rankwatch_service.api.routes.incidents.incidents import Notification, notifications_where
from rankwatch_service.labels.incident_labels import incident_labels
from rankwatch_service.notify.router import SETTING
from rankwatch_service.policy.control_records import JobProject, ReceiverRoute, SilenceSet
from rankwatch_service.policy.messages.receiver_reasons import why_sent
from rankwatch_service.policy.notification import iso_time
from rankwatch_service.policy.routing import UNGROUPED, mutes
from rankwatch_service.routing.group import Group
from rankwatch_service.routing.route import Routing
from rankwatch_service.routing.route_reasons import RoutedIncident, RouteReason, route_reasons
from rankwatch_service.routing.written_routes import read_routes
from rankwatch_service.store.models import IncidentGroup, Outbox, Setting, Silence

MESSAGES_READ_MAX: Final = 200
"""Newest messages of a group that are searched for an incident."""


def routing_in_force(connection: Connection) -> Routing | None:
    """The routes of the notifier; None: none are configured."""
    stored = connection.scalar(select(Setting.value).where(Setting.name == SETTING)) or {}
    return read_routes(stored["text"]) if stored.get("is_grouped") else None


def reasons_by_routes(
    connection: Connection, routing: Routing, row: RowMapping, whose: JobProject, now_unix_ns: int
) -> list[RouteReason]:
    """What each route that takes an incident does with it now.

    Args:
        connection: for the groups and silences.
        routing: in force.
        row: of the incident.
        whose: project and owner of its job.
        now_unix_ns: the time.
    """
    labels = incident_labels({**row, "project": whose.project, "owner": whose.owner})
    query = select(IncidentGroup.state).order_by(IncidentGroup.key)
    if not routing.inhibit_rules:
        query = query.where(IncidentGroup.key.in_({route.group_key(labels) for route in routing.root.matching(labels)}))
    groups = [msgspec.convert(state, Group) for state in connection.scalars(query)]
    active = connection.execute(select(Silence.__table__).where(Silence.ends_unix_ns > now_unix_ns)).mappings()
    silences = [msgspec.convert(dict(one), SilenceSet) for one in active]
    incident = RoutedIncident(
        row["id"],
        labels,
        is_open=row["state"] != "resolved",
        acknowledged_by=row["acknowledged_by"] or "" if row["state"] == "acknowledged" else "",
        silences=tuple(sorted(one.id for one in silences if mutes(one, labels, now_unix_ns))),
    )
    return list(route_reasons(routing, {group.key: group for group in groups}, incident, now_unix_ns))


def newest_messages(
    connection: Connection, group_keys: Collection[str], row: RowMapping
) -> dict[tuple[str, str], Notification]:
    """The newest message that lists an incident, by group and receiver."""
    query = (
        select(Outbox.id, Outbox.group_key, Outbox.receiver, Outbox.body)
        .where(Outbox.group_key.in_(group_keys), Outbox.receiver != UNGROUPED)
        .where(Outbox.created_unix_ns >= row["onset_unix_ns"])
        .order_by(Outbox.created_unix_ns.desc(), Outbox.transition.desc())
        .limit(MESSAGES_READ_MAX)
    )
    ids: dict[str, tuple[str, str]] = {}
    for id_, group_key, receiver, body in connection.execute(query):
        listed = json.loads(body)["data"]["incidents"]
        if (group_key, receiver) not in ids.values() and any(one["id"] == row["id"] for one in listed):
            ids[id_] = (group_key, receiver)
    return {ids[one.id]: one for one in notifications_where(connection, Outbox.id.in_(ids))}


def routed_why(reason: RouteReason, message: Notification | None, receivers: Mapping[str, ReceiverRoute]) -> str:
    """Sentence about one receiver of one route.

    Args:
        reason: what the routes say.
        message: the newest one to this receiver that lists the incident; None: there is none.
        receivers: all of them, by name.
    """
    if message is not None:
        how = f"in the message of its group at {iso_time(message.created_unix_ns)}"
        sent = why_sent(message.state, message.error, message.tries, how)
    elif reason.notified_unix_ns is not None:
        sent = (
            f"in a message of its group at {iso_time(reason.notified_unix_ns)}, which is no longer kept or lists others"
        )
    else:
        sent = "not sent"
    parts = [sent, reason.outlook]
    if reason.receiver and reason.receiver not in receivers:
        parts.append("there is no receiver of this name")
    elif reason.receiver and not receivers[reason.receiver].enabled:
        parts.append("the receiver is disabled")
    return f"{'; '.join(parts)} (route {reason.route}, group {reason.group.removeprefix(reason.route + ':')})"
