"""Why each receiver was notified of an incident, or why not."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.job_projects import project_of
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.incidents import find_incident, notifications_about
from rankwatch_service.labels import incident_labels
from rankwatch_service.notify.receivers import receiver_routes
from rankwatch_service.policy.routing import objection, why_sent
from rankwatch_service.store.engine import read

router = APIRouter(prefix="/incidents", tags=["notifications"])

NO_CHANGE: Final = "nothing has changed since the receiver would get it; it gets the next change"

Reader = Annotated[Identity, Depends(Require(Scope.READ))]


class ReceiverReason(ApiReply):
    """What one receiver was sent about an incident, and why."""

    receiver: str
    transition: int | None
    """The transition of the incident that it was notified of; null: none."""
    state: str
    """delivered, waiting, failed, silenced, unneeded, or none: there is no notification."""
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
            why=why_sent(one.state, one.error, one.tries, one.created_unix_ns, context.clock.unix_ns()),
        )
        for one in about
    ]
    labels = incident_labels({**row, "project": whose.project, "owner": whose.owner})
    kinds = {row["kind"], *(one["kind"] for one in row["consequences"])}
    named = {one.receiver for one in found}
    found += [
        ReceiverReason(
            receiver=receiver.name,
            transition=None,
            state="none",
            why=f"not sent: {objection(receiver, labels, kinds) or NO_CHANGE}",
        )
        for receiver in receivers
        if receiver.name not in named
    ]
    return ReceiverReasons(items=sorted(found, key=lambda one: (one.receiver, one.transition or 0)))
