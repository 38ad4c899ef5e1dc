"""Loops: what a rank records of its steps and values in them, and what becomes of them."""

import logging
import math
import random
import re

import pytest

from rankwatch.loop.loop_exit import position
from rankwatch.reader import RingReader, ValuesEntry
from tests.support.ranks.recorders import Model, Probe, Rank, StatefulLoader


class Tensor:
    """As much of a tensor as a log call looks at."""

    def __init__(self, value: float, device: str) -> None:
        self.value = value
        self.device = type("Device", (), {"type": device})()
        self.read = False

    def detach(self) -> "Tensor":
        return self

    def __float__(self) -> float:
        self.read = True
        return self.value


def test_steps_counts_from_start_and_leaves_at_the_end(rank):
    assert list(rank.watch.steps(5, start=2)) == [2, 3, 4]
    assert [(entry.step, entry.relative_step) for entry in rank.steps] == [(2, 1), (3, 2), (4, 3)]
    assert rank.state == "left"
    assert rank.notes("rank_left") == [{"reason": "end"}]


@pytest.mark.parametrize("loop", [lambda watch: zip(watch.steps(5)), lambda watch: watch.over(Loader())])
def test_a_loop_that_is_broken_off_has_left_and_its_cut_step_is_not_recorded(rank, loop):
    for step, *_ in loop(rank.watch):
        if step == 2:
            break
    assert [entry.step for entry in rank.steps] == [0, 1]
    assert (rank.state, rank.notes("rank_left")) == ("left", [])  # it may yet be an exception on its way out
    (broken_off,) = rank.notes("loop_broken_off")
    rank.watch._loop.exit.record()
    (note,) = rank.notes("rank_left")
    assert note["reason"] == "break"
    assert note["where"].endswith("in test_a_loop_that_is_broken_off_has_left_and_its_cut_step_is_not_recorded")
    assert broken_off == {"where": note["where"]}


def test_an_exception_that_was_caught_before_is_not_what_breaks_a_loop_off(rank):
    kept = [RuntimeError("never raised"), SystemExit(3)]
    rank.watch._faults.caught(RuntimeError("an error of the SDK"))
    for step in rank.watch.steps(5):
        if step == 2:
            break
    (broken_off,) = rank.notes("loop_broken_off")
    assert broken_off.keys() == {"where"}, kept


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("oops")])
def test_an_exception_made_elsewhere_that_leaves_a_loop_is_what_breaks_it_off(rank, error):
    def train(raised: BaseException) -> None:
        for _ in rank.watch.steps(5):
            raise raised

    with pytest.raises(type(error)):
        train(type(error)(*error.args))
    (broken_off,) = rank.notes("loop_broken_off")
    assert broken_off["type"] == type(error).__name__


def test_a_loop_that_an_exception_ends_has_not_left(rank):
    def train() -> None:
        for _ in rank.watch.steps(5):
            1 / 0  # noqa: B018

    with pytest.raises(ZeroDivisionError):
        train()
    rank.watch.crashed(ZeroDivisionError("division by zero"), None)
    assert rank.state == "running"
    assert rank.notes("rank_left") == []
    (note,) = rank.notes("exception")
    assert (note["type"], note["message"], note["left"]) == ("ZeroDivisionError", "division by zero", False)


@pytest.mark.parametrize(("error", "noted"), [(SystemExit(3), ["SystemExit"]), (ValueError("oops"), [])])
def test_what_leaves_a_step_to_end_the_process_is_noted_at_once(rank, error, noted):
    with pytest.raises(type(error)), rank.watch.step():
        raise error
    assert [note["type"] for note in rank.notes("loop_broken_off")] == noted


def test_an_exception_that_this_package_raises_or_passes_on_is_placed_in_the_script(rank):
    with pytest.raises(ValueError, match="nothing to capture") as raised:
        rank.watch.capture(0)
    where = position(raised.value.__traceback__)
    assert re.search(r"test_watch.py:\d+ in test_an_exception.*, in .*rankwatch/watch.py:", where)


def test_between_two_steps_the_rank_is_outside_since_the_first_ended(rank):
    with rank.watch.step():
        assert rank.outside_ns == 0
        rank.clock.advance(2)
        ends_ns = rank.clock.unix_ns()
    rank.clock.advance(8)
    assert rank.outside_ns == ends_ns
    with rank.watch.step():
        assert rank.outside_ns == 0


def test_what_follows_the_work_of_a_step_is_outside_of_it_before_its_boundary_is_reached(rank):
    for _ in rank.watch.steps(2):
        assert rank.outside_ns == 0
        rank.clock.advance(2)
        rank.watch._meter.outside()
        done_ns = rank.clock.unix_ns()
        rank.clock.advance(8)
        assert rank.outside_ns == done_ns
    assert rank.outside_ns == done_ns


def test_a_second_loop_takes_orders_again(rank):
    assert list(rank.watch.steps(2)) == [0, 1]
    steps = rank.watch.steps(4, start=2)
    next(steps)
    assert rank.state == "running"
    assert list(steps) == [3]
    assert [note["reason"] for note in rank.notes("rank_left")] == ["end", "end"]


def test_a_later_loop_counts_anew_for_the_script_and_is_recorded_behind_the_earlier_ones(rank):
    assert list(rank.watch.steps(2)) == [0, 1]
    assert [step for step, _ in rank.watch.over("abc")] == [0, 1, 2]
    assert [step for step, _ in rank.watch.over("abc")] == [0, 1, 2]
    for number in (0, 1, 1):
        with rank.watch.step(number) as step:
            assert step == number
    assert list(rank.watch.steps(2)) == [0, 1]
    assert [entry.step for entry in rank.steps] == list(range(13))


def test_a_later_loop_goes_back_only_to_what_it_has_saved_however_the_script_counts_that(rank):
    list(rank.watch.steps(5))
    loaded = []
    rank.watch.on_rollback(lambda checkpoint: loaded.append(checkpoint.step) or checkpoint.step)
    seen = []
    for step in rank.watch.steps(6):
        seen.append(step)
        if step == 1:
            rank.watch.checkpoint_saved(2, "/own")
            rank.watch.checkpoint_saved(7, "/all")
            rank.order("rollback", 9, checkpoint="local:l.0:7", location="/own", checkpoint_step=7, k=1)
    assert [note["location"] for note in rank.notes("checkpoint_saved")] == ["/own", "/all"]
    assert {note["checkpoint"] for note in rank.notes("checkpoint_saved")} == {"local:l.0:7"}
    assert (seen, loaded) == ([0, 1, 2, 3, 2, 3, 4, 5], [7])


def test_a_capture_keeps_its_number_after_a_rollback_in_a_later_loop(rank):
    rank.watch.state(model=Model(), keep=8, every=3)
    rank.watch.on_rollback(lambda checkpoint: checkpoint.step)
    list(rank.watch.over("ab"))
    rank.order("rollback", 9, checkpoint="local:l.0:6", location="/d", checkpoint_step=6, k=1)
    seen = []
    for step, _ in rank.watch.over("abcdefgh"):
        seen.append(step)
        if seen == [0, 1, 2, 3]:
            rank.watch.checkpoint_saved(step + 1, "/d")
    assert seen == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7]
    saved = [note["checkpoint"] for note in rank.notes("checkpoint_saved")]
    assert saved == [f"memory:l.0:{step}" for step in (0, 3)] + ["local:l.0:6", "memory:l.0:6"] + [
        "memory:l.1:6", "memory:l.1:9"
    ]  # fmt: skip


def test_a_later_loop_does_not_go_back_to_what_an_earlier_one_has_saved(rank):
    list(rank.watch.steps(5))
    rank.watch.on_rollback(lambda checkpoint: checkpoint.step)
    rank.order("rollback", 6, checkpoint="local:l.0:3", location="/early", checkpoint_step=3, k=1)
    assert list(rank.watch.steps(3)) == [0, 1, 2]
    assert (rank.answer.answer, rank.answer.detail) == ("failed", "local:l.0:3 was saved before this loop began")


@pytest.mark.parametrize("held", [False, True])
def test_step_times_of_adjoining_steps_leave_no_gap_and_have_no_time_held_by_an_order(rank, held):
    if held:
        rank.write("o", "hold", step=2)
    for _ in rank.watch.steps(4):
        rank.clock.advance(0.5)
    assert [entry.step_time_s for entry in rank.steps] == pytest.approx([0.5] * 4)


def test_single_steps_count_on_or_take_the_loops_own_number(rank):
    for _ in range(2):
        with rank.watch.step():
            pass
    with rank.watch.step(10) as step:
        assert step == 10
    with rank.watch.step() as step:
        assert step == 11
    assert rank.can == ["pause", "resume", "trace"], "without registering anything"
    rank.watch.close()
    assert rank.state == "running"  # of the private memory that a closed watch goes on with


def test_a_single_step_that_raises_is_not_recorded_nor_are_its_values_and_the_error_is_the_users(rank):
    def a_step_that_fails() -> None:
        with rank.watch.step():
            rank.watch.log(loss=1.0)
            1 / 0  # noqa: B018

    with pytest.raises(ZeroDivisionError):
        a_step_that_fails()
    with rank.watch.step() as step:
        pass
    assert [entry.step for entry in rank.steps] == [step]
    assert values_entries(rank) == []


def test_any_number_can_be_logged_and_nan_is_a_value(rank):
    class Odd:
        def __float__(self) -> float:
            return 2.5

    for _ in rank.watch.steps(1):
        rank.watch.log(loss=math.nan, count=3, flag=True, odd=Odd(), big=math.inf)
        rank.watch.log(count=4)
    values = dict(rank.steps[0].values)
    assert math.isnan(values.pop("loss"))
    assert values == {"count": 4.0, "flag": 1.0, "odd": 2.5, "big": math.inf}


def values_entries(rank: Rank):
    return [(entry.step, entry.values) for entry in rank.entries if isinstance(entry, ValuesEntry)]


def test_what_is_logged_between_two_steps_belongs_to_the_one_that_ended(rank):
    rank.watch.log(loss=1.0, lr=0.1)  # belongs to none, before the first step
    for step in range(3):
        with rank.watch.step(step):
            rank.watch.log(inside=1.0)
        if step == 1:
            rank.watch.log(loss=0.5, fingerprint=2**60 + 1)
    assert [entry.values for entry in rank.steps] == [{"inside": 1.0}] * 3
    assert values_entries(rank) == [(1, {"loss": 0.5, "fingerprint": 2**60 + 1})]
    assert rank.recorder.dropped == {"values_before_steps": 2}


def test_what_is_logged_after_the_last_step_is_kept_when_the_watch_closes(rank):
    with rank.watch.step(7):
        pass
    rank.watch.log(loss=0.25)
    reader = RingReader(rank.recorder.path)
    rank.watch.close()
    late = [entry for entry in reader.poll().entries if isinstance(entry, ValuesEntry)]
    assert [(entry.step, entry.values) for entry in late] == [(7, {"loss": 0.25})]
    reader.close()


def test_what_is_no_number_is_counted_and_the_other_values_are_recorded(rank, caplog):
    with caplog.at_level(logging.ERROR, logger="rankwatch"):
        for _ in rank.watch.steps(3):
            rank.watch.log(a=1.0, wrong="text", none=None, huge=10**400, b=2.0)
    assert all(dict(entry.values) == {"a": 1.0, "b": 2.0} for entry in rank.steps)
    assert rank.watch.errors == 9
    assert isinstance(rank.watch.last_error, (ValueError, TypeError, OverflowError))
    assert rank.watch.last_error.__traceback__ is None
    assert len(caplog.records) == 1  # at most one a minute
    rank.clock.advance(61)
    rank.watch.log(wrong="text")
    assert len(caplog.records) == 2


def test_more_than_64_names_and_16_values_are_kept_as_far_as_there_is_room(rank):
    for _ in rank.watch.steps(1):
        rank.watch.log(**{f"m{number}": float(number) for number in range(70)})
    recorded = {}
    for entry in rank.entries:
        recorded |= dict(getattr(entry, "values", {}))
    assert recorded == {f"m{number}": float(number) for number in range(64)}
    assert {"reason": "metric_names", "count": 6} in rank.notes("records_lost")


def test_what_is_lost_is_reported_once_a_minute_as_what_came_since(rank):
    for _ in rank.watch.steps(300):
        rank.watch.log(step=1.0)  # a name of the record's own
        rank.clock.advance(1)
    counts = [note["count"] for note in rank.notes("records_lost")]
    assert sum(counts) == 300
    assert len(counts) == 6  # five minutes and the end


def test_a_tensor_in_host_memory_is_read_at_once_and_one_on_a_device_never(rank):
    near, far = Tensor(1.5, "cpu"), Tensor(2.5, "cuda")
    for _ in rank.watch.steps(1):
        rank.watch.log(near=near, far=far)
    assert dict(rank.steps[0].values) == {"near": 1.5}
    assert not far.read
    assert rank.recorder.dropped == {"device_values": 1}


def test_the_probe_hears_of_steps_and_the_tensors_in_them_and_not_of_those_in_between(rank):
    probe = rank.watch._loop.probe = Probe()
    with rank.watch.step(0):
        rank.watch.log(loss=Tensor(1.0, "cuda"))
    rank.watch.log(grad_norm=Tensor(1.5, "cpu"), late=Tensor(2.5, "cuda"))
    with rank.watch.step(1):
        pass
    assert values_entries(rank) == [(0, {"grad_norm": 1.5})]
    assert rank.recorder.dropped == {"device_values": 1}
    rank.watch.close()
    assert probe.calls == [("begin", 0, 0), ("log", "loss"), ("end", 0, 0), ("begin", 1, 0), ("end", 1, 0), ("closed",)]


def test_a_probe_that_breaks_costs_its_values_and_nothing_else(rank):
    class Broken(Probe):
        def step_begin(self, step: int, k: int) -> None:
            raise RuntimeError("begin")

        def step_end(self, step: int, k: int) -> None:
            raise RuntimeError("end")

        def log(self, name: str, value: object) -> None:
            raise RuntimeError("log")

    rank.watch._loop.probe = Broken()
    for _ in rank.watch.steps(3):
        rank.watch.log(loss=Tensor(1.0, "cpu"), other=1.0)
    assert [dict(entry.values) for entry in rank.steps] == [{"other": 1.0}] * 3
    assert rank.watch.errors == 9


def test_nothing_that_goes_wrong_inside_reaches_the_loop(rank, monkeypatch):
    def broken(*arguments, **named):
        raise OSError("broken")

    for owner, name in [
        (rank.watch._meter, "begin"),
        (rank.watch._meter, "end"),
        (rank.watch._meter, "phase"),
        (rank.watch._meter, "metric"),
        (rank.recorder, "note"),
    ]:
        monkeypatch.setattr(owner, name, broken)
    done = []
    for step in rank.watch.steps(3):
        with rank.watch.phase("forward"):
            rank.watch.log(loss=1.0)
        rank.watch.checkpoint_saved(step, "/c")
        done.append(step)
    rank.watch.close()
    assert done == [0, 1, 2]
    assert rank.watch.errors > 9


def test_a_change_that_people_want_is_declared_where_it_begins(rank):
    for step in rank.watch.steps(3):
        if step == 1:
            rank.watch.declare("curriculum", "longer texts")
            rank.watch.declare(7, None)
    assert rank.notes("declared") == [{"what": "curriculum", "detail": "longer texts"}, {"what": "7", "detail": "None"}]


def test_a_closed_watch_goes_on_without_recording(rank):
    rank.watch.close()
    rank.watch.close()
    assert not rank.watch.recording
    for _ in rank.watch.steps(3):
        with rank.watch.phase("forward"):
            rank.watch.log(loss=1.0)
    assert rank.watch.errors == 0


class Loader:
    """Five batches an epoch in an order that Python's random state decides when the epoch begins."""

    def __init__(self) -> None:
        self.reported: list[int] = []

    def __len__(self) -> int:
        return 5

    def __iter__(self):
        yield from random.sample(range(5), 5)

    def set_epoch(self, epoch: int) -> None:
        self.reported.append(epoch)


# ---- over -----------------------------------------------------------------------------------------------------------


def test_each_batch_is_a_step_and_the_wait_for_it_is_part_of_the_step(rank):
    def slow():
        for number in range(3):
            rank.clock.advance(2)
            yield number

    for step, batch in rank.watch.over(slow()):
        rank.clock.advance(1)
        assert step == batch
    assert [(entry.step_time_s, entry.busy_s) for entry in rank.steps] == [(3, 1)] * 3
    assert (rank.state, rank.notes("rank_left")) == ("left", [{"reason": "end"}])


@pytest.mark.parametrize("reported", [None, []])
def test_every_epoch_is_set_in_the_loader_and_steps_go_on_through_all_of_them(rank, reported):
    loader, set_epoch = Loader(), None if reported is None else reported.append
    assert [step for step, _ in rank.watch.over(loader, epochs=2, set_epoch=set_epoch)] == list(range(10))
    assert (loader.reported if reported is None else reported) == [0, 1]


def test_an_epoch_may_be_a_loop_of_its_own_whose_number_the_script_tells(rank):
    loader = Loader()
    rank.watch.state(model=Model(), keep=2, every=2)
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert [step for step, _ in rank.watch.over(loader)] == list(range(5))
    assert loader.reported == [0, 1, 2]
    assert [entry.step for entry in rank.steps] == list(range(15))
    assert "rollback_memory" in rank.can


def test_a_loader_without_batches_has_no_step(rank):
    assert list(rank.watch.over([], epochs=3)) == []
    assert [entry.step for entry in rank.steps] == []
    assert rank.notes("rank_left") == [{"reason": "end"}]


def test_a_relaunched_script_skips_what_was_trained_on(rank):
    assert list(rank.watch.over(["a", "b", "c"], epochs=2, start=4)) == [(4, "b"), (5, "c")]


def test_a_loader_with_a_state_of_its_own_is_not_skipped(rank):
    loader = StatefulLoader(5)
    loader.load_state_dict({"at": 3})
    assert list(rank.watch.over(loader, start=3)) == [(3, 4), (4, 5)]


@pytest.mark.parametrize("loader", [Loader, lambda: StatefulLoader(5)])
@pytest.mark.parametrize(("taken", "back"), [(7, 6), (9, 2), (6, 4)])  # within an epoch, and over its begin
def test_a_rollback_moves_the_loader_back(rank, loader, taken, back):
    random.seed(3)
    rank.watch.state(model=Model(), keep=8, every=2)
    rank.order("rollback", taken, checkpoint=f"memory:l.0:{back}", checkpoint_step=back, k=1)
    seen = []
    for step, batch in rank.watch.over(loader(), epochs=2):
        random.random()  # as training does, which draws from the same random state
        seen.append((step, batch))
    assert [step for step, _ in seen] == [*range(taken), *range(back, 10)]
    first, again = dict(seen[:taken]), dict(seen[taken:])
    assert {step: again[step] for step in range(back, taken)} == {step: first[step] for step in range(back, taken)}
    assert "rollback_memory" in rank.can


def test_data_is_given_once(rank):
    rank.watch.state(data=lambda position: iter(()))
    with pytest.raises(ValueError, match="leave data= out"):
        rank.watch.over([1])


# ---- begin, end, should_stop ----------------------------------------------------------------------------------------


def test_begin_and_end_are_a_step(rank):
    watch = rank.watch
    assert [watch.begin(), watch.end(), watch.begin(), watch.end()] == [0, None, 1, None]
    assert watch.begin(7) == 7
    watch.end()
    watch.end()  # no step runs: no effect
    assert [entry.step for entry in rank.steps] == [0, 1, 7]
    assert watch.errors == 0


def test_a_loop_that_asks_can_be_stopped_and_records_no_further_step(rank):
    watch = rank.watch
    assert not watch.should_stop
    assert "stop" in rank.can
    rank.order("stop", 2)
    done = []
    while not watch.should_stop:
        done.append(watch.begin())
        assert not watch.should_stop, "within a step, asking passes no boundary"
        watch.end()
    assert done == [0, 1]
    assert (rank.state, rank.answer.answer) == ("left", "done")
    assert watch.begin() == 2  # a framework that finishes its epoch
    watch.log(loss=1.0)
    watch.end()
    assert [entry.step for entry in rank.steps] == [0, 1]
    assert watch.should_stop


def test_a_boundary_that_was_passed_by_asking_is_not_passed_again(rank):
    saved = []
    rank.watch.on_checkpoint(lambda step: saved.append(step) or "here")
    rank.order("checkpoint", 1)
    for _ in range(3):
        rank.watch.begin()
        rank.watch.end()
        assert not rank.watch.should_stop
    assert saved == [1]


def test_a_rollback_while_asking_is_where_the_next_step_begins(rank):
    rank.watch.state(model=Model(), data=lambda position: iter(range(position, 99)), keep=4, every=1)
    rank.order("rollback", 3, checkpoint="memory:l.0:1", checkpoint_step=1, k=1)
    seen = []
    while len(seen) < 6:
        step = rank.watch.begin()
        seen.append((step, next(rank.watch.batches)))
        rank.watch.end()
        assert not rank.watch.should_stop
    assert seen == [(0, 0), (1, 1), (2, 2), (1, 1), (2, 2), (3, 3)]
    assert "rollback_memory" in rank.can


def test_a_process_that_goes_on_after_its_loop_says_so_and_may_train_again(rank):
    rank.watch.begin()
    rank.watch.end()
    rank.watch.leave()
    assert (rank.state, rank.notes("rank_left")) == ("left", [{"reason": "end"}])
    rank.watch.begin()
    assert rank.state == "running"
    rank.watch.end()
    assert [entry.step for entry in rank.steps] == [0, 1]


# ---- pause ----------------------------------------------------------------------------------------------------------


def test_a_pause_within_a_step_is_outside_of_its_work_and_the_step_is_not_compared(rank):
    watch = rank.watch
    watch.begin()
    with watch.pause("sampling"):
        assert rank.outside_ns
        rank.clock.advance(3)
    assert not rank.outside_ns
    watch.end()
    watch.begin()
    watch.end()
    assert [entry.kind for entry in rank.steps] == [1, 0]


def test_a_pause_between_two_steps_shows_its_name_and_belongs_to_neither(rank):
    watch = rank.watch
    watch.begin()
    watch.end()
    with watch.pause("eval"), watch.pause("eval"):
        assert rank.outside_ns
    watch.begin()
    watch.end()
    assert [entry.kind for entry in rank.steps] == [0, 0]
    assert rank.outside_ns


def test_a_function_can_be_a_pause_and_call_itself(rank):
    @rank.watch.pause("eval")
    def evaluate(depth: int) -> int:
        assert rank.outside_ns
        return depth and evaluate(depth - 1)

    rank.watch.begin()
    assert evaluate(2) == 0
    assert not rank.outside_ns
    rank.watch.end()
    assert [entry.kind for entry in rank.steps] == [1]
    assert rank.watch.errors == 0


def test_an_exception_within_a_pause_leaves_it(rank):
    rank.watch.begin()
    with pytest.raises(ZeroDivisionError), rank.watch.pause():
        1 / 0  # noqa: B018
    assert not rank.outside_ns
