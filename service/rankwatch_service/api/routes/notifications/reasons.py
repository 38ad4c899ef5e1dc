"""Why each receiver was notified of an incident, or why not."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from sqlalchemy import RowMapping

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.job_projects import project_of
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.incidents.incidents import find_incident, notifications_about
from rankwatch_service.notify.receivers import receiver_routes
from rankwatch_service.policy.control_records import ReceiverRoute
from rankwatch_service.policy.messages.receiver_reasons import IncidentTraits, why_not_sent, why_sent
from rankwatch_service.store.engine import read

router = APIRouter(prefix="/incidents", tags=["notifications"])

Reader = Annotated[Identity, Depends(Require(Scope.READ))]


class ReceiverReason(ApiReply):
    """What one receiver was sent about an incident, and why."""

    receiver: str
    transition: int | None
    """The transition of the incident that it was notified of; null: none."""
    state: str
    """delivered, waiting, failed, silenced, or none: there is no notification."""
    why: str


class ReceiverReasons(ApiReply):
    """All receivers, by name, and for each one the transitions in their order."""

    items: list[ReceiverReason]


@router.get("/{incident_id}/receivers")
def list_reasons(incident_id: str, context: Ctx, identity: Reader) -> ReceiverReasons:
    """Why each receiver was notified of an incident, or why not.

    Receivers without a notification are left out for tokens that are restricted to some jobs.
    """
    with read(context.engine) as connection:
        row = find_incident(connection, incident_id, identity)
        about = [one for one in notifications_about(connection, row["id"]) if not one.command_id]
        receivers = receiver_routes(connection) if identity.jobs.every else ()
        whose = project_of(connection, row["job"])
    found = [
        ReceiverReason(
            receiver=one.receiver,
            transition=one.transition,
            state=one.state,
            why=why_sent(one.state, one.error, one.tries),
        )
        for one in about
    ]
    named = {one.receiver for one in found}
    found += [
        ReceiverReason(
            receiver=receiver.name,
            transition=None,
            state="none",
            why=_why_not(receiver, row, whose.project),
        )
        for receiver in receivers
        if receiver.name not in named
    ]
    return ReceiverReasons(items=sorted(found, key=lambda one: (one.receiver, one.transition or 0)))


def _why_not(receiver: ReceiverRoute, row: RowMapping, project: str) -> str:
    kinds = {row["kind"], *(one["kind"] for one in row["consequences"])}
    return why_not_sent(receiver, IncidentTraits(row["job"], project, row["severity"], kinds))
