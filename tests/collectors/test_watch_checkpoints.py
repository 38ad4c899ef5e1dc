"""What a rank captures, gives back at a rollback, and tells of its checkpoints."""

import contextlib
import json
import random

import pytest

from rankwatch import layout
from rankwatch.layout import Directive
from rankwatch.reader import RingReader
from tests.support.ranks.recorders import Probe, Rank


@pytest.fixture
def rank(tmp_path):
    return Rank(tmp_path)


class Model:
    """State that each step changes, and that decides the next."""

    def __init__(self) -> None:
        self.weight = [0.0]

    def state_dict(self) -> dict:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict) -> None:
        self.weight = state["weight"]

    def train(self, batch: float) -> None:
        self.weight[0] = self.weight[0] * 0.9 + batch * random.random()


def train(rank: Rank, max_steps: int) -> tuple[list[int], Model]:
    """Train a model by steps(); captures every 2 steps, three of them kept."""
    random.seed(1)
    model = Model()
    rank.watch.state(model=model, data=lambda position: iter(range(position, 1_000)), keep=3, every=2)
    done = []
    for step in rank.watch.steps(max_steps):
        model.train(float(next(rank.watch.batches)))
        done.append(step)
    return done, model


def test_captures_are_registered_as_checkpoints_in_memory(rank):
    train(rank, 5)
    notes = rank.notes("checkpoint_saved")
    assert [note["checkpoint"] for note in notes] == ["memory:l.0:0", "memory:l.0:2", "memory:l.0:4"]
    assert all(note["tier"] == "memory" for note in notes)
    assert rank.watch._loop.memory.kept == ["memory:l.0:0", "memory:l.0:2", "memory:l.0:4"]
    assert rank.notes("checkpoint_gone") == []


def test_the_capture_that_the_slot_names_is_kept_and_every_other_that_goes_is_told(rank):
    rank._put(Directive("", "l.0", "closed", proven="memory:l.0:2"))
    train(rank, 14)
    assert rank.watch._loop.memory.kept == ["memory:l.0:2", "memory:l.0:10", "memory:l.0:12"]
    gone = [note["checkpoint"] for note in rank.notes("checkpoint_gone")]
    assert gone == ["memory:l.0:0", "memory:l.0:4", "memory:l.0:6", "memory:l.0:8"]
    assert rank.answer.order == ""  # nothing was asked, so nothing is answered


def test_an_order_in_the_slot_names_it_too(rank):
    fields = {"action": "stop", "step": 11, "proven": "memory:l.0:2"}
    rank._put(Directive("o", "l.0", "hold", **fields))
    rank.write_after(1, Directive("o", "l.0", "do", **fields))
    assert train(rank, 20)[0][-1] == 10
    assert rank.watch._loop.memory.kept == ["memory:l.0:2", "memory:l.0:8", "memory:l.0:10"]


def test_a_capture_that_was_asked_for_and_is_not_there_is_told_as_gone(rank):
    fields = {"action": "rollback", "step": 5, "checkpoint": "memory:l.0:3", "checkpoint_step": 3, "k": 1}
    rank._put(Directive("o", "l.0", "hold", **fields))
    train(rank, 6)
    assert (rank.answer.answer, rank.answer.detail) == ("failed", "memory:l.0:3 is not in memory any more")
    assert [note["checkpoint"] for note in rank.notes("checkpoint_gone")] == ["memory:l.0:3"]


def test_one_place_for_captures_is_said_at_the_start_in_the_training_output(tmp_path, capsys):
    first = Rank(tmp_path, number=0)
    first.watch.state(model=Model(), keep=2)
    assert capsys.readouterr().err == ""
    first.watch.state(model=Model(), keep=1, every=50)
    assert "keep=1: every 50 steps the only capture is replaced" in capsys.readouterr().err


def test_a_rollback_to_memory_goes_on_exactly_as_if_nothing_had_happened(rank, tmp_path):
    undisturbed = train(Rank(tmp_path / "undisturbed"), 12)[1]
    probe = rank.watch._loop.probe = Probe()
    fields = {"action": "rollback", "step": 7, "checkpoint": "memory:l.0:4", "checkpoint_step": 4, "k": 1}
    rank._put(Directive("o", "l.0", "hold", **fields))
    rank.write_after(1, Directive("o", "l.0", "do", **fields, lease_s=120.0))
    rank.write_after(3, Directive("o", "l.0", "go", **fields))
    done, model = train(rank, 12)
    assert done == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11]
    assert model.weight == undisturbed.weight
    assert rank.answer.fingerprint == 4711
    assert probe.calls.count(("restored",)) == 1
    assert "memory:l.0:6" not in rank.watch._loop.memory.kept  # undone, and of another attempt
    assert rank.watch._loop.memory.kept == ["memory:l.0:0", "memory:l.1:8", "memory:l.1:10"]


def test_a_checkpoint_order_without_a_hook_makes_a_capture(rank):
    fields = {"action": "checkpoint", "step": 3}
    rank._put(Directive("o", "l.0", "hold", **fields))
    rank.write_after(1, Directive("o", "l.0", "do", **fields, lease_s=120.0))
    rank.write_after(3, Directive("o", "l.0", "go", **fields))
    train(rank, 4)
    assert "memory:l.0:3" in rank.watch._loop.memory.kept


def test_what_the_job_can_do_grows_with_what_it_registers(rank):
    def can() -> list[str]:
        reader = RingReader(rank.recorder.path)
        found = reader.header.identity.get("can", [])
        reader.close()
        return found

    rank.watch.on_checkpoint(lambda step: "")
    assert can() == ["pause", "resume", "trace", "checkpoint"]
    rank.watch.on_rollback(lambda checkpoint: 0)
    next(rank.watch.steps(1))
    assert can() == ["pause", "resume", "trace", "checkpoint", "stop", "rollback_disk", "rollback"]
    rank.watch.state(data=lambda position: iter(()), keep=2)
    assert can()[-3:] == ["rollback_disk", "rollback_memory", "rollback"]


def can_of(rank: Rank) -> set[str]:
    reader = RingReader(rank.recorder.path)
    found = {action for action in reader.header.identity.get("can", []) if action.startswith("rollback")}
    reader.close()
    return found


def test_without_its_data_a_job_makes_no_captures(rank):
    rank.watch.state(model=Model(), keep=2, every=1)
    list(rank.watch.steps(3))
    assert can_of(rank) == set()
    assert rank.notes("checkpoint_saved") == []


def test_a_script_that_numbers_its_steps_itself_or_draws_ahead_of_them_cannot_go_back_in_memory(rank, tmp_path):
    rank.watch.state(model=Model(), data=lambda position: iter(range(100)), keep=2)
    assert can_of(rank) == {"rollback", "rollback_memory"}
    for step in range(5, 7):
        assert can_of(rank) == {"rollback", "rollback_memory"}
        with rank.watch.step(step):
            next(rank.watch.batches)
    assert can_of(rank) == set()

    broken = Rank(tmp_path / "broken")
    broken.watch.state(model=Model(), data=lambda position: iter(range(9)), keep=2)
    for _ in range(3):
        with contextlib.suppress(MemoryError), broken.watch.step():
            next(broken.watch.batches)
            raise MemoryError
    assert "rollback" in can_of(broken)

    other = Rank(tmp_path / "other")
    other.watch.state(model=Model(), data=lambda position: iter(range(3)), keep=2)
    for _ in other.watch.batches:
        with other.watch.step():
            pass
    assert can_of(other) == set()


def going_back(rank: Rank, checkpoint: str, at: int = 5) -> None:
    """An order of all three phases, written ahead: at step `at` back to a checkpoint."""
    fields = {"action": "rollback", "step": at, "checkpoint": checkpoint, "k": 1}
    fields |= {"checkpoint_step": int(checkpoint.rpartition(":")[2]), "location": "/c"}
    rank._put(Directive("o", "l.0", "hold", **fields))
    rank.write_after(1, Directive("o", "l.0", "do", **fields, lease_s=120.0))
    rank.write_after(3, Directive("o", "l.0", "go", **fields))


def test_a_rollback_to_memory_is_refused_once_the_data_would_stay_where_it_is(rank):
    going_back(rank, "memory:l.0:2", at=3)
    rank.watch.on_rollback(lambda checkpoint: checkpoint.step)
    rank.watch.state(model=Model(), data=lambda position: iter(range(position, 100)), keep=4, every=2)
    for step in rank.watch.steps(7):
        next(rank.watch.batches)
        if step == 2:
            rank.watch._loop.without_memory("it draws ahead")
    assert rank.answer.answer == "failed"
    assert rank.answer.detail == "memory:l.0:2 cannot restore everything: it draws ahead"
    assert rank.watch.rolled_back is None


def test_a_rollback_to_disk_moves_the_data_to_where_it_was_at_the_save(rank):
    seen = []
    going_back(rank, "local:l.0:2")
    rank.watch.state(data=lambda position: iter(range(position, 100)))
    rank.watch.on_rollback(lambda checkpoint: seen.append(checkpoint) or checkpoint.step)
    drawn = []
    for step in rank.watch.steps(7):
        drawn.append((step, next(rank.watch.batches)))
        if step == 1:
            rank.watch.checkpoint_saved(2, "/c")
    assert drawn == [(step, step) for step in (0, 1, 2, 3, 4, 2, 3, 4, 5, 6)]
    assert seen == [("local:l.0:2", "/c", 2, "full")]


def test_a_checkpoint_that_another_process_saved_is_refused_where_the_data_could_not_follow(rank):
    going_back(rank, "local:k.0:2")
    rank.watch.state(data=lambda position: iter(range(position, 100)))
    rank.watch.on_rollback(lambda checkpoint: checkpoint.step)
    assert list(rank.watch.steps(7)) == list(range(7))
    assert "so the position of its data is unknown" in rank.answer.detail


@pytest.mark.parametrize(("place", "tier"), [("/c/1", "local"), ("file:///c", "local"), ("s3://b/c", "remote")])
def test_a_place_with_a_scheme_survives_the_host(rank, place, tier):
    rank.watch.on_checkpoint(lambda step: place)
    assert rank.watch._loop.checkpoint(5) == place
    assert rank.notes("checkpoint_saved")[0]["tier"] == tier


def test_a_save_of_the_loops_own_is_registered_with_what_it_says(rank):
    rank.watch.checkpoint_saved(40, "/c/40", tier="remote", seconds=1.5, size_bytes=10, shards=1)
    assert rank.notes("checkpoint_saved") == [
        {"checkpoint": "remote:l.0:40", "tier": "remote", "location": "/c/40", "seconds": 1.5, "bytes": 10, "shards": 1}
    ]


def test_the_advice_for_a_relaunch_is_read_and_a_bad_file_is_none(rank, tmp_path):
    path = layout.resume_path(str(tmp_path), "gpt")
    assert rank.watch.resume is None
    advice = {"job": "gpt", "checkpoint": "local:k.0:40", "location": "/c/40", "step": 40}
    for content, expected in [
        (json.dumps(advice), ("local:k.0:40", "/c/40", 40, "relaunch")),
        (json.dumps({**advice, "checkpoint": ""}), None),
        (json.dumps({**advice, "job": "other"}), None),
    ]:
        with open(path, "w") as file:
            file.write(content)
        assert rank.watch.resume == expected
    for content in ("", "{", "[]", '{"job": "gpt"}'):
        with open(path, "w") as file:
            file.write(content)
        assert rank.watch.resume is None
    assert rank.watch.errors == 4


def test_using_what_was_not_registered_is_a_clear_error(rank):
    with pytest.raises(ValueError, match=r"watch.state\(data="):
        _ = rank.watch.batches
    with pytest.raises(ValueError, match=r"watch.state"):
        rank.watch.capture(0)
