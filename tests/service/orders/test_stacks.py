"""Requests for the stacks of a hang over a real database: they end as applied once the stacks have come."""

import pytest

from rankwatch_service.incidents.hang import StacksReceived
from rankwatch_service.orders import commands, traces
from rankwatch_service.store.engine import read, write
from tests.support.orders.driven_world import DrivenWorld
from tests.support.orders.training_world import S


class StacksWorld(DrivenWorld):
    """A job whose command `s` asks all four ranks for their stacks."""

    def __init__(self, folder) -> None:
        super().__init__(1, "pause", folder)
        self.ask("s", "stacks")
        self.drivers[0]()

    def receive(self, count: int) -> None:
        with write(self.engine) as connection:
            commands.settle(
                connection, "s", traces.stacks_outcome(StacksReceived("s", count, 4)), "stream", self.now_ns
            )
        self.drivers[0]()

    def wait(self) -> None:
        self.now_ns += 61 * S
        self.drivers[0]()

    @property
    def end(self) -> tuple[str, str | None]:
        with read(self.engine) as connection:
            row = commands.get(connection, "s")
        return row["state"], row["result"]


@pytest.fixture
def world(tmp_path):
    world = StacksWorld(tmp_path)
    yield world
    world.engine.dispose()


def test_it_is_applied_once_all_ranks_have_answered_and_does_not_expire(world):
    assert world.end[0] == "sent"
    world.receive(3)
    assert world.end == ("sent", "3 of 4 ranks answered")
    world.receive(4)
    assert world.end == ("applied", "4 of 4 ranks answered")
    world.wait()
    assert world.end[0] == "applied"


def test_with_some_answers_it_is_applied_when_its_time_is_over(world):
    world.receive(3)
    world.wait()
    assert world.end == ("applied", "3 of 4 ranks answered")


def test_without_an_answer_it_expires_and_says_so(world):
    world.wait()
    assert world.end == ("expired", "no rank answered in time")
