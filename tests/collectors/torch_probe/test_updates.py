"""What a loop does after the optimizer steps that usually end its step is no part of the step."""

import pytest

from rankwatch.torch_probe.gradients import STEPS_REMEMBERED, Updates
from tests.support.ranks.sink import FakeSink


@pytest.fixture
def sink():
    return FakeSink()


def step(updates: Updates, times: int) -> None:
    """One step of the loop with so many backwards and updates."""
    updates.step_begins()
    for _ in range(times):
        update(updates)


def update(updates: Updates) -> None:
    updates.gradients_are_computed()
    updates.begins()
    updates.ends()


def test_the_first_step_is_one_piece_and_later_ones_end_with_their_update(sink):
    updates = Updates(sink)
    step(updates, 1)
    assert not sink.is_outside
    step(updates, 1)
    assert sink.is_outside


def test_of_several_updates_in_each_step_the_last_ends_it(sink):
    updates = Updates(sink)
    step(updates, 3)
    step(updates, 2)
    assert not sink.is_outside
    update(updates)
    assert sink.is_outside


def test_an_update_more_than_usual_goes_on_with_the_step_and_ends_it_again(sink):
    updates = Updates(sink)
    step(updates, 1)
    step(updates, 1)
    updates.begins()
    assert not sink.is_outside
    updates.ends()
    assert sink.is_outside


def test_micro_batches_without_an_update_change_nothing_about_what_ends_a_step(sink):
    updates = Updates(sink)
    for times in (0, 0, 0, 1) * 3:
        step(updates, times)
    assert sink.is_outside


def test_where_two_models_train_in_turns_a_pause_is_seen_after_either_and_no_work_is_taken_for_one(sink):
    updates = Updates(sink)
    for times in (1, 1, 2) * 2:
        step(updates, times)
    step(updates, 1)
    assert sink.is_outside
    updates.gradients_are_computed()
    assert not sink.is_outside  # a hang in the reduction of the second model is one inside the step


def test_gradients_that_no_watched_optimizer_takes_are_no_step_where_all_steps_are_alike(sink):
    updates = Updates(sink)
    step(updates, 1)
    step(updates, 1)
    updates.gradients_are_computed()
    assert sink.is_outside


def test_a_loop_that_changes_its_habits_is_learned_anew(sink):
    updates = Updates(sink)
    step(updates, 1)
    for _ in range(STEPS_REMEMBERED):
        step(updates, 2)
    sink.is_outside = False
    step(updates, 1)
    assert not sink.is_outside
