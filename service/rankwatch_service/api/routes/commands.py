"""Commands to jobs: request, list, approve and cancel them, and what the ranks did."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Response
from pydantic import BaseModel, ConfigDict, Field, computed_field
from sqlalchemy import Connection, RowMapping, func, select
from sqlalchemy.orm import InstrumentedAttribute

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.access.job_filter import project_of
from rankwatch_service.access.tokens import makers_of
from rankwatch_service.api.dependencies import (
    ORDERS,
    ORDERS_MEAN,
    CommandFiltersDep,
    CommandOrder,
    Context,
    Ctx,
    IdempotencyDep,
    Require,
)
from rankwatch_service.api.http.paging import Contents, Page, Wanted, fetch_page, full_id, new_id
from rankwatch_service.api.http.problem import ProblemError, not_found
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.names import ALL_JOBS, launch_of, short
from rankwatch_service.orders import approvals, commands, traces
from rankwatch_service.orders.driver import NOT_PAUSED, open_orders
from rankwatch_service.orders.order import CommandOutcome, S
from rankwatch_service.orders.running_attempt import checkpoints, current_attempt, host_views, read_training
from rankwatch_service.policy.actions import ACTIONS, FROM_SCRATCH, TRACE_S, Action, CommandRequest
from rankwatch_service.policy.announcement import command_announcement
from rankwatch_service.policy.checkpoint_ledger import SURVIVES_PROCESSES, LedgerEntry
from rankwatch_service.policy.notification import page_links
from rankwatch_service.policy.rollback import USABLE, RollbackMode, resumed_from, way_back, why_from_scratch, why_none
from rankwatch_service.store.engine import after_commit, read
from rankwatch_service.store.models import AgentView, Incident
from rankwatch_service.store.models import Command as CommandRow
from rankwatch_service.store.models import Order as OrderRow
from rankwatch_service.store.rows import command_row
from rankwatch_service.store.settings_rows import read_policy

router = APIRouter(tags=["commands"])

REASON_CHARS_MAX: Final = 1_000
EXPIRES_S_MAX: Final = 900.0
RANKS_MAX: Final = 1_024
AGENT_SILENT_NS: Final = 20 * S
"""Agents post a view every second. After a restart of the service the last of them is back within 5 s."""

Reader = Annotated[Identity, Depends(Require(Scope.READ))]
Commander = Annotated[Identity, Depends(Require(Scope.COMMAND))]


class NewCommand(BaseModel):
    """A command to request."""

    model_config = ConfigDict(extra="forbid")
    action: Action
    params: Annotated[dict[str, Any], Field(max_length=4)] = {}
    """For rollback: {"checkpoint": id} (default: the newest good one), {"mode": "full" | "relaunch"}
    (default: full if the job supports it, else relaunch). For relaunch: {"culprits": [ranks]}, {"from_scratch": true}
    (start without a checkpoint; otherwise a relaunch needs a good checkpoint on disk). For trace:
    {"ranks": [ranks]} (default: the rank that an open straggler or slowdown names and a healthy one, else rank 0),
    {"steps": 1 to 10} (default: 3)."""
    reason: Annotated[str, Field(max_length=REASON_CHARS_MAX)] = ""
    incident: Annotated[str | None, Field(max_length=200)] = None
    expires_s: Annotated[float | None, Field(strict=True, gt=0, le=EXPIRES_S_MAX)] = None
    """Seconds after which it expires if it has not begun; a trace, if its ranks have not answered (default: 300)."""


class Command(ApiReply):
    """A command. Fields are the columns of `store.models.Command`."""

    id: str
    job: str
    """`*`: all jobs."""
    attempt: str
    action: str
    """One of those that can be requested; stacks; or for all jobs set_approvals or make_token."""
    params: Contents
    reason: str
    requested_by: str
    requester: str
    """The person who requested it, as `GET session` names people; empty: the policy or the service."""
    incident_id: str | None
    world_size: int
    """Ranks that it was requested for; 0: unknown."""
    approval_required: bool
    """While it is `requested`, it waits until somebody other than its requester approves it."""
    approved_by: str | None
    state: str
    result: str
    mode: str
    """Of a rollback, what is restored: full (weights, optimizer, schedulers, random states, data, step), or relaunch;
    empty before it begins."""
    applied_step: int | None
    requested_unix_ns: int
    expires_unix_ns: int
    applied_unix_ns: int | None
    finished_unix_ns: int | None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def short_id(self) -> str:
        """The id as people type it. Any longer prefix of the id is accepted wherever the id is."""
        return short(self.id)


class OrderTry(ApiReply):
    """One order: one try to carry out a command."""

    id: str
    phase: str
    step: int
    try_number: int
    checkpoint: str
    mode: str
    refused: bool
    phase_unix_ns: int
    detail: str


class RankTrace(ApiReply):
    """What one rank recorded for a trace."""

    rank: int
    error: str
    """Why there is no summary, or what is wrong with it; empty: it is whole."""
    summary: Contents
    """Fields of `policy.traces.TraceSummary`; empty: none."""
    at_unix_ns: int


class CommandDetail(Command):
    """A command with its orders, or with what its ranks recorded."""

    orders: list[OrderTry]
    traces: list[RankTrace]


class EmptyBody(BaseModel):
    """An empty body."""

    model_config = ConfigDict(extra="forbid")


@router.post("/jobs/{job}/commands", status_code=201, response_model=Command)
def request_command(
    job: str, body: NewCommand, context: Ctx, idempotency: IdempotencyDep, identity: Commander
) -> Response:
    """Request a command. It is carried out on all ranks at the same step, or on none; a trace on the ranks it names.

    A command that cannot be carried out now is refused (409): no agent is connected, the job does not support it,
    there is no checkpoint to roll back to or to relaunch from, nothing is paused that could be resumed, or the job is
    being traced. If the policy has `two_people`, rollback, relaunch and stop of a job with more than `approval_ranks`
    ranks wait until another person approves them; one that would wait beside another of the same action is refused
    (409).
    """

    def work(connection: Connection) -> Command:
        now = context.clock.unix_ns()
        attempt = current_attempt(connection, job, now)
        if attempt is None:
            raise not_found("job", job)
        params = _params(connection, job, attempt, body)
        if obstacle := _obstacle(connection, job, attempt, body, now):
            raise ProblemError(409, obstacle)
        world_size = _world_size(connection, job, attempt)
        costly = read_policy(connection).needs_second_person(body.action, world_size)
        if costly:
            _refuse_second_wait(connection, job, body.action, now)
        request = CommandRequest(
            id=new_id(CommandRow),
            job=job,
            attempt=attempt,
            action=body.action,
            params=params,
            reason=body.reason,
            requested_by=identity.actor,
            requester=identity.person,
            requested_unix_ns=now,
            incident_id=_incident(connection, job, body, identity),
            idempotency_key=f"{identity.id}:{idempotency.key}" if idempotency.key else None,
            world_size=world_size,
            approval_required=costly,
            expires_s=body.expires_s or (TRACE_S if body.action is Action.TRACE else None),
        )
        links = page_links(context.settings.public_url, job, request.incident_id)
        ownership = project_of(connection, job)
        announcement = command_announcement(request, links, ownership=ownership)
        commands.add(connection, request, source=idempotency.source, announcement=announcement)
        return Command(**command_row(request))

    answer = idempotency.write(identity, body, 201, work)
    context.driver.wake()
    return answer


@router.get("/commands")
def list_commands(
    context: Ctx,
    window: Wanted,
    identity: Reader,
    filters: CommandFiltersDep,
    order: Annotated[CommandOrder, Query(description=ORDERS_MEAN)] = "newest",
) -> Page[Command]:
    """Commands, newest request first."""
    by = ORDERS[order]
    labels = [key for key in by if not isinstance(key, InstrumentedAttribute)]
    purpose = f"commands {filters.purpose} {order}"
    with read(context.engine) as connection:
        query = filters.apply(select(CommandRow.__table__, *labels), connection, identity)
        return fetch_page(connection, query, by, window, context.cursors, purpose, Command.model_validate)


@router.get("/commands/{command_id}")
def show_command(command_id: str, context: Ctx, identity: Reader) -> CommandDetail:
    """One command with its orders, and of a trace what its ranks recorded."""
    with read(context.engine) as connection:
        row = find_command(connection, command_id, identity)
        tries = (
            select(OrderRow.__table__)
            .where(OrderRow.command_id == row["id"])
            .order_by(func.length(OrderRow.id), OrderRow.id)
        )
        orders = [OrderTry.model_validate(one) for one in connection.execute(tries).mappings()]
        answers = [RankTrace.model_validate(one) for one in traces.answers_of(connection, row["id"])]
    return CommandDetail(**row, orders=orders, traces=answers)


@router.post("/commands/{command_id}/cancel", response_model=Command)
def cancel(
    command_id: str, body: EmptyBody, context: Ctx, idempotency: IdempotencyDep, identity: Commander
) -> Response:
    """Cancel a command, unless a rank has already acted on it."""

    def work(connection: Connection) -> Command:
        row = find_command(connection, command_id, identity)
        if row["state"] not in (*commands.WAITING, "sent"):
            raise ProblemError(409, f"it is too late to cancel: the state of the command is {row['state']}")
        now = context.clock.unix_ns()
        commands.set_state(
            connection, row["id"], CommandOutcome("cancelled", f"by {identity.name}"), identity.actor, now
        )
        return Command.model_validate(find_command(connection, command_id, identity))

    answer = idempotency.write(identity, body, 200, work)
    context.driver.wake()
    return answer


def find_command(connection: Connection, command_id: str, identity: Identity) -> RowMapping:
    """A command's row, by its id or a unique prefix of it.

    Raises:
        ProblemError: there is none that this identity may see.
    """
    row = commands.get(connection, full_id(connection, CommandRow, command_id, identity))
    if row is None or not identity.may_see(row["job"]) or (row["job"] == ALL_JOBS and not identity.jobs.every):
        raise not_found("command", command_id)
    return row


def _incident(connection: Connection, job: str, body: NewCommand, identity: Identity) -> str | None:
    """The incident that a command responds to; of a trace without ranks the one that names them."""
    if body.incident:
        return full_id(connection, Incident, body.incident, identity)
    slow = traces.slowness(connection, job) if body.action is Action.TRACE and "ranks" not in body.params else None
    return slow.id if slow else None


def _params(connection: Connection, job: str, attempt: str, body: NewCommand) -> dict[str, Any]:
    """The parameters of a new command, for a trace with its defaults.

    Raises:
        ProblemError: one is unknown or malformed, or names a checkpoint that cannot be loaded.
    """
    unknown = sorted(set(body.params) - ACTIONS[body.action].params)
    if unknown:
        raise ProblemError(422, f"{body.action} has no parameter {', '.join(unknown)}")
    if (mode := body.params.get("mode")) is not None and mode not in tuple(RollbackMode):
        raise ProblemError(422, f"params.mode must be one of {', '.join(RollbackMode)}")
    if (wanted := body.params.get("checkpoint")) is not None:
        entry = next((entry for entry in checkpoints(connection, job) if entry.id == wanted), None)
        if entry is None:
            raise ProblemError(422, "params.checkpoint is not the id of one of the job's checkpoints")
        if entry.verdict not in USABLE:
            raise ProblemError(422, f"checkpoint {entry.id} is {entry.verdict}")
    if (culprits := body.params.get("culprits")) is not None and not _are_ranks(culprits):
        raise ProblemError(422, f"params.culprits must be a list of up to {RANKS_MAX} ranks")
    if not isinstance(body.params.get(FROM_SCRATCH, False), bool):
        raise ProblemError(422, "params.from_scratch must be true or false")
    if body.action is Action.TRACE:
        try:
            return traces.parameters(connection, read_training(connection, job, attempt), body.params)
        except ValueError as error:
            raise ProblemError(422, str(error)) from None
    return body.params


def _obstacle(connection: Connection, job: str, attempt: str, body: NewCommand, now_unix_ns: int) -> str:
    """Why the job cannot do this now; empty if it can. The driver checks again before it begins."""
    training = read_training(connection, job, attempt)
    views = host_views(connection, training, (attempt,))
    if not any(now_unix_ns - view.at_unix_ns < AGENT_SILENT_NS for view in views.values()):
        return f"no agent can reach job {job}: none of attempt {attempt} has reported for {AGENT_SILENT_NS // S} s"
    if body.action is Action.ROLLBACK:
        mode, wanted = body.params.get("mode", ""), body.params.get("checkpoint", "")
        entries = checkpoints(connection, job)
        way = way_back(entries, training.can, mode, wanted=wanted)
        return "" if way is not None else why_none(entries, training.can, mode)
    # An attempt whose ranks have not registered yet has no hosts.
    if training.hosts and body.action not in training.can:
        supported = ", ".join(sorted(can for can in training.can if can in tuple(Action))) or "nothing"
        return f"the job does not support {body.action}; it supports: {supported}"
    if body.action is Action.RESUME and not _is_or_will_be_paused(connection, job):
        return NOT_PAUSED
    if body.action is Action.TRACE and (other := traces.open_trace(connection, job)) is not None:
        return f"job {job} is being traced already: {short(other)}"
    if body.action is Action.RELAUNCH and not body.params.get(FROM_SCRATCH):
        return _nothing_to_resume(checkpoints(connection, job))
    return ""


def _is_or_will_be_paused(connection: Connection, job: str) -> bool:
    """Whether an order keeps the job's ranks paused, or a pause was requested and has not begun yet."""
    asked = (CommandRow.job == job, CommandRow.action == Action.PAUSE, CommandRow.state.in_(commands.OPEN))
    if connection.scalar(select(CommandRow.id).where(*asked).limit(1)) is not None:
        return True
    return any(order.pauses for order in open_orders(connection, job))


def _nothing_to_resume(entries: list[LedgerEntry]) -> str:
    """Why a relaunch must be requested from scratch; empty if it has a checkpoint to go on from."""
    if resumed_from(entries) is not None:
        return ""
    obstacle = f"training would begin from scratch: {why_from_scratch(entries)}. To relaunch it nevertheless, request "
    obstacle += "it with from_scratch (rankwatch relaunch JOB --from-scratch)"
    if any(entry.tier in SURVIVES_PROCESSES and entry.verdict in USABLE for entry in entries):
        obstacle += ", or choose one of them (rankwatch rollback JOB --mode relaunch --checkpoint ID)"
    return obstacle


def _world_size(connection: Connection, job: str, attempt: str) -> int:
    """Ranks of the attempt: as many as it declares or agents report, whichever is more; 0 while unknown."""
    training = read_training(connection, job, attempt)
    reported = sum(len(view.ranks) for view in host_views(connection, training, (attempt,)).values())
    return max(training.world_size, reported)


def _refuse_second_wait(connection: Connection, job: str, action: str, now_unix_ns: int) -> None:
    """Refuse a command that would wait for an approval beside another of the same action."""
    if (other := commands.waiting(connection, job, action, now_unix_ns)) is not None:
        raise ProblemError(409, f"{action} of job {job} already waits for approval: {short(other)}")


def _are_ranks(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= RANKS_MAX
        and all(type(rank) is int and 0 <= rank < 2**31 for rank in value)
    )


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
    """The ranks of a command, in their order; empty while it has no order, a day after the last report, and four
    attempts later.
    """

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
    if row["requester"] in identity.makers or identity.person in makers_of(connection, row["requested_by"]):
        detail = "you cannot decide on a request of the person who made your token, or of a token that you made"
        raise ProblemError(409, detail)
    commands.set_state(connection, row["id"], outcome, identity.actor, now)
    if row["job"] == ALL_JOBS and outcome.state == "approved":
        approvals.carry_out(connection, row, context.controls, now)
        after_commit(connection, context.authenticator.clear_cache)
    return Command.model_validate(find_command(connection, row["id"], identity))
