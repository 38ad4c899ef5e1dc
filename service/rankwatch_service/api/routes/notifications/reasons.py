"""Why each receiver was notified of an incident, or why not."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from sqlalchemy import RowMapping, select

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.job_projects import project_of
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.incidents.incidents import Notification, find_incident, notifications_about
from rankwatch_service.api.routes.notifications.routed import (
    newest_messages,
    reasons_by_routes,
    routed_why,
    routing_in_force,
)
from rankwatch_service.notify.receivers import receiver_routes
from rankwatch_service.policy.control_records import ReceiverRoute
from rankwatch_service.policy.messages.receiver_reasons import NOT_ROUTED, IncidentTraits, why_not_sent, why_sent
from rankwatch_service.policy.notification import iso_time
from rankwatch_service.routing.route_reasons import RouteReason
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Outbox

router = APIRouter(prefix="/incidents", tags=["notifications"])

Reader = Annotated[Identity, Depends(Require(Scope.READ))]


class ReceiverReason(ApiReply):
    """What one receiver was sent about an incident, and why."""

    receiver: str
    """Empty: the route names none, so that nobody is notified."""
    transition: int | None
    """The transition of the incident that it was notified of; null: none, or a message of a group."""
    state: str
    """delivered, waiting, failed, silenced, or none: there is no notification."""
    why: str
    route: str = ""
    """The route that takes the incident, by the matchers on the way to it; empty: no route does."""
    group: str = ""
    """The group of the incident under that route."""


class ReceiverReasons(ApiReply):
    """All receivers, by name, and for each one the transitions in their order."""

    items: list[ReceiverReason]


@router.get("/{incident_id}/receivers")
def list_reasons(incident_id: str, context: Ctx, identity: Reader) -> ReceiverReasons:
    """Why each receiver was notified of an incident, or why not.

    Where routes are configured, there is an answer for each receiver of a route that takes the incident, and of its
    escalations: what was sent last, what the next message waits for, and what mutes it. Receivers without a
    notification are left out for tokens that are restricted to some jobs.
    """
    with read(context.engine) as connection:
        row = find_incident(connection, incident_id, identity)
        about = [one for one in notifications_about(connection, row["id"]) if not one.command_id]
        query = select(Outbox.id, Outbox.group_key).where(Outbox.incident_id == row["id"], Outbox.group_key != "")
        group_keys = {one.id: one.group_key for one in connection.execute(query)}
        receivers = {one.name: one for one in receiver_routes(connection)} if identity.jobs.every else {}
        whose = project_of(connection, row["job"])
        routing = routing_in_force(connection) if identity.jobs.every else None
        routed: list[RouteReason] = []
        messages: dict[tuple[str, str], Notification] = {}
        if routing is not None:
            routed = reasons_by_routes(connection, routing, row, whose, context.clock.unix_ns())
            messages = newest_messages(connection, {one.group for one in routed}, row)
    answered = {(one.group, one.receiver) for one in routed}
    found = [
        _sent(one, group_keys.get(one.id, ""))
        for one in about
        if (group_keys.get(one.id), one.receiver) not in answered
    ]
    found += [_routed(one, messages.get((one.group, one.receiver)), receivers) for one in routed]
    named = {one.receiver for one in found}
    found += [
        ReceiverReason(
            receiver=receiver.name,
            transition=None,
            state="none",
            why=_why_not(receiver, row, whose.project) if routing is None else NOT_ROUTED,
        )
        for receiver in receivers.values()
        if receiver.name not in named
    ]
    return ReceiverReasons(items=sorted(found, key=lambda one: (one.receiver, one.transition or 0)))


def _sent(one: Notification, group_key: str) -> ReceiverReason:
    """A notification under the incident; the number of a group's message is no transition."""
    if not group_key:
        why = why_sent(one.state, one.error, one.tries)
        return ReceiverReason(receiver=one.receiver, transition=one.transition, state=one.state, why=why)
    how = f"in the message of its group at {iso_time(one.created_unix_ns)}"
    why = why_sent(one.state, one.error, one.tries, how)
    return ReceiverReason(receiver=one.receiver, transition=None, state=one.state, why=why, group=group_key)


def _routed(reason: RouteReason, message: Notification | None, receivers: dict[str, ReceiverRoute]) -> ReceiverReason:
    return ReceiverReason(
        receiver=reason.receiver,
        transition=None,
        state=message.state if message else "none",
        why=routed_why(reason, message, receivers),
        route=reason.route,
        group=reason.group,
    )


def _why_not(receiver: ReceiverRoute, row: RowMapping, project: str) -> str:
    kinds = {row["kind"], *(one["kind"] for one in row["consequences"])}
    return why_not_sent(receiver, IncidentTraits(row["job"], project, row["severity"], kinds))
