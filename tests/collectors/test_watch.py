"""What a rank records of its steps and values, and what becomes of its loop."""

import logging
import math

import pytest

from rankwatch.reader import RingReader, ValuesEntry
from tests.support.ranks.recorders import Probe, Rank


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


def test_a_loop_that_is_broken_off_has_left_and_its_cut_step_is_not_recorded(rank):
    for step in rank.watch.steps(5):
        if step == 2:
            break
    assert [entry.step for entry in rank.steps] == [0, 1]
    assert (rank.state, rank.notes("rank_left")) == ("left", [])  # it may yet be an exception on its way out
    rank.watch._loop.exit.tell()
    (note,) = rank.notes("rank_left")
    assert note["reason"] == "break"
    assert note["where"].endswith("in test_a_loop_that_is_broken_off_has_left_and_its_cut_step_is_not_recorded")


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
    rank.watch.close()
    assert rank.state == "running"  # of the private memory that a closed watch goes on with


def test_a_single_step_that_raises_is_not_recorded_and_the_error_is_the_users(rank):
    with pytest.raises(ZeroDivisionError), rank.watch.step():
        1 / 0  # noqa: B018
    with rank.watch.step() as step:
        pass
    assert [entry.step for entry in rank.steps] == [step]


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
    for step in range(3):
        with rank.watch.step(step):
            rank.watch.log(inside=1.0)
        if step == 1:
            rank.watch.log(loss=0.5, fingerprint=2**60 + 1)
    assert [entry.values for entry in rank.steps] == [{"inside": 1.0}] * 3
    assert values_entries(rank) == [(1, {"loss": 0.5, "fingerprint": 2**60 + 1})]


def test_what_is_logged_after_the_last_step_is_kept_when_the_watch_closes(rank):
    with rank.watch.step(7):
        pass
    rank.watch.log(loss=0.25)
    reader = RingReader(rank.recorder.path)
    rank.watch.close()
    late = [entry for entry in reader.poll().entries if isinstance(entry, ValuesEntry)]
    assert [(entry.step, entry.values) for entry in late] == [(7, {"loss": 0.25})]
    reader.close()


def test_what_is_logged_before_the_first_step_belongs_to_none_and_is_counted(rank):
    rank.watch.log(loss=1.0, lr=0.1)
    with rank.watch.step(0):
        pass
    assert values_entries(rank) == []
    assert rank.recorder.dropped == {"values_before_steps": 2}


def test_values_of_a_step_that_was_cut_short_are_not_recorded(rank):
    def a_step_that_fails() -> None:
        with rank.watch.step(0):
            rank.watch.log(loss=1.0)
            1 / 0  # noqa: B018

    with pytest.raises(ZeroDivisionError):
        a_step_that_fails()
    with rank.watch.step(1):
        pass
    assert values_entries(rank) == []


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


def test_what_is_lost_is_told_once_a_minute_as_what_came_since(rank):
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


def test_between_two_steps_a_tensor_in_host_memory_is_read_and_one_on_a_device_is_counted(rank):
    probe = rank.watch._loop.probe = Probe()
    with rank.watch.step(0):
        pass
    rank.watch.log(grad_norm=Tensor(1.5, "cpu"), loss=Tensor(2.5, "cuda"))
    with rank.watch.step(1):
        pass
    assert values_entries(rank) == [(0, {"grad_norm": 1.5})]
    assert rank.recorder.dropped == {"device_values": 1}
    assert not [call for call in probe.calls if call[0] == "log"]


def test_the_probe_hears_of_steps_tensors_and_restores(rank):
    probe = rank.watch._loop.probe = Probe()
    for _ in rank.watch.steps(1):
        rank.watch.log(loss=Tensor(1.0, "cuda"))
    rank.watch.close()
    assert probe.calls == [("begin", 0, 0), ("log", "loss"), ("end", 0, 0), ("closed",)]


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
