"""The simulated job, with the real driver over a real database in place of bare `advance`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, insert, select, update

from rankwatch.wire import OrderView, View
from rankwatch_service.api.background.order_cache import orders_of
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.orders import commands
from rankwatch_service.orders.driver import Driver, order_of
from rankwatch_service.orders.order import HostView, Phase
from rankwatch_service.orders.running_attempt import ReceivedView, store_views
from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.policy.control_records import OrderPhase, decode_control
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Attempt, Checkpoint, Job
from rankwatch_service.store.models import Order as OrderRow
from tests.support.orders.training_world import START_NS, S, SimulatedAgent, World
from tests.support.store.database import new_database

CAN = ["pause", "resume", "checkpoint", "rollback", "rollback_memory", "rollback_disk", "stop", "relaunch"]


class CrashError(Exception):
    """The api process was killed."""


class DrivenWorld(World):
    def __init__(self, seed: int, action: str, folder: Path, *, faults: bool = False) -> None:
        super().__init__(seed, action, faults=faults)
        self.engine = new_database(folder)
        self._looked_ns = 0
        self.controls = ControlLog(self.engine, self)
        self.drivers: list[Callable[[], bool]] = [Driver(self.engine, self.controls, self).run_once for _ in range(2)]
        self.also_asked: list[tuple[float, str]] = []
        """(seconds from the start, action) of further commands."""
        self.agent_of: Callable[[str], str] = lambda _host: ""
        """By host, the agent that signs its views."""
        store_job(self.engine, self)

    # ---- Clock -------------------------------------------------------------------------------------------------------

    def unix_ns(self) -> int:
        return self.now_ns

    def monotonic_s(self) -> float:
        return self.now_ns / S

    # ---- what the database says --------------------------------------------------------------------------------------

    def state_of(self, command_id: str) -> str:
        with read(self.engine) as connection:
            row = commands.get(connection, command_id)
        assert row is not None
        return row["state"]

    def ask(self, command_id: str, action: str, **params: str | bool) -> None:
        by = {"reason": "", "requested_by": "test", "requested_unix_ns": self.now_ns}
        request = CommandRequest(id=command_id, job="j", attempt="l.0", action=action, params=params, **by)
        with write(self.engine) as connection:
            commands.add(connection, request)

    def store_checkpoint(self, checkpoint: str, verdict: str = "good") -> None:
        store_checkpoint(self.engine, checkpoint, self.now_ns, verdict)

    def can(self, *actions: str) -> None:
        """The commands that the ranks say they support from now on."""
        with write(self.engine) as connection:
            topology = connection.scalar(select(Attempt.topology))
            assert topology is not None
            connection.execute(update(Attempt).values(topology=topology | {"can": list(actions)}))

    def go_on(self, seconds: float, *also_asked: tuple[float, str]) -> None:
        """Run for longer, with further commands at seconds from the start."""
        self.also_asked += also_asked
        self._begin = lambda: None
        self.run(seconds)

    def kill_first_api(self, patch: pytest.MonkeyPatch, at_write: int, effect: str) -> None:
        """The first driver dies at its n-th write, `before` or `after` its commit; the second one goes on."""
        whole, left = self.drivers[0], [at_write]

        def mortal() -> bool:
            with patch.context() as patched:
                patched.setattr("rankwatch_service.orders.driver.write", dying(left, effect))
                return whole()

        self.drivers[0] = mortal

    def _look(self) -> None:
        with read(self.engine) as connection:
            rows = connection.execute(select(OrderRow.__table__).order_by(OrderRow.phase_unix_ns)).mappings().all()
            row = commands.get(connection, "c")
        assert row is not None
        self.orders = [order_of(one) for one in rows]
        self.command, self.result = row["state"], row["result"]

    # ---- the world's seams -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.ask("c", self.action)
        self._look()

    def _drive(self, driver: int) -> None:
        # Each process looks every 50 ms, as it does; in a long pause less often, to spare the test time.
        every_ns = 25 * 10**6 if self.command in commands.OPEN else 200 * 10**6
        if self.now_ns < self._looked_ns + every_ns:
            return
        self._looked_ns = self.now_ns
        for at_s, action in list(self.also_asked):
            if self.now_ns >= START_NS + at_s * S:
                self.also_asked.remove((at_s, action))
                self.ask(action, action)
        try:
            self.drivers[driver]()
        except CrashError:
            self.drivers_stop_until_ns[driver] = self.now_ns + 3_600 * S
        before = [order.version for order in self.orders]
        self._look()
        if [order.version for order in self.orders] != before:
            self._push()

    def _reported(self) -> list[OrderView]:
        with read(self.engine) as connection:
            return list(orders_of(connection, "j", self.now_ns).orders)

    def _report(self, agent: SimulatedAgent) -> None:
        before_ns = agent.next_view_ns
        super()._report(agent)
        reported = agent.next_view_ns != before_ns
        # In a long pause an agent may tell less: it spares the test thousands of writes.
        if (
            reported
            and self.orders
            and self.orders[-1].phase in (Phase.DO, Phase.CLOSED)
            and self.command != "accepted"
        ):
            agent.next_view_ns = self.now_ns + S // 2

    def _take_view(self, agent: SimulatedAgent, reported: HostView) -> None:
        # Under the order's attempt while one is open, as the agent does it.
        view = View("j", "l.0", str(agent.host), "b", self.now_ns, reported.ranks)
        store_views(self.engine, [ReceivedView(view, self.agent_of(str(agent.host)))], self.now_ns)
        self._carry(functools.partial(self._take_orders, agent, self._reported()))


def store_job(engine: Engine, world: World) -> None:
    """What stream would have stored of the job by now: its attempt with its ranks, and a checkpoint to go back to."""
    ranks = [{"rank": rank.number, "host": str(rank.host), "tp": 0, "pp": 0, "cp": 0, "ep": 0} for rank in world.ranks]
    both = {"attempt": "l.0", "world_size": len(ranks)}
    job = {"name": "j", "state": "running", "ranks_reporting": len(ranks), "step": 0, "step_time_s": world.step_ns / S}
    job |= {"first_seen_unix_ns": START_NS, "last_seen_unix_ns": START_NS}
    attempt = {"job": "j", "started_unix_ns": START_NS, "first_step": 0, "number": 1}
    attempt["topology"] = {"ranks": ranks, "can": CAN, "replicated": True}
    with write(engine) as connection:
        connection.execute(insert(Job).values(**both | job))
        connection.execute(insert(Attempt).values(**both | attempt))
    store_checkpoint(engine, "memory:l.0:0", START_NS)


def store_checkpoint(engine: Engine, checkpoint: str, saved_unix_ns: int, verdict: str = "good") -> None:
    """An entry of the ledger, by its id."""
    tier, attempt, step = checkpoint.split(":")
    columns = {"seconds": 0.1, "bytes": 1, "verdict": verdict, "verdict_reason": "", "saved_unix_ns": saved_unix_ns}
    columns |= {"location": "" if tier == "memory" else f"/{step}", "shards_expected": 1, "shards": [0]}
    with write(engine) as connection:
        connection.execute(
            insert(Checkpoint).values(job="j", id=checkpoint, attempt=attempt, step=int(step), tier=tier, **columns)
        )


def phases(world: DrivenWorld) -> list[str]:
    """Phases of the orders as stream reads them in the log."""
    records = [decode_control(record.value) for record in world.controls.read(0, 1_000)]
    return [record.phase for record in records if isinstance(record, OrderPhase)]


def dying(left: list[int], effect: str) -> Callable[[Engine], AbstractContextManager[Connection]]:
    """A `write` that kills its process at the last of `left` calls, before or after its commit."""

    @contextmanager
    def dying_write(engine: Engine) -> Iterator[Connection]:
        left[0] -= 1
        with write(engine) as connection:
            yield connection
            if left[0] == 0 and effect == "before":
                raise CrashError
        if left[0] == 0:
            raise CrashError

    return dying_write
