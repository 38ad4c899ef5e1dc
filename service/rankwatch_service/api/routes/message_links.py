"""The pages behind the links in messages: one asks whether to do it, and the form on it does it, once.

They need no token: the signature in the link stands for whoever got the message. Opening a link changes nothing, since
mail servers and chats open links to look into them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any, Final

from fastapi import FastAPI
from sqlalchemy import Connection, RowMapping, delete, select
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from rankwatch_service.api.dependencies import Context
from rankwatch_service.api.http.paging import new_id
from rankwatch_service.api.routes.silences import ACTIVE_MAX, Silence, store_silence
from rankwatch_service.log.base import Entry
from rankwatch_service.notify.message_links import PURPOSE, VALID_S, LinkAction, LinkError, SignedLinks
from rankwatch_service.policy.control_records import IncidentReview, encode_control
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import read, upsert, write
from rankwatch_service.store.models import Incident, Outbox, UsedLink
from rankwatch_service.store.models import Silence as SilenceRow

PATH: Final = "/act/{action}/{message_id}"

SILENCED_S: Final = 3_600
"""How long the link silences."""

_ASKS: Final[Mapping[LinkAction, str]] = {LinkAction.ACKNOWLEDGE: "Acknowledge", LinkAction.SILENCE: "Silence for 1 h"}
_DONE: Final[Mapping[LinkAction, str]] = {
    LinkAction.ACKNOWLEDGE: "Acknowledged",
    LinkAction.SILENCE: "Silenced for 1 h",
}
_USED: Final = "This link has been used. Log in to do more."
_HEADERS: Final = {"Cache-Control": "no-store"}


class LinkRoutes:
    """The pages."""

    def __init__(self, context: Context) -> None:
        """Do nothing yet."""
        self._context = context
        self._links = SignedLinks(context.secret_key.derive(PURPOSE), context.settings.public_url)

    def mount(self, app: FastAPI) -> None:
        """Add the pages to an application."""
        app.add_route(PATH, self.answer, methods=["GET", "POST"], include_in_schema=False)

    async def answer(self, request: Request) -> Response:
        """Show a confirmation form, or do what was confirmed."""
        return await run_in_threadpool(self._answer, request)

    def _answer(self, request: Request) -> Response:
        message_id, query = request.path_params["message_id"], request.query_params
        now_unix_ns = self._context.clock.unix_ns()
        try:
            action = LinkAction(request.path_params["action"])
            parts = (query.get("until", ""), query.get("signature", ""))
            self._links.check(action, message_id, *parts, now_unix_ns / 1e9)
            if request.method == "POST":
                with write(self._context.engine) as connection:
                    return self._do(connection, action, message_id, now_unix_ns)
            with read(self._context.engine) as connection:
                return self._ask(connection, action, message_id)
        except (LinkError, ValueError) as error:
            text = str(error) if isinstance(error, LinkError) else "There is no such link."
            return _page("This link does not work", [text], 403)

    def _ask(self, connection: Connection, action: LinkAction, message_id: str) -> Response:
        incidents = _open_incidents(connection, message_id)
        if connection.scalar(select(UsedLink.id).where(UsedLink.id == _use(action, message_id))) is not None:
            raise LinkError(_USED)
        if not incidents:
            return _page("Nothing to do", ["The incidents of this message are resolved."])
        lines = [f"{one['job']}: {one['summary']}" for one in incidents]
        return _page(f"{_ASKS[action]}?", lines, button=_ASKS[action])

    def _do(self, connection: Connection, action: LinkAction, message_id: str, now_unix_ns: int) -> Response:
        connection.execute(delete(UsedLink).where(UsedLink.used_unix_ns < now_unix_ns - 2 * VALID_S * 10**9))
        incidents = _open_incidents(connection, message_id)
        use = {"id": _use(action, message_id), "used_unix_ns": now_unix_ns}
        if not connection.execute(upsert(connection, UsedLink), use).rowcount:
            raise LinkError(_USED)
        receiver = connection.scalar(select(Outbox.receiver).where(Outbox.id == message_id))
        actor = f"link to {receiver}"
        if action is LinkAction.ACKNOWLEDGE:
            for incident in incidents:
                self._acknowledge(connection, incident, actor, now_unix_ns)
        else:
            self._silence(connection, incidents, actor, now_unix_ns)
        return _page(_DONE[action], [f"{one['job']}: {one['summary']}" for one in incidents])

    def _acknowledge(self, connection: Connection, incident: RowMapping, actor: str, now_unix_ns: int) -> None:
        record = IncidentReview(incident=incident["id"], what="acknowledged", actor=actor)
        self._context.controls.append_in(connection, [Entry(incident["job"], encode_control(record))])
        audit_trail.append(connection, now_unix_ns, actor, "incident.acknowledged", incident["id"], "ok", fields={})

    def _silence(self, connection: Connection, incidents: list[RowMapping], actor: str, now_unix_ns: int) -> None:
        active = connection.execute(select(SilenceRow.id).where(SilenceRow.ends_unix_ns > now_unix_ns)).all()
        if len(active) + len(incidents) > ACTIVE_MAX:
            raise LinkError(f"The limit of {ACTIVE_MAX} silences is reached.")
        for job, kind, scope in sorted({(one["job"], one["kind"], one["scope"]) for one in incidents}):
            silence = Silence(
                id=new_id(SilenceRow),
                job=job,
                kind=kind,
                scope=scope,
                matchers=[],
                starts_unix_ns=now_unix_ns,
                ends_unix_ns=now_unix_ns + SILENCED_S * 10**9,
                created_by=actor,
                comment="by the link in a message",
            )
            store_silence(self._context, connection, silence)


def _use(action: LinkAction, message_id: str) -> str:
    return f"{action} {message_id}"


def _open_incidents(connection: Connection, message_id: str) -> list[RowMapping]:
    """The incidents of a message that are not resolved.

    Raises:
        LinkError: the message is not stored any more.
    """
    body = connection.scalar(select(Outbox.body).where(Outbox.id == message_id))
    if body is None:
        raise LinkError("What this link is about is not stored any more.")
    data: dict[str, Any] = json.loads(body)["data"]
    query = select(Incident.id, Incident.job, Incident.kind, Incident.scope, Incident.summary)
    found = query.where(Incident.id == data["id"], Incident.state != "resolved").order_by(Incident.id)
    return list(connection.execute(found).mappings().all())


def _page(title: str, lines: list[str], status: int = 200, button: str = "") -> Response:
    """A page without scripts, in the look of the dashboard."""
    listed = "".join(f"<p>{escape(line)}</p>" for line in lines)
    form = f'<form method="post"><button class="primary">{escape(button)}</button></form>' if button else ""
    html = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="stylesheet" href="/static/page/styles/base.css">'
        f"<title>{escape(title)} · rankwatch</title></head>"
        f"<body><main><h1>{escape(title)}</h1>{listed}{form}"
        '<p><a href="/incidents">All incidents</a></p></main></body></html>'
    )
    return Response(html, status, _HEADERS, "text/html")
