"""Commands: what was asked of a job, and what came of it. Every change is one row, one audit row, one feed row.

requested -> (approved) -> sent -> accepted -> applied | refused | expired | failed | cancelled. Nothing leaves one of
the last five states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, RowMapping, insert, select, update

from rankwatch_service.orders.order import Outcome
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import in_turn
from rankwatch_service.store.models import Command, Feed

WAITING: Final = ("requested", "approved")
OPEN: Final = (*WAITING, "sent", "accepted")
STACKS: Final = "stacks"
"""Action of the commands with which stream asks for stacks; they touch no rank's loop."""

EXPIRES_S: Final = 60.0
"""A command that could not be begun for so long is not begun at all: nobody expects it any more."""

APPROVAL_S: Final = 900.0
"""The same for a command that waits for a person's approval."""


def new_command(
    command_id: str,
    job: str,
    attempt: str,
    action: str,
    *,
    params: Mapping[str, Any],
    reason: str,
    requested_by: str,
    now_unix_ns: int,
    incident_id: str | None = None,
    idempotency_key: str | None = None,
    approval_required: bool = False,
    expires_s: float | None = None,
) -> dict[str, Any]:
    """The row of a new command. Pure, so that stream derives the same row in a replay.

    Args:
        command_id: chosen by the requester before anything is stored; the same id is the same command.
        job: the job.
        attempt: the only attempt it may touch.
        action: one of `policy.Action`, or `STACKS`.
        params: {"checkpoint": id, "mode": mode} for rollback, {"culprits": [ranks]} for relaunch, {"ranks": [ranks]}
            for stacks.
        reason: why, for people.
        requested_by: who, for people.
        now_unix_ns: now.
        incident_id: the incident it answers.
        idempotency_key: unique over all commands.
        approval_required: a person must approve it before it is carried out.
        expires_s: seconds within which it must begin; the default depends on whether it needs approval.
    """
    within_s = expires_s if expires_s is not None else APPROVAL_S if approval_required else EXPIRES_S
    return {
        "id": command_id,
        "job": job,
        "attempt": attempt,
        "action": action,
        "params": dict(params),
        "reason": reason,
        "requested_by": requested_by,
        "incident_id": incident_id,
        "idempotency_key": idempotency_key,
        "approval_required": approval_required,
        "state": "requested",
        "result": "",
        "mode": "",
        "applied_step": None,
        "requested_unix_ns": now_unix_ns,
        "expires_unix_ns": now_unix_ns + int(within_s * 1e9),
        "applied_unix_ns": None,
        "finished_unix_ns": None,
    }


def add(connection: Connection, row: Mapping[str, Any], *, source: str = "") -> None:
    """Store a command that a person asked for, in a writing transaction."""
    connection.execute(insert(Command).values(**row))
    now = row["requested_unix_ns"]
    fields = {key: row[key] for key in ("id", "attempt", "params", "reason")}
    action = f"command.{row['action']}"
    audit_trail.append(connection, now, row["requested_by"], action, row["job"], "ok", source=source, fields=fields)
    tell(connection, "command", row["job"], {"id": row["id"], "action": row["action"], "state": "requested"}, now)


def get(connection: Connection, command_id: str) -> RowMapping | None:
    """A command's row."""
    return connection.execute(select(Command.__table__).where(Command.id == command_id)).mappings().one_or_none()


def settle(
    connection: Connection, command_id: str, outcome: Outcome, actor: str, now_unix_ns: int, mode: str = ""
) -> bool:
    """Move an open command on; False if it is finished already and nothing was done.

    Args:
        connection: of a `write`.
        command_id: the command.
        outcome: what becomes of it.
        actor: who says so.
        now_unix_ns: now.
        mode: for a rollback: what it takes back.
    """
    final = outcome.state not in OPEN
    changes: dict[str, Any] = {"state": outcome.state, "result": outcome.result}
    if mode:
        changes["mode"] = mode
    if outcome.state == "applied":
        changes |= {"applied_step": outcome.step, "applied_unix_ns": now_unix_ns}
    if final:
        changes["finished_unix_ns"] = now_unix_ns
    moved = update(Command).where(Command.id == command_id, Command.state.in_(OPEN)).values(**changes)
    row = connection.execute(moved.returning(Command.job, Command.action)).one_or_none()
    if row is None:
        return False
    if final or outcome.state == "approved":
        fields = {"result": outcome.result, "step": outcome.step} | ({"mode": mode} if mode else {})
        audit_trail.append(
            connection, now_unix_ns, actor, f"command.{row.action}.{outcome.state}", command_id, "ok", fields=fields
        )
    told = {"id": command_id, "action": row.action, "state": outcome.state, "result": outcome.result, "mode": mode}
    tell(connection, "command", row.job, told, now_unix_ns)
    return True


def tell(connection: Connection, topic: str, job: str, data: Mapping[str, Any], now_unix_ns: int) -> None:
    """Add a row to the feed of `GET events`, in a `write`."""
    assert in_turn(connection), "a reader would pass over an id that appears later"
    connection.execute(insert(Feed).values(topic=topic, job=job, data=dict(data), at_unix_ns=now_unix_ns))
