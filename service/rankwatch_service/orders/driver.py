"""Carries out commands: begins an order for each in turn, and advances every order as its ranks answer.

Each api process runs a driver, and drivers need not know of each other: an order is advanced by compare-and-set on its
version, in one transaction with its command, its audit row and its control record. If a driver dies, another one
continues from these rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Engine, RowMapping, exists, func, insert, select, update

from rankwatch_service.clock import Clock
from rankwatch_service.incidents.model import STACKS
from rankwatch_service.log.base import Entry as LogEntry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.names import launch_of
from rankwatch_service.orders import commands, traces
from rankwatch_service.orders.order import (
    BEFORE_DO,
    KILL_NS_MAX,
    PAUSED,
    VIEW_NS_MAX,
    CommandOutcome,
    Order,
    OrderSituation,
    Phase,
    advance,
    all_paused,
    enter,
    take_over,
)
from rankwatch_service.orders.running_attempt import (
    Paces,
    checkpoints,
    current_attempt,
    host_views,
    k_of,
    read_training,
    superseded,
)
from rankwatch_service.policy.actions import FROM_SCRATCH, KEEP_PAUSED, WITHOUT_ORDER, Action
from rankwatch_service.policy.checkpoint_ledger import CheckpointTier, LedgerEntry
from rankwatch_service.policy.control_records import OrderPhase, encode_control
from rankwatch_service.policy.rollback import RollbackMode, Way, resumed_from, way_back, why_from_scratch, why_none
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Command
from rankwatch_service.store.models import Order as OrderRow

ACTOR: Final = "driver"

NOT_PAUSED: Final = "the job is not paused"
"""Why a resume is refused."""


_BEFORE_ORDER: Final = (*commands.WAITING, "sent")
"""States of commands that may be due."""

_ANYTHING_OPEN: Final = select(
    exists().where(OrderRow.phase != Phase.CLOSED) | exists().where(Command.state.in_(_BEFORE_ORDER))
)


class Driver:
    """Advances all open orders. Call it from one thread; any number of processes may have one."""

    def __init__(self, engine: Engine, controls: ControlLog, clock: Clock) -> None:
        self._engine = engine
        self._controls = controls
        self._clock = clock
        self._paces = Paces()

    def run_once(self) -> bool:
        """Advance every open order and begin every due command, once.

        Returns:
            Whether there was any. The caller should come again soon: time alone may advance an order.
        """
        with read(self._engine) as connection:
            # Every commit of the service wakes the driver, and mostly there is nothing to drive.
            if not connection.scalar(_ANYTHING_OPEN):
                return False
            orders = open_orders(connection)
            waiting = _to_begin(connection, {order.command_id for order in orders}, self._clock.unix_ns())
        for order in orders:
            self._move(order)
        for command in waiting:
            self._begin(command["id"])
        return bool(orders or waiting)

    def _move(self, order: Order) -> None:
        with read(self._engine) as connection:
            now = self._situation(connection, order)
        moved, outcome = advance(order, now)
        if moved is order and outcome is None:
            return
        # Only a change takes a turn at writing.
        with write(self._engine) as connection:
            if not _store(connection, order, moved):
                return
            if moved.refused and outcome is not None and _another_way(connection, order):
                outcome = None  # the command stays open for an order that takes that way
            self._after(connection, order, moved, outcome, now.now_unix_ns)

    def _after(
        self, connection: Connection, before: Order, order: Order, outcome: CommandOutcome | None, now_unix_ns: int
    ) -> None:
        """Settle the command and record the phase, in the transaction of the move."""
        if outcome is not None:
            commands.set_state(connection, order.command_id, outcome, ACTOR, now_unix_ns, order.mode)
        if order.phase is before.phase and order.action == before.action:
            # A renewed lease concerns neither stream nor the pages.
            return
        self._record(connection, order, now_unix_ns)
        if order.phase is Phase.CLOSED and order.action in KEEP_PAUSED:
            # A resume has no order of its own: it is applied once the pause, or the checkpoint in it, is over.
            resumes = select(Command.id).where(
                Command.job == order.job, Command.action == Action.RESUME, Command.state == "sent"
            )
            for (command_id,) in connection.execute(resumes).all():
                commands.set_state(
                    connection, command_id, CommandOutcome("applied", "", order.step), ACTOR, now_unix_ns
                )

    def _record(self, connection: Connection, order: Order, now_unix_ns: int) -> None:
        """Report the phase to stream, through the control log, and to the feed."""
        record = OrderPhase(
            order=order.id,
            command=order.command_id,
            job=order.job,
            attempt=order.attempt,
            action=order.action,
            phase=order.phase,
            step=order.step,
            k=order.k,
            checkpoint=order.checkpoint,
            checkpoint_step=order.checkpoint_step,
            mode=order.mode,
            paused=order.detail == PAUSED,
        )
        self._controls.append_in(connection, [LogEntry(order.job, encode_control(record))])
        data = {"id": order.command_id, "order": order.id, "action": order.action, "phase": order.phase}
        data |= {"mode": order.mode, "detail": order.detail}
        commands.publish(connection, "command", order.job, data, now_unix_ns)

    def _situation(self, connection: Connection, order: Order) -> OrderSituation:
        command = commands.get(connection, order.command_id)
        assert command is not None  # orders are deleted with their command
        training = read_training(connection, order.job, order.attempt)
        # After a rollback the ranks report under their next attempt.
        views = host_views(connection, training, (order.attempt, f"{launch_of(order.attempt)}.{order.k}"))
        # A checkpoint that has become a pause again is not withdrawn with its command.
        cancelled = command["state"] == "cancelled" and command["action"] == order.action
        withdrawn = command["result"] or "cancelled" if cancelled else ""
        wanted = _others_wanted(connection, order.job, order.command_id)
        if not withdrawn and Action.RELAUNCH in wanted and order.phase in BEFORE_DO:
            withdrawn = "a relaunch was requested"
        return OrderSituation(
            now_unix_ns=self._clock.unix_ns(),
            expires_unix_ns=command["expires_unix_ns"],
            withdrawn=withdrawn,
            resumed=bool(wanted - KEEP_PAUSED),
            superseded=superseded(connection, training, order.k, order.phase_unix_ns),
            hosts=training.hosts,
            views=views,
            step_time_s=self._paces.step_time_s(training, views),
            replicas=training.replicas,
            can_relaunch=Action.RELAUNCH in training.can,
        )

    def _begin(self, command_id: str) -> None:
        """Begin an order for a command if none is in its way, or finish it without one."""
        now = self._clock.unix_ns()
        with write(self._engine) as connection:
            # Another driver may have begun or settled it since it was found to be due.
            row = commands.get(connection, command_id)
            if row is None or row["state"] not in _BEFORE_ORDER:
                return
            orders = open_orders(connection, row["job"])
            if any(order.command_id == command_id for order in orders):
                return
            order: Order | CommandOutcome | None = _outcome_without_order(connection, row, orders, now)
            if order is None:
                # A job has one order at a time; only a relaunch, which ends the processes anyway, does not wait, and a
                # checkpoint takes over the ranks of a pause.
                pause = self._pause_to_take_over(connection, row, orders)
                if orders and pause is None and row["action"] != Action.RELAUNCH:
                    return
                order = _new_order(connection, row, now)
                if pause is not None and isinstance(order, Order):
                    order = take_over(order, pause, now)
                    self._close(connection, pause, f"order {order.id} took over", now)
            if isinstance(order, CommandOutcome):
                commands.set_state(connection, row["id"], order, ACTOR, now)
                return
            connection.execute(insert(OrderRow).values(**_columns(order)))
            commands.set_state(connection, row["id"], CommandOutcome("sent"), ACTOR, now, order.mode)
            self._record(connection, order, now)

    def _pause_to_take_over(self, connection: Connection, command: RowMapping, orders: Sequence[Order]) -> Order | None:
        """The pause whose ranks a checkpoint takes over; None while there is none, or if something else ends it."""
        others = _others_wanted(connection, command["job"], command["id"])
        if command["action"] != Action.CHECKPOINT or others - KEEP_PAUSED:
            return None
        mine = (one for one in orders if one.attempt == command["attempt"])
        return next((one for one in mine if all_paused(one, self._situation(connection, one))), None)

    def _close(self, connection: Connection, order: Order, why: str, now_unix_ns: int) -> None:
        """Close an order that was read in this transaction."""
        closed = enter(order, Phase.CLOSED, now_unix_ns, 0, why)
        stored = _store(connection, order, closed)
        assert stored  # writers take turns
        self._record(connection, closed, now_unix_ns)


def open_orders(connection: Connection, job: str | None = None) -> list[Order]:
    """Orders that are not closed, of one job or of all."""
    query = select(OrderRow.__table__).where(OrderRow.phase != Phase.CLOSED).order_by(OrderRow.phase_unix_ns)
    if job is not None:
        query = query.where(OrderRow.job == job)
    return [order_of(row) for row in connection.execute(query).mappings()]


def current_orders(connection: Connection, job: str, closed_after_unix_ns: int) -> list[Order]:
    """A job's orders that are open, and after them those that were closed after a time; each oldest phase first."""
    query = select(OrderRow.__table__).where(
        OrderRow.job == job, (OrderRow.phase != Phase.CLOSED) | (OrderRow.phase_unix_ns > closed_after_unix_ns)
    )
    # The slot of a rank must have its next order before it is cleared of a closed one: paused ranks would go on.
    query = query.order_by(OrderRow.phase == Phase.CLOSED, OrderRow.phase_unix_ns)
    return [order_of(row) for row in connection.execute(query).mappings()]


def order_of(row: Mapping[Any, Any]) -> Order:
    """An order from its row."""
    return Order(**{**row, "phase": Phase(row["phase"]), "culprits": tuple(row["culprits"])})


def _columns(order: Order) -> dict[str, Any]:
    row = {name: getattr(order, name) for name in Order.__slots__}
    return row | {"culprits": list(order.culprits)}


def _store(connection: Connection, before: Order, order: Order) -> bool:
    """Store the order by compare-and-set; False if another driver was first."""
    same = (OrderRow.id == before.id, OrderRow.version == before.version)
    columns = _columns(order) | {"version": before.version + 1}
    count: int = connection.execute(update(OrderRow).where(*same).values(**columns)).rowcount
    return count == 1


def _to_begin(connection: Connection, with_order: set[str], now_unix_ns: int) -> list[RowMapping]:
    """Commands that are due, oldest first: new, approved, to be tried again, expired."""
    query = (
        select(Command.__table__)
        .where(Command.state.in_(_BEFORE_ORDER), Command.id.not_in(with_order))
        # Of commands requested at the same time, stacks come first: a relaunch would end the processes that have them.
        .order_by(Command.requested_unix_ns, Command.action != STACKS, Command.id)
    )
    ended = traces.ended(connection, now_unix_ns)
    return [row for row in connection.execute(query).mappings() if row["id"] in ended or _due(row, now_unix_ns)]


def _due(command: RowMapping, now_unix_ns: int) -> bool:
    waits_for_approval = command["approval_required"] and command["state"] == "requested"
    waits_for_others = command["state"] == "sent" and command["action"] in (STACKS, *WITHOUT_ORDER)
    return now_unix_ns > command["expires_unix_ns"] or not (waits_for_approval or waits_for_others)


def _others_wanted(connection: Connection, job: str, command_id: str) -> set[str]:
    """Actions of the job's open commands besides this one.

    Without stacks and traces, which need no order, and commands that still wait for approval.
    """
    others = select(Command.action).where(
        Command.job == job,
        Command.id != command_id,
        Command.state.in_(commands.OPEN),
        Command.action.not_in((STACKS, Action.TRACE)),
        ~(Command.approval_required & (Command.state == "requested")),
    )
    return set(connection.execute(others).scalars())


def _way(connection: Connection, command: RowMapping) -> Way | CommandOutcome:
    """How a rollback is carried out next, or why it cannot be. What ranks have refused is not tried again."""
    rows = connection.execute(
        select(OrderRow.mode, OrderRow.checkpoint).where(OrderRow.command_id == command["id"], OrderRow.refused)
    )
    refused = {(mode, CheckpointTier(checkpoint.partition(":")[0])) for mode, checkpoint in rows}
    entries = checkpoints(connection, command["job"])
    can = read_training(connection, command["job"], command["attempt"]).can
    mode, wanted = command["params"].get("mode", ""), command["params"].get("checkpoint", "")
    way = way_back(entries, can, mode, wanted=wanted, refused=refused)
    return way if way is not None else CommandOutcome("refused", why_none(entries, can, mode))


def _another_way(connection: Connection, order: Order) -> bool:
    """Whether a rollback that ranks have just refused is possible in another mode or from another tier."""
    command = commands.get(connection, order.command_id)
    assert command is not None  # orders are deleted with their command
    return order.action == Action.ROLLBACK and isinstance(_way(connection, command), Way)


def _new_order(connection: Connection, command: RowMapping, now_unix_ns: int) -> Order | CommandOutcome:
    """The next try of a command, or why there is none."""
    target: LedgerEntry | None = None
    action, mode, k = command["action"], "", k_of(command["attempt"])
    if action == Action.ROLLBACK:
        way = _way(connection, command)
        if isinstance(way, CommandOutcome):
            return way
        target = way.entry
        mode = way.mode
        if mode is RollbackMode.RELAUNCH:
            action = Action.RELAUNCH
        else:
            k += 1
    elif action == Action.RELAUNCH and not command["params"].get(FROM_SCRATCH):
        entries = checkpoints(connection, command["job"])
        if resumed_from(entries) is None:
            return CommandOutcome("refused", f"training would begin from scratch: {why_from_scratch(entries)}")
    checkpoint = target.id if target else ""
    mine = OrderRow.command_id == command["id"]
    number = connection.scalar(select(func.count()).where(mine)) or 0
    tries = connection.scalar(select(func.count()).where(mine, OrderRow.checkpoint == checkpoint)) or 0
    relaunch = action == Action.RELAUNCH
    return Order(
        id=f"{command['id']}.{number + 1}",
        command_id=command["id"],
        job=command["job"],
        attempt=command["attempt"],
        action=action,
        phase=Phase.KILL if relaunch else Phase.VIEW,
        step=-1,
        try_number=tries + 1,
        checkpoint=checkpoint,
        location=target.location if target else "",
        checkpoint_step=target.step if target else -1,
        k=k,
        culprits=tuple(command["params"].get("culprits", ())) if relaunch else (),
        phase_unix_ns=now_unix_ns,
        lease_unix_ns=now_unix_ns + (KILL_NS_MAX if relaunch else VIEW_NS_MAX),
        detail="",
        version=1,
        mode=mode,
    )


def _outcome_without_order(
    connection: Connection, command: RowMapping, orders: Sequence[Order], now_unix_ns: int
) -> CommandOutcome | None:
    """The outcome of a command that needs no order or cannot have one; None: an order may begin."""
    job, action = command["job"], command["action"]
    if action == Action.TRACE:
        return traces.outcome(connection, command, now_unix_ns)
    if now_unix_ns > command["expires_unix_ns"]:
        if action == STACKS:
            return traces.stacks_outcome_after(command["result"])
        nobody = command["approval_required"] and command["approved_by"] is None
        return CommandOutcome("expired", "nobody approved it in time" if nobody else "it could not begin in time")
    if action == STACKS:
        return CommandOutcome("sent")
    current = current_attempt(connection, job, now_unix_ns)
    if current is None or current != command["attempt"]:
        return CommandOutcome("refused", f"attempt {command['attempt']} has ended; the job's attempt is now {current}")
    training = read_training(connection, job, current)
    if training.can and action not in training.can and action != Action.ROLLBACK:
        return CommandOutcome("refused", f"the job does not support {action}")
    if action == Action.RESUME:
        paused = any(order.pauses for order in orders)
        return CommandOutcome("sent") if paused else CommandOutcome("refused", NOT_PAUSED)
    if action == Action.PAUSE and any(order.pauses for order in orders):
        return CommandOutcome("refused", "the job is paused already")
    return None
