"""Approvals: a command that waits for a second person is approved or refused by somebody who did not request it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection

from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies.context import Context, Ctx
from rankwatch_service.api.dependencies.idempotency import IdempotencyDep
from rankwatch_service.api.http.problem import ProblemError
from rankwatch_service.api.routes.commands import REASON_CHARS_MAX, Command, Commander, EmptyBody, find_command
from rankwatch_service.orders import commands
from rankwatch_service.orders.order import CommandOutcome

router = APIRouter(tags=["commands"])


class CommandRefusal(BaseModel):
    """Why a command is refused."""

    model_config = ConfigDict(extra="forbid")
    reason: Annotated[str, Field(min_length=1, max_length=REASON_CHARS_MAX)]


@router.post("/commands/{command_id}/approve", response_model=Command)
def approve(
    command_id: str, body: EmptyBody, context: Ctx, idempotency: IdempotencyDep, identity: Commander
) -> Response:
    """Approve a command that waits for approval; it is then carried out.

    It is refused (409) if the command does not wait, has expired, or was requested by the same person.
    """

    def work(connection: Connection) -> Command:
        return _decide(connection, context, command_id, identity, CommandOutcome("approved", f"by {identity.name}"))

    answer = idempotency.write(identity, body, 200, work)
    context.driver.wake()
    return answer


@router.post("/commands/{command_id}/refuse", response_model=Command)
def refuse(
    command_id: str, body: CommandRefusal, context: Ctx, idempotency: IdempotencyDep, identity: Commander
) -> Response:
    """Refuse a command that waits for approval. Who requested it cancels it instead; 409 as for an approval."""

    def work(connection: Connection) -> Command:
        result = f"by {identity.name}: {body.reason}"
        return _decide(connection, context, command_id, identity, CommandOutcome("refused", result))

    return idempotency.write(identity, body, 200, work)


def _decide(
    connection: Connection, context: Context, command_id: str, identity: Identity, outcome: CommandOutcome
) -> Command:
    """Settle a command that waits for approval.

    Raises:
        ProblemError: it does not wait, or this identity may not decide about it.
    """
    row, now = find_command(connection, command_id, identity), context.clock.unix_ns()
    if not row["approval_required"]:
        raise ProblemError(409, "the command needs no approval")
    if row["state"] != "requested":
        detail = f" {row['result']}" if row["result"] else ""
        raise ProblemError(409, f"the command does not wait for approval any more: it is {row['state']}{detail}")
    if now > row["expires_unix_ns"]:
        expired = datetime.fromtimestamp(row["expires_unix_ns"] // 10**9, UTC)
        raise ProblemError(409, f"the command expired at {expired:%Y-%m-%d %H:%M:%S}Z")
    if identity.has_requested(row["requester"], row["requested_by"]):
        raise ProblemError(409, "a command must be approved or refused by somebody other than its requester")
    commands.settle(connection, row["id"], outcome, identity.actor, now)
    return Command.model_validate(find_command(connection, row["id"], identity))
