"""Commands without an order, which do not hold the ranks: stacks of a hang, and traces.

A command for stacks is sent to agents while it is `sent`, and is applied as soon as all of its ranks have answered; one
that expires before is applied if any rank has.

A trace, likewise, ends when all of
its ranks have answered, when the attempt is over, or when it expires.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, RowMapping, func, insert, select

from rankwatch.wire import TraceRequest
from rankwatch_detectors.base import Kind
from rankwatch_service.incidents.hang import StacksReceived
from rankwatch_service.orders import commands
from rankwatch_service.orders.order import CommandOutcome
from rankwatch_service.orders.running_attempt import Training, current_attempt
from rankwatch_service.policy.actions import TRACE_RANKS_MAX, TRACE_STEPS, TRACE_STEPS_MAX, Action
from rankwatch_service.policy.traces import TraceAnswer
from rankwatch_service.store.models import Command, Incident, RankTrace


def stacks_outcome(received: StacksReceived) -> CommandOutcome:
    """How far the command has come; `sent` while answers may still come."""
    state = "applied" if received.count >= received.asked else "sent"
    return CommandOutcome(state, f"{received.count:,} of {received.asked:,} ranks answered")


def stacks_outcome_after(result: str | None) -> CommandOutcome:
    """How a command ends that has expired.

    Args:
        result: of its row, which says how many ranks have answered, if any has.
    """
    return CommandOutcome("applied", result) if result else CommandOutcome("expired", "no rank answered in time")


NAMED_BY: Final = (Kind.STRAGGLER, Kind.SLOWDOWN)
"""Incidents whose ranks are traced if the person names none."""


def parameters(connection: Connection, training: Training, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a trace, with the ranks to ask if the person named none.

    Raises:
        ValueError: one is malformed, or a rank is not of the job.
    """
    steps = asked.get("steps", TRACE_STEPS)
    if type(steps) is not int or not 1 <= steps <= TRACE_STEPS_MAX:
        raise ValueError(f"params.steps must be 1 to {TRACE_STEPS_MAX}")
    ranks = asked.get("ranks")
    known = {rank for of_host in training.hosts.values() for rank in of_host}
    if ranks is None:
        slow = slowness(connection, training.job)
        ranks = _worth_a_trace(slow.ranks if slow else [], sorted(known))
    if (
        not isinstance(ranks, list)
        or not 1 <= len(ranks) <= TRACE_RANKS_MAX
        or any(type(rank) is not int for rank in ranks)
    ):
        raise ValueError(f"params.ranks must be a list of 1 to {TRACE_RANKS_MAX} ranks")
    if known and (unknown := sorted(set(ranks) - known)):
        raise ValueError(f"rank {unknown[0]} is not one of the job's ranks")
    return {"ranks": sorted(set(ranks)), "steps": steps}


def slowness(connection: Connection, job: str) -> Row[tuple[str, list[Any]]] | None:
    """Id and ranks of the newest open straggler or slowdown that names ranks."""
    mine = (Incident.job == job, Incident.kind.in_(NAMED_BY), Incident.state != "resolved")
    newest = select(Incident.id, Incident.ranks).where(*mine).order_by(Incident.detected_unix_ns.desc())
    return next((row for row in connection.execute(newest) if row.ranks), None)


def _worth_a_trace(slow: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """A slow rank and a healthy one; if none is slow, the first rank."""
    if not slow:
        return [*ranks[:1]] or [0]
    return [slow[0], *[rank for rank in ranks if rank not in slow][:1]]


def open_trace(connection: Connection, job: str) -> str | None:
    """The id of the job's trace that has not ended."""
    mine = (Command.job == job, Command.action == Action.TRACE, Command.state.in_(commands.OPEN))
    return connection.scalar(select(Command.id).where(*mine).limit(1))


def requests(connection: Connection, job: str, now_unix_ns: int) -> tuple[TraceRequest, ...]:
    """What the agents of a job are asked."""
    mine = (Command.job == job, Command.action == Action.TRACE, Command.state == "sent")
    sent = select(Command.id, Command.attempt, Command.params).where(*mine, Command.expires_unix_ns > now_unix_ns)
    return tuple(
        TraceRequest(row.id, row.attempt, tuple(row.params["ranks"]), row.params["steps"])
        for row in connection.execute(sent)
    )


def store(connection: Connection, answers: Iterable[TraceAnswer]) -> None:
    """Store answers, in a `write`. One that nobody asked for, or that came before, has no effect."""
    for answer in answers:
        asked = (Command.id == answer.command, Command.job == answer.job, Command.action == Action.TRACE)
        params = connection.scalar(select(Command.params).where(*asked, Command.state.in_(commands.OPEN)))
        before = select(RankTrace.rank).where(RankTrace.command_id == answer.command, RankTrace.rank == answer.rank)
        if params is None or answer.rank not in params["ranks"] or connection.scalar(before) is not None:
            continue
        row = {"command_id": answer.command, "rank": answer.rank, "error": answer.error}
        row |= {"summary": dict(answer.summary), "at_unix_ns": answer.at_unix_ns}
        connection.execute(insert(RankTrace).values(**row))


def answers_of(connection: Connection, command_id: str) -> list[RowMapping]:
    """What the ranks answered to a trace, by rank."""
    query = select(RankTrace.__table__).where(RankTrace.command_id == command_id).order_by(RankTrace.rank)
    return list(connection.execute(query).mappings())


def ended(connection: Connection, now_unix_ns: int) -> set[str]:
    """The ids of the sent traces that all of their ranks have answered, or whose attempt is over."""
    count = select(func.count()).where(RankTrace.command_id == Command.id).scalar_subquery()
    sent = select(Command.__table__, count.label("answers")).where(
        Command.action == Action.TRACE, Command.state == "sent"
    )
    return {
        row["id"]
        for row in connection.execute(sent).mappings()
        if row["answers"] >= len(row["params"]["ranks"]) or _is_over(connection, row, now_unix_ns)
    }


def _is_over(connection: Connection, command: RowMapping, now_unix_ns: int) -> bool:
    """Whether the job trains in another attempt by now, after a rollback or a relaunch."""
    return current_attempt(connection, command["job"], now_unix_ns) not in (None, command["attempt"])


def outcome(connection: Connection, command: RowMapping, now_unix_ns: int) -> CommandOutcome:
    """How a trace ends; `sent` while answers may still come. It is applied if any rank has recorded something."""
    answers = answers_of(connection, command["id"])
    missing = sorted(set(command["params"]["ranks"]) - {row["rank"] for row in answers})
    is_over = _is_over(connection, command, now_unix_ns)
    if missing and not is_over and now_unix_ns <= command["expires_unix_ns"]:
        return CommandOutcome("sent")
    why = f"attempt {command['attempt']} has ended" if is_over else "it did not answer in time"
    failures = [f"rank {row['rank']}: {row['error']}" for row in answers if row["error"]]
    failures += [f"rank {rank}: {why}" for rank in missing]
    recorded = [row for row in answers if row["summary"]]
    step = min((row["summary"]["step"] for row in recorded), default=None)
    return CommandOutcome("applied" if recorded else "failed", "; ".join(failures), step)
