"""What each rank has answered to a command, as agents last reported it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from sqlalchemy import Connection, func, select

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.commands import find_command
from rankwatch_service.names import launch_of
from rankwatch_service.orders.running_attempt import host_views, read_training
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import AgentView
from rankwatch_service.store.models import Order as OrderRow

router = APIRouter(tags=["commands"])


class RankAnswer(ApiReply):
    """One rank, and what it has answered to the newest order of a command."""

    rank: int
    host: str
    answer: str
    """held, done, failed, passed (it saw the order after its step), released, went; empty: none yet."""
    step: int
    """At which it answered; -1: it has not, or before the first step."""
    detail: str
    """Of done: where its checkpoint went; of failed: the error."""
    state: str
    """running, held, left, exited."""
    reported_unix_ns: int


class RankAnswers(ApiReply):
    """The ranks of a command, in their order; empty while it has no order, and a day after the last report."""

    order: str
    """Id of the order that they answer; empty: there is none."""
    items: list[RankAnswer]


@router.get("/commands/{command_id}/ranks")
def list_rank_answers(
    command_id: str, context: Ctx, identity: Annotated[Identity, Depends(Require(Scope.READ))]
) -> RankAnswers:
    """What each rank has answered to the newest order of a command, as its agent last reported it."""
    with read(context.engine) as connection:
        row = find_command(connection, command_id, identity)
        newest = (
            select(OrderRow.id, OrderRow.attempt)
            .where(OrderRow.command_id == row["id"])
            .order_by(func.length(OrderRow.id).desc(), OrderRow.id.desc())
        )
        order = connection.execute(newest.limit(1)).one_or_none()
        if order is None:
            return RankAnswers(order="", items=[])
        return RankAnswers(order=order.id, items=_answers(connection, row["job"], order.attempt, order.id))


def _answers(connection: Connection, job: str, attempt: str, order: str) -> list[RankAnswer]:
    reported = connection.scalars(select(AgentView.attempt).where(AgentView.job == job).distinct())
    # A rollback begins a new attempt of the same launch.
    attempts = [one for one in reported if launch_of(one) == launch_of(attempt)]
    views = host_views(connection, read_training(connection, job, attempt), attempts)
    found = [
        RankAnswer(
            rank=one.rank,
            host=host,
            answer=one.answer if one.order == order else "",
            step=one.answer_step if one.order == order else -1,
            detail=one.answer_detail if one.order == order else "",
            state=one.state,
            reported_unix_ns=view.at_unix_ns,
        )
        for host, view in views.items()
        for one in view.ranks
    ]
    return sorted(found, key=lambda answer: answer.rank)
