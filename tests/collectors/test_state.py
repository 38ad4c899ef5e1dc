import copy
import random
import sys
from collections import OrderedDict

import pytest

from rankwatch.loop.state import (
    Batches,
    Capture,
    EpochBatches,
    MemoryTier,
    TrainingState,
    copied,
    random_states,
    set_random_states,
)
from tests.support.ranks.recorders import Model, StatefulLoader


class Counter(Model):
    """Its future depends on a list that it changes in place, and on Python's random state."""

    gradient = None

    def zero_grad(self) -> None:
        self.gradient = None

    def train(self, batch: float) -> None:
        self.gradient = batch
        super().train(batch)


def shuffled(position: int):
    """Batches of which each epoch of 5 is shuffled by its number."""
    while True:
        epoch, at = divmod(position, 5)
        order = random.Random(epoch).sample(range(5), 5)
        yield float(order[at])
        position += 1


def train(job: Counter, state: TrainingState, steps: int) -> None:
    for _ in range(steps):
        job.train(next(state.batches))


def a_job() -> tuple[Counter, TrainingState]:
    random.seed(7)
    job = Counter()
    return job, TrainingState({"model": job}, shuffled)


@pytest.mark.parametrize("at", [0, 1, 7])
@pytest.mark.parametrize("astray", [0, 1, 13])
def test_training_goes_on_from_a_capture_as_if_nothing_had_happened(at, astray):
    job, state = a_job()
    train(job, state, 20)
    undisturbed = list(job.weight)
    job, state = a_job()
    train(job, state, at)
    capture = state.capture(at)
    train(job, state, astray)
    state.restore(capture)
    train(job, state, 20 - at)
    assert job.weight == undisturbed


def test_a_capture_can_be_restored_twice():
    job, state = a_job()
    train(job, state, 4)
    capture = state.capture(4)
    ends = []
    for _ in range(2):
        state.restore(capture)
        train(job, state, 6)
        ends.append(list(job.weight))
    assert ends[0] == ends[1]


def test_restoring_clears_gradients():
    job, state = a_job()
    capture = state.capture(0)
    train(job, state, 1)
    assert job.gradient is not None
    state.restore(capture)
    assert job.gradient is None


def test_random_states_are_set_after_the_data_is_rebuilt():
    class Drawing:
        """A data iterator whose making draws a random number, as a shuffling loader's does."""

        def __call__(self, position: int):
            random.random()
            return iter(range(position, 100))

    random.seed(3)
    state = TrainingState({}, Drawing())
    next(state.batches)
    capture = state.capture(1)
    expected = random.random()
    state.restore(capture)
    assert random.random() == expected


def test_data_that_was_not_begun_is_not_begun_by_a_restore():
    built = []
    state = TrainingState({}, lambda position: built.append(position) or iter("abc"))
    state.restore(state.capture(0))
    assert built == []
    assert next(state.batches) == "a"
    assert built == [0]


@pytest.mark.parametrize("at", [0, 3])
def test_data_with_a_state_of_its_own_is_moved_by_it_under_the_loops_feet(at):
    state = TrainingState({}, StatefulLoader())
    batches = state.batches  # as a loop holds it
    drawn = [next(batches) for _ in range(at)]
    capture = state.capture(at)
    expected = [(next(batches), random.random()) for _ in range(2)]
    state.restore(capture)
    assert drawn == list(range(1, at + 1))
    assert [(next(batches), random.random()) for _ in range(2)] == expected


def test_a_loader_has_as_many_epochs_as_are_asked_for():
    batches = TrainingState({}, StatefulLoader(3)).batches
    assert [list(batches) for _ in range(2)] == [[1, 2, 3], [1, 2, 3]]
    assert batches.position == 6


class Stream:
    """As torch's DataLoader over a stream: it has `__len__`, which raises."""

    def __iter__(self):
        return iter([1, 2, 3])

    def __len__(self) -> int:
        raise TypeError("object of type 'Stream' has no len()")


@pytest.mark.parametrize("skipped", [0, 2])
def test_a_stream_without_a_length_is_drawn_from_its_begin(skipped):
    batches = EpochBatches(Stream(), epochs=2)
    batches.skip(skipped)
    assert list(batches) == [1, 2, 3, 1, 2, 3][skipped:]


def test_the_end_of_the_data_is_the_loops_business():
    batches = Batches(lambda position: iter(range(position, 2)))
    assert list(batches) == [0, 1]
    assert batches.position == 2


@pytest.mark.parametrize(("members", "data"), [({"model": 5}, None), ({}, 5), ({"model": object()}, None)])
def test_what_keeps_no_state_is_a_setup_mistake(members, data):
    with pytest.raises(ValueError, match="state_dict"):
        TrainingState(members, data)


def test_numpys_random_state_is_kept_where_it_is_loaded():
    import numpy as np

    np.random.seed(5)
    states = random_states()
    expected = np.random.random(3).tolist()
    set_random_states(states)
    assert np.random.random(3).tolist() == expected


def test_without_torch_and_numpy_only_pythons_state_is_there(monkeypatch):
    for name in ("torch", "numpy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert set(random_states()) == {"python"}


def test_copies_share_nothing_and_keep_what_loading_needs():
    class Metadata(OrderedDict):
        pass

    value = Metadata(a=[1, (2, {"b": [3]})])
    value._metadata = {"version": 2}
    twin = copied(value)
    assert twin == value
    assert type(twin) is Metadata
    assert twin._metadata == {"version": 2}
    twin["a"][1][1]["b"].append(4)
    assert value["a"] == [1, (2, {"b": [3]})]


def a_capture(step: int) -> Capture:
    return Capture(step, {}, {}, None, None)


def captured(memory: MemoryTier, *steps: int) -> list[str]:
    """Add captures as the loop does; returns what had to go for them."""
    gone = []
    for step in steps:
        gone += memory.make_room()
        memory.add(f"memory:l.0:{step}", a_capture(step))
    return gone


def steps_kept(memory: MemoryTier) -> list[int]:
    return [memory[checkpoint].step for checkpoint in memory.kept]


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("proven", ["", "memory:l.0:20", "memory:gone.0:20"])
def test_there_are_never_more_captures_than_asked_for_and_room_is_made_first(keep, proven):
    memory = MemoryTier(keep, 10)
    memory.proven = proven
    for step in range(0, 400, 10):
        memory.make_room()
        assert len(memory.kept) < keep
        memory.add(f"memory:l.0:{step}", a_capture(step))
    assert len(memory.kept) == keep


@pytest.mark.parametrize(
    ("keep", "proven", "steps", "kept", "gone"),
    [
        (3, "", [0, 10, 20, 30, 40], [0, 30, 40], [10, 20]),
        (2, "memory:earlier.0:990", [0, 10, 20], [0, 20], [10]),
        (1, "memory:l.0:0", [0, 10], [10], [0]),
    ],
    ids=["until one is proven the oldest stays", "one that is not kept is proven", "with one place the last stays"],
)
def test_which_captures_are_kept(keep, proven, steps, kept, gone):
    memory = MemoryTier(keep, 10)
    memory.proven = proven
    assert captured(memory, *steps) == [f"memory:l.0:{step}" for step in gone]
    assert steps_kept(memory) == kept
    memory.drop_after(steps[-2])  # a rollback, which undoes the last
    assert steps_kept(memory) == [step for step in kept if step < steps[-1]]


def test_the_newest_proven_capture_stays_whatever_comes_after_it_and_the_one_before_it_may_go():
    memory = MemoryTier(4, 100)
    captured(memory, 0, 100, 200, 300)
    memory.proven = "memory:l.0:300"
    captured(memory, *range(400, 1_700, 100))
    assert steps_kept(memory) == [300, 1_400, 1_500, 1_600]
    memory.proven = "memory:l.0:1500"
    captured(memory, 1_700, 1_800, 1_900)
    assert steps_kept(memory) == [1_500, 1_700, 1_800, 1_900]


@pytest.mark.parametrize(("keep", "every"), [(-1, 1), (17, 1), (1, 0)])
def test_a_memory_tier_out_of_range_is_a_setup_mistake(keep, every):
    with pytest.raises(ValueError, match="must be"):
        MemoryTier(keep, every)


def test_the_size_of_a_capture_is_that_of_its_tensors():
    import numpy as np

    states = {"model": {"w": np.zeros(10), "n": 3}, "optimizer": {"state": [np.zeros(5, np.float32)]}}
    assert a_capture(0)._replace(states=copy.copy(states)).size_bytes == 100
