"""Commands: what was requested of a job, and its result.

Every change writes the command's row and the feed; requests, approvals and ends also write the audit trail.

requested -> (approved) -> sent -> accepted -> applied | refused | expired | failed | cancelled. The last five
states are final.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, RowMapping, and_, insert, select, update

from rankwatch_service.access.tokens import revoke_token
from rankwatch_service.orders.order import CommandOutcome
from rankwatch_service.policy.actions import MAKE_TOKEN, CommandRequest
from rankwatch_service.policy.announcement import Announcement as Announced
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import in_turn
from rankwatch_service.store.models import Announcement, Command, Feed
from rankwatch_service.store.rows import announcement_row, command_row

WAITING: Final = ("requested", "approved")
"""States before the first order."""

OPEN: Final = (*WAITING, "sent", "accepted")
"""States that are not final."""


def add(
    connection: Connection, request: CommandRequest, *, source: str = "", announcement: Announced | None = None
) -> None:
    """Store a command that a person requested, with its announcement, in a `write`."""
    connection.execute(insert(Command).values(**command_row(request)))
    record_request(connection, request, request.requested_unix_ns, source)
    if announcement:
        connection.execute(insert(Announcement).values(**announcement_row(announcement)))


def record_request(connection: Connection, request: CommandRequest, now_unix_ns: int, source: str = "") -> None:
    """Write the audit row and the feed row of a new command."""
    fields: dict[str, Any] = {"id": request.id, "attempt": request.attempt}
    fields |= {"params": dict(request.params), "reason": request.reason}
    if request.approval_required:
        fields["approval_required"] = True
    action = f"command.{request.action}"
    audit_trail.append(
        connection, now_unix_ns, request.requested_by, action, request.job, "ok", source=source, fields=fields
    )
    data = {"id": request.id, "action": request.action, "state": "requested"}
    publish(connection, "command", request.job, data, now_unix_ns)


def waits_for_approval(now_unix_ns: int) -> ColumnElement[bool]:
    """Of the table of commands: those that a person can approve or refuse now."""
    waits = (Command.state == "requested", Command.approval_required, Command.expires_unix_ns >= now_unix_ns)
    return and_(*waits)


def waiting(connection: Connection, job: str, action: str, now_unix_ns: int) -> str | None:
    """Id of a command of this action that waits for an approval; None: none does."""
    same = (Command.job == job, Command.action == action, waits_for_approval(now_unix_ns))
    return connection.scalar(select(Command.id).where(*same).limit(1))


def get(connection: Connection, command_id: str) -> RowMapping | None:
    """A command's row."""
    return connection.execute(select(Command.__table__).where(Command.id == command_id)).mappings().one_or_none()


def set_state(
    connection: Connection, command_id: str, outcome: CommandOutcome, actor: str, now_unix_ns: int, mode: str = ""
) -> bool:
    """Move an open command to another state. Return False, and change nothing, if its state is already final.

    Args:
        connection: of a `write`.
        command_id: the command.
        outcome: the new state, with the reason or result.
        actor: who or what decided it, for the audit trail.
        now_unix_ns: the time.
        mode: for a rollback: its mode, once an order has one.
    """
    final = outcome.state not in OPEN
    changes: dict[str, Any] = {"state": outcome.state, "result": outcome.result}
    if mode:
        changes["mode"] = mode
    if outcome.state == "approved":
        changes["approved_by"] = actor
    if outcome.state == "applied":
        changes |= {"applied_step": outcome.step, "applied_unix_ns": now_unix_ns}
    if final:
        changes["finished_unix_ns"] = now_unix_ns
    moved = update(Command).where(Command.id == command_id, Command.state.in_(OPEN)).values(**changes)
    returned = (Command.job, Command.action, Command.params, Command.requested_by, Command.approved_by)
    row = connection.execute(moved.returning(*returned)).one_or_none()
    if row is None:
        return False
    if row.action == MAKE_TOKEN and final and outcome.state != "applied":
        revoke_token(connection, row.params["token"])
    if final or outcome.state == "approved":
        fields = {"result": outcome.result, "step": outcome.step, "requested_by": row.requested_by}
        fields |= {name: text for name, text in (("mode", mode), ("approved_by", row.approved_by)) if text}
        audit_trail.append(
            connection, now_unix_ns, actor, f"command.{row.action}.{outcome.state}", command_id, "ok", fields=fields
        )
    data = {"id": command_id, "action": row.action, "state": outcome.state, "result": outcome.result, "mode": mode}
    publish(connection, "command", row.job, data, now_unix_ns)
    return True


def publish(connection: Connection, topic: str, job: str, data: Mapping[str, Any], now_unix_ns: int) -> None:
    """Add a row to the feed of `GET events`, in a `write`."""
    assert in_turn(connection), "readers of the feed would skip an id that is committed after a higher one"
    connection.execute(insert(Feed).values(topic=topic, job=job, data=dict(data), at_unix_ns=now_unix_ns))
