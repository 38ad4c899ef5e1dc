"""Traces, and stacks of a hang, over a real database: what agents are asked, which answers count, how it ends."""

import pytest

from rankwatch.wire import TraceRequest, View
from rankwatch_service.api.background.order_cache import orders_of
from rankwatch_service.incidents.hang import StacksReceived
from rankwatch_service.orders import commands, traces
from rankwatch_service.orders.running_attempt import ReceivedView, store_views
from rankwatch_service.policy.traces import TraceAnswer
from rankwatch_service.store.engine import read, write
from tests.support.orders.driven_world import DrivenWorld
from tests.support.orders.training_world import S
from tests.support.values.presences import trace_answer


class AskedWorld(DrivenWorld):
    """A job for which the command `t` was requested."""

    def __init__(self, folder, action, **params) -> None:
        super().__init__(1, "pause", folder)
        self.ask("t", action, **params)
        self.drive()

    def drive(self, after_s: int = 0) -> None:
        self.now_ns += after_s * S
        self.drivers[0]()

    def answer(self, *answers: TraceAnswer) -> None:
        with write(self.engine) as connection:
            traces.store(connection, answers)
        self.drive()

    def report(self, attempt: str) -> None:
        """An agent reports ranks in this attempt."""
        store_views(self.engine, [ReceivedView(View("j", attempt, "h0", "b", self.now_ns, ()))], self.now_ns)
        self.drive()

    def receive(self, count: int) -> None:
        """Stacks of so many of the four ranks have come."""
        outcome = traces.stacks_outcome(StacksReceived("t", count, 4))
        with write(self.engine) as connection:
            commands.set_state(connection, "t", outcome, "stream", self.now_ns)
        self.drive()

    @property
    def asked(self) -> tuple[TraceRequest, ...]:
        with read(self.engine) as connection:
            return orders_of(connection, "j", self.now_ns).traces

    @property
    def end(self) -> tuple[str, str, int | None]:
        with read(self.engine) as connection:
            row = commands.get(connection, "t")
        return row["state"], row["result"], row["applied_step"]


@pytest.fixture
def world(tmp_path):
    """A trace of ranks 0 and 1."""
    world = AskedWorld(tmp_path, "trace", ranks=[0, 1], steps=3)
    yield world
    world.engine.dispose()


@pytest.fixture
def stacks(tmp_path):
    """Stacks of all four ranks."""
    world = AskedWorld(tmp_path, "stacks")
    yield world
    world.engine.dispose()


def test_agents_are_asked_until_every_rank_has_answered(world):
    assert world.asked == (TraceRequest("t", "l.0", (0, 1), 3),)
    world.answer(trace_answer("t", 1, step=42))
    assert (world.end[0], len(world.asked)) == ("sent", 1)
    world.answer(trace_answer("t", 0, step=41))
    assert (world.end, world.asked) == (("applied", "", 41), ())


def test_what_one_rank_could_not_record_is_part_of_the_result(world):
    world.answer(trace_answer("t", 0), trace_answer("t", 1, "a profiler of the script's own runs"))
    assert world.end == ("applied", "rank 1: a profiler of the script's own runs", 41)


def test_a_trace_that_no_rank_recorded_has_failed(world):
    world.answer(trace_answer("t", 0, "no"), trace_answer("t", 1, "no"))
    assert world.end == ("failed", "rank 0: no; rank 1: no", None)


def test_ranks_that_do_not_answer_in_time_are_named(world):
    world.answer(trace_answer("t", 0))
    world.drive(after_s=61)
    assert world.end == ("applied", "rank 1: it did not answer in time", 41)


@pytest.mark.parametrize("attempt", ["l.1", "m.0"])
def test_a_trace_ends_with_its_attempt(world, attempt):
    world.answer(trace_answer("t", 0))
    assert world.end[0] == "sent"
    world.report(attempt)
    assert (world.end, world.asked) == (("applied", "rank 1: attempt l.0 has ended", 41), ())
    with read(world.engine) as connection:
        assert traces.open_trace(connection, "j") is None


def test_views_of_its_own_attempt_leave_a_trace_open(world):
    world.report("l.0")
    assert (world.end[0], len(world.asked)) == ("sent", 1)


def test_answers_that_nobody_asked_for_and_later_ones_have_no_effect(world):
    world.answer(
        trace_answer("t", 0, "first"),
        trace_answer("t", 0, "second"),
        trace_answer("t", 7),
        trace_answer("unknown", 0),
        trace_answer("t", 1, job="other"),
    )
    assert world.end[0] == "sent"
    with read(world.engine) as connection:
        assert [(row["rank"], row["error"]) for row in traces.answers_of(connection, "t")] == [(0, "first")]


def test_a_cancelled_trace_is_withdrawn_and_takes_no_answer(world):
    with write(world.engine) as connection:
        commands.set_state(connection, "t", commands.CommandOutcome("cancelled", "by sam"), "sam", world.now_ns)
    world.answer(trace_answer("t", 0))
    assert (world.end[0], world.asked) == ("cancelled", ())
    with read(world.engine) as connection:
        assert traces.answers_of(connection, "t") == []


def test_a_trace_neither_ends_a_pause_nor_waits_for_it(driven):
    world = driven(3, "pause", (6.0, "resume"))
    world.ask("t", "trace", ranks=[0], steps=3)
    world.run(seconds=30.0)
    # A resume of a job that is not paused would be refused.
    assert (world.command, world.state_of("resume"), world.state_of("t")) == ("applied", "applied", "sent")


def test_stacks_are_applied_once_all_ranks_have_answered_and_do_not_expire(stacks):
    assert stacks.end[0] == "sent"
    stacks.receive(3)
    assert stacks.end[:2] == ("sent", "3 of 4 ranks answered")
    stacks.receive(4)
    assert stacks.end[:2] == ("applied", "4 of 4 ranks answered")
    stacks.drive(after_s=61)
    assert stacks.end[0] == "applied"


@pytest.mark.parametrize(
    ("count", "end"), [(3, ("applied", "3 of 4 ranks answered")), (0, ("expired", "no rank answered in time"))]
)
def test_stacks_of_some_ranks_are_applied_when_their_time_is_over_and_of_none_expire(stacks, count, end):
    if count:
        stacks.receive(count)
    stacks.drive(after_s=61)
    assert stacks.end[:2] == end
