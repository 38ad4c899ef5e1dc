"""Traces over a real database: what agents are asked, which answers count, and how the command ends."""

import pytest

from rankwatch.wire import TraceRequest, View
from rankwatch_service.api.background.order_cache import orders_of
from rankwatch_service.orders import commands, traces
from rankwatch_service.orders.running_attempt import ReceivedView, store_views
from rankwatch_service.policy.traces import TraceAnswer
from rankwatch_service.store.engine import read, write
from tests.support.orders.driven_world import DrivenWorld, check
from tests.support.orders.training_world import S
from tests.support.values.traces import trace_answer


class TracedWorld(DrivenWorld):
    """A job whose trace `t` of ranks 0 and 1 was requested."""

    def __init__(self, folder) -> None:
        super().__init__(1, "pause", folder)
        self.ask("t", "trace", ranks=[0, 1], steps=3)
        self.drive()

    def drive(self) -> None:
        self.drivers[0]()

    def answer(self, *answers: TraceAnswer) -> None:
        with write(self.engine) as connection:
            traces.store(connection, answers)
        self.drive()

    def report(self, attempt: str) -> None:
        """An agent reports ranks in this attempt."""
        store_views(self.engine, [ReceivedView(View("j", attempt, "h0", "b", self.now_ns, ()))], self.now_ns)
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
    world = TracedWorld(tmp_path)
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
    world.now_ns += 61 * S
    world.drive()
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
        commands.settle(connection, "t", commands.CommandOutcome("cancelled", "by sam"), "sam", world.now_ns)
    world.answer(trace_answer("t", 0))
    assert (world.end[0], world.asked) == ("cancelled", ())
    with read(world.engine) as connection:
        assert traces.answers_of(connection, "t") == []


def test_a_trace_neither_ends_a_pause_nor_waits_for_it(tmp_path):
    world = DrivenWorld(3, "pause", tmp_path)
    world.ask("t", "trace", ranks=[0], steps=3)
    world.also_asked = [(6.0, "resume")]
    world.run(seconds=30.0)
    # A resume of a job that is not paused would be refused.
    assert (world.command, world.state_of("resume"), world.state_of("t")) == ("applied", "applied", "sent")
    check(world)
