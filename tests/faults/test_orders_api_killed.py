"""Commands to a simulated job over real HTTP, while the api is killed at any moment and started again."""

import random
import time

import msgspec
import pytest

from rankwatch import wire
from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.clock import SystemClock
from rankwatch_service.store.engine import write
from tests.support.orders.driven_world import store_job
from tests.support.orders.training_world import S, World
from tests.support.service.process import Http, Role, free_port
from tests.support.store.database import new_database
from tests.support.trials.selection import long_trial

pytestmark = [pytest.mark.integration, pytest.mark.ci]
MSGPACK = {"content-type": "application/msgpack"}
_ORDERS = msgspec.json.Decoder(wire.Orders)


class RealTimeWorld(World):
    """Ranks and agents are simulated in real time; the api is a process. Agents hear by the answers to their views."""

    def __init__(self, seed, action, folder):
        super().__init__(seed, action, faults=False)
        self.now_ns = time.time_ns()
        self.step_ns = S // 5
        engine = new_database(folder)
        store_job(engine, self)
        with write(engine) as connection:
            _, token = create_token(connection, TokenKind.API, "t", [Scope.ADMIN], SystemClock().unix_ns())
        engine.dispose()
        port = free_port()
        database = {"RANKWATCH_DATABASE_URL": f"sqlite:///{folder}/rankwatch.db", "RANKWATCH_PORT": str(port)}
        self.api = Role(folder, "api", environment=database)
        self.api.start()
        self.http = Http(f"http://127.0.0.1:{port}", token)
        self.http.ask("GET", "/readyz")
        self.kills = random.Random(seed)
        self.killed = 0
        self.next_kill_s = float("inf")

    def play(self, seconds):
        """Live until the command has ended and its order is closed."""
        end_s = time.monotonic() + seconds
        command_id = self._request()
        self.next_kill_s = time.monotonic() + self.kills.uniform(0.05, 0.8)
        resumed = False
        told = {"state": "requested", "orders": []}
        while time.monotonic() < end_s:
            self._tick()
            if self.killed and time.monotonic() > self.next_kill_s - 1.0 and self.api.process.poll() is not None:
                self.api.start()
            if time.monotonic() > self.next_kill_s and self.killed < 3:
                self.api.kill()
                self.killed += 1
                self.next_kill_s = time.monotonic() + 1.0 + self.kills.uniform(0.5, 3.0)
            told = self._look(command_id) or told
            over = told["state"] not in ("requested", "sent", "accepted")
            if over and self.action == "pause" and not resumed:
                resumed = self._command("resume") is not None
            if over and self.killed >= 3 and told["orders"] and told["orders"][-1]["phase"] == "closed":
                return told
        return told

    def _tick(self):
        time.sleep(0.005)
        self.now_ns = time.time_ns()
        self._deliver()
        for agent in self.agents:
            self._tell(agent)
        for rank in self.ranks:
            self._live(rank)
        self._meet()

    def _request(self):
        while (command := self._command(self.action)) is None:
            self._tick()
        return command["id"]

    def _command(self, action):
        # An agent's view must have told which attempt trains; the key makes the try again harmless.
        for _ in range(20):
            self._tick()
        return self._ask(
            "POST", "/api/v1/jobs/j/commands", json={"action": action}, headers={"Idempotency-Key": action}
        )

    def _look(self, command_id):
        return self._ask("GET", f"/api/v1/commands/{command_id}")

    def _ask(self, method, path, **how):
        from httpx2 import TransportError

        try:
            answer = self.http.client.request(method, path, **how)
        except TransportError:
            return None
        return answer.json() if answer.is_success else None

    def _take_view(self, agent, told):
        view = wire.View("j", "l.0", str(agent.host), "b", self.now_ns, told.ranks)
        from httpx2 import TransportError

        try:
            answer = self.http.client.post("/api/v1/agents/view", content=wire.encode(view), headers=MSGPACK)
        except TransportError:
            return
        if answer.is_success:
            self._take_orders(agent, list(_ORDERS.decode(answer.content).orders))

    def close(self):
        self.http.close()
        self.api.stop() if self.api.process.poll() is None else None


@pytest.mark.parametrize(
    ("action", "seed"),
    [
        ("pause", 1),
        ("rollback", 2),
        pytest.param("checkpoint", 3, marks=long_trial),
        pytest.param("stop", 4, marks=long_trial),
    ],
)
def test_a_command_comes_to_a_clean_end_whenever_the_api_is_killed(tmp_path, action, seed):
    world = RealTimeWorld(seed, action, tmp_path)
    try:
        told = world.play(60.0)
    finally:
        world.close()
    assert world.killed == 3
    assert told["state"] in ("applied", "failed", "refused"), told
    assert not world.violations
    for order, steps in world.acted_steps().items():
        assert len(steps) == 1, f"{order}: {steps}"
    acted = [rank.acted for rank in world.ranks]
    assert all(len({order for order, _, _ in one}) == len(one) for one in acted)
    if told["state"] == "applied":
        assert all(acted)
        assert len({rank.weights for rank in world.ranks}) == 1
