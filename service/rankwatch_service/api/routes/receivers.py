"""Receivers of notifications."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator
from sqlalchemy import Connection, RowMapping, delete, insert, select, update
from starlette.concurrency import run_in_threadpool

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies import Context, Ctx, IdempotencyDep, Precondition, PreconditionDep, Require
from rankwatch_service.api.http.paging import Page, Wanted, fetch_page
from rankwatch_service.api.http.problem import ProblemError, not_found
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.silences import Matchers
from rankwatch_service.notify.address import AddressError, checked_url, masked_url, resolved
from rankwatch_service.notify.receiver_types.base import ReceiverType, Target, new_secret
from rankwatch_service.notify.receiver_types.email import address
from rankwatch_service.notify.receiver_types.table import check_receiver
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Receiver as ReceiverRow

router = APIRouter(tags=["notifications"])

RECEIVERS_MAX: Final = 100
"""The notifier matches every announcement against all of them within its transaction."""

AFTER_S_MAX: Final = 86_400
"""Longest wait of a receiver for an acknowledgement; messages are given up after three days."""

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
    type: ReceiverType = ReceiverType.WEBHOOK
    """What it speaks. It cannot be changed: its secret belongs to it."""
    url: Annotated[str, Field(max_length=2_000)]
    kinds: list[Kind] = []
    severities: list[Severity] = list(DEFAULT_SEVERITIES)
    jobs: Names = []
    projects: Names = []
    matchers: Matchers = []
    """On labels, as of a silence."""
    after_s: Annotated[int, Field(strict=True, ge=0, le=AFTER_S_MAX)] = 0
    """Delay of notifications in seconds; none is sent if the incident is acknowledged by then. 0: none."""
    enabled: StrictBool = True

    @model_validator(mode="after")
    def _is_target(self) -> ReceiverSettings:
        if self.type is ReceiverType.EMAIL:
            address(self.url)
        else:
            try:
                checked_url(self.url)
            except AddressError as error:
                raise ValueError(str(error)) from error
        return self

    @property
    def target(self) -> Target:
        """Its type and URL, as they are stored."""
        return Target(self.type, self.url)


class NewReceiver(ReceiverSettings):
    """A receiver to add."""

    name: Name
    secret: Annotated[str | None, Field(max_length=500)] = None
    """Of a webhook: whsec_ and the base64 of 24 to 64 bytes; generated if missing. Of pagerduty: the integration key.
    Of slack: the token of a bot, if the URL is that of chat.postMessage. Others have none."""

    @model_validator(mode="after")
    def _secret_belongs_to_type(self) -> NewReceiver:
        if self.type is not ReceiverType.WEBHOOK:
            check_receiver(self.target, self.secret or "")
        elif self.secret is not None:
            check_receiver(self.target, self.secret)
        return self


class Receiver(ApiReply):
    """A receiver, without its secret."""

    name: str
    type: ReceiverType
    url: str
    kinds: list[str]
    severities: list[str]
    jobs: list[str]
    projects: list[str]
    matchers: list[str]
    after_s: int
    enabled: bool
    disabled_reason: str
    created_unix_ns: int


class CreatedReceiver(Receiver):
    """A new receiver. Of a webhook with the secret that signs its messages; of other types it is empty."""

    secret: str


@router.get("/receivers")
def list_receivers(context: Ctx, window: Wanted, identity: Reader) -> Page[Receiver]:
    """All receivers by name, in descending order. Without scope admin, URLs are shown without their paths."""

    def shown(row: RowMapping) -> Receiver:
        return _shown_to(identity, context, row)

    with read(context.engine) as connection:
        query = select(ReceiverRow.__table__)
        order = (ReceiverRow.name,)
        return fetch_page(connection, query, order, window, context.cursors, "receivers", shown)


@router.get("/receivers/{name}")
def show_receiver(name: str, context: Ctx, precondition: PreconditionDep, identity: Reader) -> Receiver:
    """One receiver. Without scope admin, its URL is shown without its path."""
    with read(context.engine) as connection:
        return precondition.show(_shown_to(identity, context, _row(connection, name)))


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
        is_webhook = body.type is ReceiverType.WEBHOOK
        secret = body.secret or (new_secret() if is_webhook else "")
        settled = {"disabled_reason": "", "created_unix_ns": context.clock.unix_ns()}
        shown = body.model_dump(mode="json") | settled
        encrypted = {
            "url": context.secret_key.encrypt(body.target.stored()),
            "secret": context.secret_key.encrypt(secret),
        }
        connection.execute(insert(ReceiverRow).values(**_columns(shown) | encrypted))
        _record(context, connection, identity, "receiver.add", body.name, body.target)
        return CreatedReceiver(**shown | {"secret": secret if is_webhook else ""})

    return await run_in_threadpool(idempotency.write, identity, body, 201, work)


@router.put("/receivers/{name}")
async def change_receiver(
    name: str, body: ReceiverSettings, context: Ctx, precondition: PreconditionDep, identity: Admin
) -> Receiver:
    """Change a receiver; this also enables one that was disabled. With `If-Match`, only if it is still the one that was
    read.
    """
    await _check_target(context, body)
    return await run_in_threadpool(_change, name, body, context, precondition, identity)


def _change(
    name: str, body: ReceiverSettings, context: Context, precondition: Precondition, identity: Identity
) -> Receiver:
    with write(context.engine) as connection:
        row = _row(connection, name)
        precondition.check(_shown_to(identity, context, row))
        before = Target.read(context.secret_key.decrypt(row["url"]))
        if before.type is not body.type:
            raise ProblemError(409, f"receiver {name!r} is of type {before.type}: remove it and add it anew")
        _check_with_secret(body.target, context.secret_key.decrypt(row["secret"]))
        columns = _columns(body.model_dump(mode="json")) | {
            "url": context.secret_key.encrypt(body.target.stored()),
            "disabled_reason": "" if body.enabled else "switched off",
        }
        connection.execute(update(ReceiverRow).where(ReceiverRow.name == name).values(**columns))
        _record(context, connection, identity, "receiver.change", name, body.target)
        return precondition.show(_receiver(_row(connection, name), body.target))


@router.delete("/receivers/{name}", status_code=204)
def remove_receiver(name: str, context: Ctx, precondition: PreconditionDep, identity: Admin) -> None:
    """Remove a receiver; its undelivered notifications are given up."""
    with write(context.engine) as connection:
        precondition.check(_shown_to(identity, context, _row(connection, name)))
        connection.execute(delete(ReceiverRow).where(ReceiverRow.name == name))
        _record(context, connection, identity, "receiver.remove", name, None)


def _row(connection: Connection, name: str) -> RowMapping:
    """The row of a receiver.

    Raises:
        ProblemError: there is no such receiver.
    """
    query = select(ReceiverRow.__table__).where(ReceiverRow.name == name)
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise not_found("receiver", name)
    return row


def _shown_to(identity: Identity, context: Context, row: RowMapping) -> Receiver:
    """The receiver, whose URL may be secret: only the scope admin is shown its path."""
    target = Target.read(context.secret_key.decrypt(row["url"]))
    return _receiver(row, target if identity.holds(Scope.ADMIN) else Target(target.type, masked_url(target.url)))


def _receiver(row: RowMapping, target: Target) -> Receiver:
    return Receiver.model_validate({**row, "type": target.type, "url": target.url})


def _columns(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields as columns; the type is part of the stored URL."""
    return {name: value for name, value in fields.items() if name != "type"}


def _check_with_secret(target: Target, secret: str) -> None:
    """Check a new URL with the secret that the receiver has.

    Raises:
        ProblemError: they do not go together.
    """
    try:
        check_receiver(target, secret)
    except ValueError as error:
        raise ProblemError(422, str(error)) from error


async def _check_target(context: Context, receiver: ReceiverSettings) -> None:
    """Refuse a URL that cannot be delivered to. The notifier resolves and checks a name again at each try.

    Raises:
        ProblemError: messages must not go to this address, or there is no mail server.
    """
    if receiver.type is ReceiverType.EMAIL:
        if context.settings.mail_server() is None:
            raise ProblemError(422, "this service has no mail server: set RANKWATCH_SMTP_URL and RANKWATCH_SMTP_FROM")
        return
    host, port = checked_url(receiver.url)
    try:
        async with asyncio.timeout(LOOKUP_S):
            await resolved(host, port, context.settings.private_targets())
    except AddressError as error:
        raise ProblemError(422, str(error)) from error
    except OSError:
        return  # the name may be known to the notifier, or later


def _record(
    context: Context, connection: Connection, identity: Identity, what: str, name: str, target: Target | None
) -> None:
    """Record in the audit trail who changed a receiver."""
    # The path of a webhook often contains its secret.
    host = urlsplit(masked_url(target.url)).hostname or "" if target else ""
    audit_trail.append(connection, context.clock.unix_ns(), identity.actor, what, name, "ok", fields={"host": host})
