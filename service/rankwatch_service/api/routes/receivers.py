"""Receivers of notifications, and the deliveries to them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator
from sqlalchemy import Connection, RowMapping, delete, insert, select, update
from starlette.concurrency import run_in_threadpool

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Context, Ctx
from rankwatch_service.api.dependencies.idempotency import IdempotencyDep
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.paging import Page, Wanted, any_of, fetch_page
from rankwatch_service.api.http.problem import ProblemError, not_found
from rankwatch_service.notify.address import AddressError, checked_url, masked_url, resolved
from rankwatch_service.notify.receivers import TOPIC_URL, publish_receivers
from rankwatch_service.notify.signature import new_secret, signing_key
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Delivery as DeliveryRow
from rankwatch_service.store.models import Outbox
from rankwatch_service.store.models import Receiver as ReceiverRow

router = APIRouter(tags=["notifications"])

RECEIVERS_MAX: Final = 100
"""Stream matches every incident against all of them within its transaction."""

LOOKUP_S: Final = 3.0
"""How long a new URL's name may take to be resolved, before it is left to the notifier."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Names = Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=100)]
Reader = Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]
Admin = Annotated[Identity, Depends(Require(Scope.ADMIN, every_job=True))]


DEFAULT_SEVERITIES: Final = (Severity.CRITICAL, Severity.WARNING)
"""Info-level incidents are on the dashboard; a receiver gets them only if it asks for them."""


class ReceiverSettings(BaseModel):
    """Where to send notifications, and which. An empty list means all; all lists must match."""

    model_config = ConfigDict(extra="forbid")
    url: Annotated[str, Field(max_length=2_000)]
    kinds: list[Kind] = []
    severities: list[Severity] = list(DEFAULT_SEVERITIES)
    jobs: Names = []
    projects: Names = []
    enabled: StrictBool = True

    @field_validator("url")
    @classmethod
    def _is_target(cls, url: str) -> str:
        if url == TOPIC_URL:
            return url
        try:
            checked_url(url)
        except AddressError as error:
            raise ValueError(f"{error}, or be {TOPIC_URL}") from error
        return url


class NewReceiver(ReceiverSettings):
    """A receiver to add."""

    name: Name
    secret: Annotated[str | None, Field(max_length=200)] = None
    """whsec_ and the base64 of 24 to 64 bytes; generated if missing."""

    @field_validator("secret")
    @classmethod
    def _is_secret(cls, secret: str | None) -> str | None:
        if secret is not None:
            signing_key(secret)
        return secret


class Receiver(BaseModel):
    """A receiver, without its secret."""

    name: str
    url: str
    kinds: list[str]
    severities: list[str]
    jobs: list[str]
    projects: list[str]
    enabled: bool
    disabled_reason: str
    created_unix_ns: int


class CreatedReceiver(Receiver):
    """A new receiver with the secret that signs its messages."""

    secret: str


class Delivery(BaseModel):
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


@router.get("/receivers")
def list_receivers(context: Ctx, window: Wanted, identity: Reader) -> Page[Receiver]:
    """All receivers by name, in descending order. Without scope admin, URLs are shown without their paths."""

    def shown(row: RowMapping) -> Receiver:
        url = context.secret_key.decrypt(row["url"])
        return _receiver(row, url if identity.holds(Scope.ADMIN) else masked_url(url))

    with read(context.engine) as connection:
        query = select(ReceiverRow.__table__)
        order = (ReceiverRow.name,)
        return fetch_page(connection, query, order, window, context.cursors, "receivers", shown)


@router.post("/receivers", status_code=201, response_model=CreatedReceiver)
async def add_receiver(body: NewReceiver, context: Ctx, idempotency: IdempotencyDep, identity: Admin) -> Response:
    """Add a receiver, which is notified about incidents from now on."""
    await _check_target(context, body)

    def work(connection: Connection) -> CreatedReceiver:
        names = set(connection.execute(select(ReceiverRow.name)).scalars())
        if body.name in names:
            raise ProblemError(409, f"a receiver {body.name!r} already exists")
        if len(names) >= RECEIVERS_MAX:
            raise ProblemError(409, f"the limit of {RECEIVERS_MAX} receivers is reached")
        shown = body.model_dump(mode="json") | {
            "secret": body.secret or new_secret(),
            "disabled_reason": "",
            "created_unix_ns": context.clock.unix_ns(),
        }
        encrypted = {column: context.secret_key.encrypt(shown[column]) for column in ("url", "secret")}
        connection.execute(insert(ReceiverRow).values(**shown | encrypted))
        _record(context, connection, identity, "receiver.add", body.name, body.url)
        return CreatedReceiver(**shown)

    return await run_in_threadpool(idempotency.write, identity, body, 201, work)


@router.put("/receivers/{name}")
async def change_receiver(name: str, body: ReceiverSettings, context: Ctx, identity: Admin) -> Receiver:
    """Change a receiver; this also enables one that was disabled."""
    await _check_target(context, body)
    return await run_in_threadpool(_change, name, body, context, identity)


def _change(name: str, body: ReceiverSettings, context: Context, identity: Identity) -> Receiver:
    with write(context.engine) as connection:
        columns = body.model_dump(mode="json") | {
            "url": context.secret_key.encrypt(body.url),
            "disabled_reason": "" if body.enabled else "switched off",
        }
        if not connection.execute(update(ReceiverRow).where(ReceiverRow.name == name).values(**columns)).rowcount:
            raise not_found("receiver", name)
        _record(context, connection, identity, "receiver.change", name, body.url)
        query = select(ReceiverRow.__table__).where(ReceiverRow.name == name)
        return _receiver(connection.execute(query).mappings().one(), body.url)


@router.delete("/receivers/{name}", status_code=204)
def remove_receiver(name: str, context: Ctx, identity: Admin) -> None:
    """Remove a receiver; its undelivered notifications are given up."""
    with write(context.engine) as connection:
        if not connection.execute(delete(ReceiverRow).where(ReceiverRow.name == name)).rowcount:
            raise not_found("receiver", name)
        _record(context, connection, identity, "receiver.remove", name, "")


@router.get("/deliveries")
def list_deliveries(
    context: Ctx,
    window: Wanted,
    _identity: Reader,
    receiver: Annotated[list[str] | None, Query()] = None,
    incident: Annotated[list[str] | None, Query()] = None,
) -> Page[Delivery]:
    """Deliveries, newest first: each try to deliver a notification."""
    told = (Outbox.receiver, Outbox.incident_id, Outbox.transition, Outbox.command_id)
    query = select(DeliveryRow.__table__, *told).join(Outbox, Outbox.id == DeliveryRow.outbox_id)
    query = any_of(query, Outbox.receiver, receiver)
    query = any_of(query, Outbox.incident_id, incident)
    purpose = f"deliveries {receiver} {incident}"
    with read(context.engine) as connection:
        return fetch_page(
            connection, query, (DeliveryRow.id,), window, context.cursors, purpose, Delivery.model_validate
        )


def _receiver(row: RowMapping, url: str) -> Receiver:
    return Receiver.model_validate({**row, "url": url})


async def _check_target(context: Context, receiver: ReceiverSettings) -> None:
    """Refuse a URL that cannot be delivered to. The notifier resolves and checks a name again at each try.

    Raises:
        ProblemError: Kafka is not configured, or webhooks must not go to this address.
    """
    if receiver.url == TOPIC_URL:
        if not context.settings.kafka:
            raise ProblemError(422, "this service has no incidents topic, since it runs without Kafka")
        return
    host, port = checked_url(receiver.url)
    try:
        async with asyncio.timeout(LOOKUP_S):
            await resolved(host, port, context.settings.private_targets())
    except AddressError as error:
        raise ProblemError(422, str(error)) from error
    except OSError:
        return  # the name may be known to the notifier, or later


def _record(context: Context, connection: Connection, identity: Identity, what: str, name: str, url: str) -> None:
    """Publish the receivers to stream, and record in the audit trail who changed them."""
    publish_receivers(connection, context.controls)
    host = urlsplit(url).hostname or ""  # the path of a webhook often contains its secret
    audit_trail.append(connection, context.clock.unix_ns(), identity.actor, what, name, "ok", fields={"host": host})
