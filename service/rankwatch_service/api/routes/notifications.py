"""Notifications and deliveries: list them, send one again, try a receiver; why a receiver was notified, or why not."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Query, Response
from sqlalchemy import Connection, RowMapping, Select, insert, select, update
from starlette.concurrency import run_in_threadpool

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.access.job_filter import project_of
from rankwatch_service.api.dependencies import Context, Ctx, IdempotencyDep, Require
from rankwatch_service.api.http.paging import Page, Wanted, any_of, fetch_page, full_ids
from rankwatch_service.api.http.problem import ProblemError, not_found
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.incidents import find_incident, last_error, notifications_about
from rankwatch_service.labels import incident_labels
from rankwatch_service.notify.pipeline import rejection_reason, why_sent
from rankwatch_service.notify.receivers import receiver_routes
from rankwatch_service.notify.sender import GIVE_UP_AFTER_S
from rankwatch_service.policy.notification import trial_message
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Delivery as DeliveryRow
from rankwatch_service.store.models import Incident, Outbox
from rankwatch_service.store.models import Receiver as ReceiverRow

router = APIRouter(tags=["notifications"])

TRIED_WITHIN_S: Final = 20.0
"""How long a reply waits for the first try of a message that a person sends: the longest try takes 15 s."""

State = Literal["waiting", "delivered", "failed", "silenced", "held", "unneeded"]
Reader = Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]
Admin = Annotated[Identity, Depends(Require(Scope.ADMIN, every_job=True))]


class SentNotification(ApiReply):
    """One notification to one receiver, and what became of it."""

    id: str
    receiver: str
    incident_id: str
    """Empty: it is about no incident."""
    transition: int
    command_id: str
    state: State
    """failed: it was given up, since the receiver refused it for good, or nobody acts on it any more. held: there were
    enough like it within an hour. unneeded: its receiver waits, and somebody acknowledged the incident in time, or it
    was over."""
    tries: int
    created_unix_ns: int
    """The time from which on it is due."""
    next_try_unix_ns: int
    delivered_unix_ns: int | None
    error: str
    """Error of the newest try; empty if it succeeded, or there was none."""


class Delivery(ApiReply):
    """One try to deliver one notification."""

    id: int
    outbox_id: str
    receiver: str
    incident_id: str
    transition: int
    command_id: str
    at_unix_ns: int
    status: int | None
    error: str
    seconds: float


@router.get("/notifications")
def list_notifications(
    context: Ctx,
    window: Wanted,
    identity: Reader,
    state: Annotated[list[State] | None, Query()] = None,
    receiver: Annotated[list[str] | None, Query()] = None,
    incident: Annotated[list[str] | None, Query()] = None,
) -> Page[SentNotification]:
    """Notifications, newest first. `state=failed` lists those that were given up."""
    query = any_of(_notifications(), Outbox.state, state)
    query = any_of(query, Outbox.receiver, receiver)
    purpose = f"notifications {state} {receiver} {incident}"
    order = (Outbox.created_unix_ns, Outbox.id)
    with read(context.engine) as connection:
        query = any_of(query, Outbox.incident_id, full_ids(connection, Incident, incident, identity))
        return fetch_page(connection, query, order, window, context.cursors, purpose, _shown)


@router.post("/notifications/{notification_id}/resend", responses={202: {"model": SentNotification}})
async def resend(
    notification_id: str, context: Ctx, idempotency: IdempotencyDep, identity: Admin, response: Response
) -> SentNotification:
    """Send a notification again that was given up, under its id. The reply waits for the try, or is 202."""

    def work(connection: Connection) -> SentNotification:
        row = _find(connection, notification_id)
        _check_resend(connection, row, context.clock.unix_ns())
        again = {"state": "waiting", "tries": 0, "next_try_unix_ns": context.clock.unix_ns()}
        connection.execute(update(Outbox).where(Outbox.id == notification_id).values(**again))
        now, actor, fields = context.clock.unix_ns(), identity.actor, {"receiver": row["receiver"]}
        audit_trail.append(connection, now, actor, "notification.resend", notification_id, "ok", fields=fields)
        return _shown(_find(connection, notification_id))

    await run_in_threadpool(idempotency.write, identity, None, 200, work)
    return await _tried(context, notification_id, response)


@router.post("/receivers/{name}/test", responses={202: {"model": SentNotification}})
async def try_receiver(
    name: str, context: Ctx, idempotency: IdempotencyDep, identity: Admin, response: Response
) -> SentNotification:
    """Send a message to a receiver to try it. The reply waits for the first try, or is 202."""

    def work(connection: Connection) -> SentNotification:
        _check_enabled(connection, name)
        now = context.clock.unix_ns()
        message = trial_message(name, identity.name, context.settings.public_url, now)
        row = {"receiver": name, "incident_id": "", "transition": 0, "state": "waiting", "tries": 0}
        times = {"next_try_unix_ns": now, "created_unix_ns": now, "delivered_unix_ns": None}
        # Its own id stands for what it is about, so that no other message waits for it.
        about = {"id": message.id, "command_id": message.id, "body": message.body}
        connection.execute(insert(Outbox).values(**row, **times, **about))
        audit_trail.append(connection, now, identity.actor, "receiver.test", name, "ok", fields={"message": message.id})
        return _shown(_find(connection, message.id))

    reply = await run_in_threadpool(idempotency.write, identity, None, 200, work)
    return await _tried(context, SentNotification.model_validate_json(bytes(reply.body)).id, response)


@router.get("/deliveries")
def list_deliveries(
    context: Ctx,
    window: Wanted,
    identity: Reader,
    receiver: Annotated[list[str] | None, Query()] = None,
    incident: Annotated[list[str] | None, Query()] = None,
) -> Page[Delivery]:
    """Deliveries, newest first: each try to deliver a notification."""
    reported = (Outbox.receiver, Outbox.incident_id, Outbox.transition, Outbox.command_id)
    query = select(DeliveryRow.__table__, *reported).join(Outbox, Outbox.id == DeliveryRow.outbox_id)
    query = any_of(query, Outbox.receiver, receiver)
    purpose = f"deliveries {receiver} {incident}"
    with read(context.engine) as connection:
        query = any_of(query, Outbox.incident_id, full_ids(connection, Incident, incident, identity))
        return fetch_page(
            connection, query, (DeliveryRow.id,), window, context.cursors, purpose, Delivery.model_validate
        )


def _notifications() -> Select[tuple[object, ...]]:
    columns = [column for column in Outbox.__table__.columns if column.name != "body"]
    return select(*columns, last_error())


def _shown(row: RowMapping) -> SentNotification:
    return SentNotification.model_validate({**row, "error": row["error"] or ""})


def _find(connection: Connection, notification_id: str) -> RowMapping:
    query = _notifications().where(Outbox.id == notification_id)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise not_found("notification", notification_id)
    return row


async def _tried(context: Context, notification_id: str, response: Response) -> SentNotification:
    """The notification after its first try; as it is, with 202, if that takes longer than `TRIED_WITHIN_S`."""

    def now() -> SentNotification:
        with read(context.engine) as connection:
            return _shown(_find(connection, notification_id))

    def done(one: SentNotification) -> bool:
        return one.state != "waiting" or one.tries > 0

    found, tried = await context.changes.read_until(now, done, TRIED_WITHIN_S)
    if not tried:
        response.status_code = 202
    return found


def _check_resend(connection: Connection, row: RowMapping, now_unix_ns: int) -> None:
    """Refuse to send again what would be wrong or useless now.

    Raises:
        ProblemError: it was not given up, is too old, its receiver is gone or disabled, or a later message about the
            same incident has arrived there.
    """
    if row["state"] != "failed":
        raise ProblemError(409, f"it was not given up: it is {row['state']}")
    if row["created_unix_ns"] < now_unix_ns - GIVE_UP_AFTER_S * 10**9:
        raise ProblemError(409, "it is older than three days: nobody acts on it any more")
    _check_enabled(connection, row["receiver"])
    later = select(Outbox.id).where(
        Outbox.incident_id == row["incident_id"],
        Outbox.command_id == row["command_id"],
        Outbox.receiver == row["receiver"],
        Outbox.transition > row["transition"],
        Outbox.state == "delivered",
    )
    if connection.execute(later).first() is not None:
        raise ProblemError(409, "a later message about the same incident has been delivered to this receiver")


def _check_enabled(connection: Connection, name: str) -> None:
    query = select(ReceiverRow.enabled, ReceiverRow.disabled_reason).where(ReceiverRow.name == name)
    found = connection.execute(query).one_or_none()
    if found is None:
        raise not_found("receiver", name)
    if not found.enabled:
        raise ProblemError(409, f"receiver {name!r} is disabled: {found.disabled_reason}")


NO_CHANGE: Final = "nothing has changed since the receiver would get it; it gets the next change"


class ReceiverReason(ApiReply):
    """What one receiver was sent about an incident, and why."""

    receiver: str
    transition: int | None
    """The transition of the incident that it was notified of; null: none."""
    state: str
    """delivered, waiting, failed, silenced, held, unneeded, or none: there is no notification."""
    why: str


class ReceiverReasons(ApiReply):
    """All receivers, by name, and for each one the transitions in their order."""

    items: list[ReceiverReason]


@router.get("/incidents/{incident_id}/receivers")
def list_reasons(
    incident_id: str, context: Ctx, identity: Annotated[Identity, Depends(Require(Scope.READ))]
) -> ReceiverReasons:
    """Why each receiver was notified of an incident, or why not.

    Receivers without a notification are left out for tokens that are restricted to some jobs.
    """
    with read(context.engine) as connection:
        row = find_incident(connection, incident_id, identity)
        about = [one for one in notifications_about(connection, row["id"]) if not one.command_id]
        receivers = receiver_routes(connection) if identity.jobs.every else ()
        ownership = project_of(connection, row["job"])
    found = [
        ReceiverReason(
            receiver=one.receiver,
            transition=one.transition,
            state=one.state,
            why=why_sent(one.state, one.error, one.tries, one.created_unix_ns, context.clock.unix_ns()),
        )
        for one in about
    ]
    labels = incident_labels({**row, "project": ownership.project, "owner": ownership.owner})
    kinds = {row["kind"], *(one["kind"] for one in row["consequences"])}
    named = {one.receiver for one in found}
    found += [
        ReceiverReason(
            receiver=receiver.name,
            transition=None,
            state="none",
            why=f"not sent: {rejection_reason(receiver, labels, kinds) or NO_CHANGE}",
        )
        for receiver in receivers
        if receiver.name not in named
    ]
    return ReceiverReasons(items=sorted(found, key=lambda one: (one.receiver, one.transition or 0)))
