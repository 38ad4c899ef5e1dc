"""Routes by which incidents are grouped and sent: show, replace and try them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, select

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Context, Ctx
from rankwatch_service.api.dependencies.precondition import PreconditionDep
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.labels.incident_labels import check_label_name
from rankwatch_service.notify.router import SETTING as IN_FORCE
from rankwatch_service.notify.routes_source import SETTING
from rankwatch_service.routing.route import Route, Routing
from rankwatch_service.routing.route_trial import delivery_of, tried_routes
from rankwatch_service.routing.written_routes import ROUTES_BYTES_MAX, read_routes
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Receiver, Setting
from rankwatch_service.store.upsert import upsert

router = APIRouter(prefix="/routes", tags=["notifications"])

Reader = Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]
Admin = Annotated[Identity, Depends(Require(Scope.ADMIN, every_job=True))]
Text = Annotated[str, Field(max_length=ROUTES_BYTES_MAX)]


class NewRoutes(BaseModel):
    """Routes to put in force."""

    model_config = ConfigDict(extra="forbid")
    text: Text
    """TOML; empty: none, so that each receiver gets what it subscribes to."""


class LaterReceiver(BaseModel):
    """Who is notified besides of what nobody has acknowledged in time."""

    after_s: float
    receiver: str


class RouteDelivery(BaseModel):
    """Whom a route notifies and when, with what it has inherited from its parents."""

    receiver: str
    """Empty: nobody."""
    route: str
    """Its place in the tree, by the matchers on the way; unique."""
    group_wait_s: float
    group_interval_s: float
    repeat_interval_s: float
    escalations: list[LaterReceiver]
    mute_time_intervals: list[str]
    active_time_intervals: list[str]


class RouteTree(RouteDelivery):
    """A route, and the routes below it in their order."""

    matchers: list[str]
    """All must match; empty: every incident."""
    continues: bool
    """The routes behind it are tried too, though it matches."""
    group_by: list[str]
    routes: list[RouteTree]


class Routes(BaseModel):
    """The routes."""

    text: str
    """TOML; empty: none."""
    tree: RouteTree | None
    """The same, read; null: none, or something in the text is wrong."""
    is_read_only: bool
    """The notifier has them from a file, which alone can change them."""
    error: str
    """Why the newest ones are not in force; empty if they are."""
    updated_by: str
    """Empty: nobody has put them by REST."""


class RoutesTrial(BaseModel):
    """Labels of an incident to try."""

    model_config = ConfigDict(extra="forbid")
    labels: dict[str, Annotated[str, Field(max_length=300)]]
    text: Text | None = None
    """Routes to try them on; null: those in force."""


class RouteTrialResult(RouteDelivery):
    """A route that would take the incident."""

    group: str


class RouteTrialResults(BaseModel):
    """All routes that would take the incident, in their order; empty: no routes are configured."""

    items: list[RouteTrialResult]


@router.get("")
def show_routes(context: Ctx, precondition: PreconditionDep, _identity: Reader) -> Routes:
    """The routes."""
    with read(context.engine) as connection:
        return precondition.show(_stored(context, connection))


@router.put("")
def set_routes(body: NewRoutes, context: Ctx, precondition: PreconditionDep, identity: Admin) -> Routes:
    """Replace the routes; with `If-Match`, only if they are still those that were read.

    They are in force within 5 s. Where a file has them, this is refused (409).
    """
    routing = _checked(body.text)
    now = context.clock.unix_ns()
    with write(context.engine) as connection:
        stored = _stored(context, connection)
        if stored.is_read_only:
            raise ProblemError(409, "the routes are in a file (RANKWATCH_ROUTES), which alone can change them")
        precondition.check(stored)
        known = set(connection.scalars(select(Receiver.name)))
        if routing and (unknown := sorted(routing.receivers() - known)):
            raise ProblemError(422, f"there is no receiver {', '.join(map(repr, unknown))}")
        row = {"name": SETTING, "value": {"text": body.text, "actor": identity.actor}, "updated_unix_ns": now}
        connection.execute(upsert(connection, Setting, row), row)
        audit_trail.append(connection, now, identity.actor, "routes.set", "routes", "ok", fields={"text": body.text})
        return precondition.show(_stored(context, connection))


@router.post("/test")
def try_routes(body: RoutesTrial, context: Ctx, _identity: Reader) -> RouteTrialResults:
    """Tell whom an incident with these labels would go to, in which group, by which route and when."""
    if body.text is None:
        with read(context.engine) as connection:
            text = _stored(context, connection).text
    else:
        text = body.text
    for name in body.labels:
        try:
            check_label_name(name)
        except ValueError as error:
            raise ProblemError(422, str(error)) from error
    routing = _checked(text)
    found = tried_routes(routing, body.labels) if routing else []
    return RouteTrialResults(items=[RouteTrialResult.model_validate(one) for one in found])


def _checked(text: str) -> Routing | None:
    """The routes of a text; None: it is empty.

    Raises:
        ProblemError: something in it is wrong.
    """
    try:
        return read_routes(text) if text.strip() else None
    except ValueError as error:
        raise ProblemError(422, str(error)) from error


def _stored(context: Context, connection: Connection) -> Routes:
    """What a file of the notifier has, or what people have put."""

    def value(name: str) -> dict[str, Any]:
        return connection.scalar(select(Setting.value).where(Setting.name == name)) or {}

    in_force, put = value(IN_FORCE), value(SETTING)
    is_file = bool(in_force.get("is_file")) or context.settings.routes is not None
    text = in_force.get("text", "") if is_file else put.get("text", "")
    return Routes(
        text=text,
        tree=_tree_of(text),
        is_read_only=is_file,
        error=in_force.get("error", ""),
        updated_by="" if is_file else put.get("actor", ""),
    )


def _tree_of(text: str) -> RouteTree | None:
    try:
        return _tree(read_routes(text).root) if text.strip() else None
    except ValueError:
        return None


def _tree(route: Route) -> RouteTree:
    return RouteTree(
        **delivery_of(route),
        matchers=[str(matcher) for matcher in route.matchers],
        continues=route.continues,
        group_by=list(route.group_by),
        routes=[_tree(child) for child in route.routes],
    )
