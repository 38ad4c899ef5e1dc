"""Loops that are not `watch.steps`: over a loader, and in the hands of a framework."""

import random

import pytest

from tests.support.ranks.recorders import Model, StatefulLoader


class Loader:
    """Five batches an epoch in an order that Python's random state decides when the epoch begins."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def __len__(self) -> int:
        return 5

    def __iter__(self):
        yield from random.sample(range(5), 5)

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


# ---- over -----------------------------------------------------------------------------------------------------------


def test_each_batch_is_a_step_and_the_wait_for_it_is_part_of_the_step(rank):
    def slow():
        for number in range(3):
            rank.clock.advance(2)
            yield number

    seen = []
    for step, batch in rank.watch.over(slow()):
        rank.clock.advance(1)
        seen.append((step, batch))
    assert seen == [(0, 0), (1, 1), (2, 2)]
    entries = rank.steps
    assert [(entry.step_time_s, entry.busy_s) for entry in entries] == [(3, 1)] * 3
    assert (rank.state, rank.notes("rank_left")) == ("left", [{"reason": "end"}])


def test_every_epoch_is_told_and_steps_go_on_through_them(rank):
    loader = Loader()
    assert [step for step, _ in rank.watch.over(loader, epochs=2)] == list(range(10))
    assert loader.told == [0, 1]


def test_the_script_may_say_how_an_epoch_is_told(rank):
    told = []
    list(rank.watch.over([1, 2], epochs=3, set_epoch=told.append))
    assert told == [0, 1, 2]


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


def test_a_loop_over_a_loader_that_is_broken_off_says_where(rank):
    for step, _ in rank.watch.over(Loader()):
        if step == 2:
            break
    rank.watch._loop.exit.tell()
    (note,) = rank.notes("rank_left")
    assert note["reason"] == "break"
    assert note["where"].endswith("in test_a_loop_over_a_loader_that_is_broken_off_says_where")


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


def test_within_a_step_asking_passes_no_boundary(rank):
    rank.order("stop", 1)
    rank.watch.begin(0)
    assert not rank.watch.should_stop
    rank.watch.end()
    assert rank.watch.should_stop


def test_a_process_that_goes_on_after_its_loop_says_so_and_may_train_again(rank):
    rank.watch.begin()
    rank.watch.end()
    rank.watch.leave()
    assert (rank.state, rank.notes("rank_left")) == ("left", [{"reason": "end"}])
    rank.watch.begin()
    assert rank.state == "running"
    rank.watch.end()
    assert [entry.step for entry in rank.steps] == [0, 1]


def test_a_loop_of_single_steps_can_be_paused_without_registering_anything(rank):
    with rank.watch.step():
        pass
    assert rank.can == ["pause", "resume", "trace"]


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
