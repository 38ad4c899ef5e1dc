"""What a rank captures, restores at a rollback, and reports of its checkpoints and their failures."""

import contextlib
import errno
import json
import os
import random

import pytest

from rankwatch import layout
from rankwatch.integrations.started import Saves
from rankwatch.layout import Directive
from tests.support.ranks.recorders import Model, Probe, Rank


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


def test_the_capture_that_the_slot_names_is_kept_and_every_other_that_goes_is_reported(rank):
    rank._put(Directive("", "l.0", "closed", proven="memory:l.0:2"))
    train(rank, 14)
    assert rank.watch._loop.memory.kept == ["memory:l.0:2", "memory:l.0:10", "memory:l.0:12"]
    gone = [note["checkpoint"] for note in rank.notes("checkpoint_gone")]
    assert gone == ["memory:l.0:0", "memory:l.0:4", "memory:l.0:6", "memory:l.0:8"]
    assert rank.answer.order == ""  # nothing was asked, so nothing is answered


def test_an_order_in_the_slot_names_it_too(rank):
    rank.order("stop", 11, proven="memory:l.0:2")
    assert train(rank, 20)[0][-1] == 10
    assert rank.watch._loop.memory.kept == ["memory:l.0:2", "memory:l.0:8", "memory:l.0:10"]


def test_a_capture_that_was_asked_for_and_is_not_there_is_reported_as_gone(rank):
    rank.order("rollback", 5, checkpoint="memory:l.0:3", checkpoint_step=3, k=1)
    train(rank, 6)
    assert (rank.answer.answer, rank.answer.detail) == ("failed", "memory:l.0:3 is not in memory any more")
    assert rank.sleeps == 0, "it is refused before anyone holds"
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
    rank.order("rollback", 7, checkpoint="memory:l.0:4", checkpoint_step=4, k=1)
    done, model = train(rank, 12)
    assert done == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11]
    assert model.weight == undisturbed.weight
    assert rank.answer.fingerprint == 4711
    assert probe.calls.count(("restored",)) == 1
    assert "memory:l.0:6" not in rank.watch._loop.memory.kept  # undone, and of another attempt
    assert rank.watch._loop.memory.kept == ["memory:l.0:0", "memory:l.1:8", "memory:l.1:10"]


def test_a_checkpoint_order_without_a_hook_makes_a_capture(rank):
    rank.order("checkpoint", 3)
    train(rank, 4)
    assert "memory:l.0:3" in rank.watch._loop.memory.kept


def test_what_the_job_can_do_grows_with_what_it_registers(rank):
    rank.watch.on_checkpoint(lambda step: "")
    assert rank.can == ["pause", "resume", "trace", "checkpoint"]
    rank.watch.on_rollback(lambda checkpoint: 0)
    next(rank.watch.steps(1))
    assert rank.can == ["pause", "resume", "trace", "checkpoint", "stop", "rollback_disk", "rollback"]
    rank.watch.state(data=lambda position: iter(()), keep=2)
    assert rank.can[-3:] == ["rollback_disk", "rollback_memory", "rollback"]


def can_of(rank: Rank) -> set[str]:
    return {action for action in rank.can if action.startswith("rollback")}


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
    """Ordered back to a checkpoint at step `at`."""
    step = int(checkpoint.rpartition(":")[2])
    rank.order("rollback", at, checkpoint=checkpoint, checkpoint_step=step, location="/c", k=1)


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
    for content, expected, errors in [
        (json.dumps(advice), ("local:k.0:40", "/c/40", 40, "relaunch"), 0),
        (json.dumps({**advice, "checkpoint": ""}), None, 0),
        (json.dumps({**advice, "job": "other"}), None, 0),
        *((content, None, count) for count, content in enumerate(("", "{", "[]", '{"job": "gpt"}'), 1)),
    ]:
        with open(path, "w") as file:
            file.write(content)
        assert (rank.watch.resume, rank.watch.errors) == (expected, errors)


def test_using_what_was_not_registered_is_a_clear_error(rank):
    with pytest.raises(ValueError, match=r"watch.state\(data="):
        _ = rank.watch.batches
    with pytest.raises(ValueError, match=r"watch.state"):
        rank.watch.capture(0)


FULL = OSError(errno.ENOSPC, "No space left on device", "/data/step-3.pt")


def failing(error: BaseException):
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def failing_while(error: BaseException) -> None:
    """As `torch.save` does, whose file cannot be closed after an error in it."""
    try:
        raise error
    finally:
        failing(RuntimeError("unexpected pos 64 vs 0"))()


@pytest.mark.parametrize("part", ["phase", "pause"])
@pytest.mark.parametrize(("name", "what"), [("checkpoint_save", "save"), ("checkpoint_load", "restore")])
def test_an_exception_that_leaves_a_part_of_the_loop_that_saves_or_loads_is_reported(rank, part, name, what):
    for step in rank.watch.steps(4):
        if step == 2:
            with pytest.raises(OSError, match="No space"), getattr(rank.watch, part)(name):
                failing(FULL)()
    (note,) = rank.notes("checkpoint_failed")
    assert (note["what"], note["type"], note["errno"]) == (what, "OSError", errno.ENOSPC)
    assert note["location"] == "/data/step-3.pt"
    assert note["where"].startswith("tests/collectors/test_checkpoints.py:")
    assert [entry.step for entry in rank.entries if getattr(entry, "kind", None) == "checkpoint_failed"] == [2]


@pytest.mark.parametrize(
    ("name", "error"),
    [("eval", FULL), ("data_wait", FULL), ("checkpoint_save", KeyboardInterrupt()), ("checkpoint_save", SystemExit(3))],
    ids=repr,
)
def test_an_exception_in_another_part_and_an_interruption_of_a_save_are_no_failures_of_it(rank, name, error):
    with pytest.raises(type(error)), rank.watch.phase(name):
        failing(error)()
    assert rank.notes("checkpoint_failed") == []


def test_the_file_systems_error_behind_another_one_is_found_and_what_follows_from_an_interruption_is_none(rank):
    for error in (KeyboardInterrupt(), FULL):
        assert rank.notes("checkpoint_failed") == []
        with pytest.raises(RuntimeError), rank.watch.phase("checkpoint_save"):
            failing_while(error)
    (note,) = rank.notes("checkpoint_failed")
    assert (note["type"], note["errno"]) == ("RuntimeError", errno.ENOSPC)


def test_a_failure_that_passes_through_several_parts_is_reported_once_with_what_each_knows(rank):
    saves = Saves(rank.watch)
    for _ in rank.watch.steps(1):
        with pytest.raises(RuntimeError), saves.save(3, "/data/three"), rank.watch.phase("checkpoint_save"):
            failing(RuntimeError("broken"))()
    (note,) = rank.notes("checkpoint_failed")
    assert (note["location"], note["message"]) == ("/data/three", "broken")
    assert rank.notes("checkpoint_saved") == []


def test_an_ordered_rollback_whose_load_raises_is_reported_with_its_checkpoint(rank):
    rank.watch.on_rollback(failing(EOFError("Ran out of input")))
    rank.order("rollback", 3, checkpoint="local:k.0:2", location="/data/two", k=1)
    with pytest.raises(SystemExit):
        list(rank.watch.steps(5))
    (note,) = rank.notes("checkpoint_failed")
    assert (note["what"], note["checkpoint"], note["location"]) == ("restore", "local:k.0:2", "/data/two")
    assert (note["type"], note["message"], note["ordered"]) == ("EOFError", "Ran out of input", True)


def test_a_capture_that_fails_is_reported_and_its_step_is_recorded(rank):
    class Model:
        state_dict = load_state_dict = failing(MemoryError("no room"))

    rank.watch.state(model=Model(), data=lambda position: iter(()), keep=2, every=2)
    assert list(rank.watch.steps(4)) == [0, 1, 2, 3]
    assert [(note["tier"], note["type"]) for note in rank.notes("checkpoint_failed")] == [("memory", "MemoryError")] * 2
    assert [entry.step for entry in rank.steps] == [0, 1, 2, 3]


@pytest.mark.parametrize("part", ["phase", "pause"])
@pytest.mark.parametrize(("name", "what"), [("checkpoint_save", "save"), ("checkpoint_load", "restore")])
def test_the_first_part_without_an_exception_after_a_failure_is_reported_once(rank, part, name, what):
    def run(error: Exception | None = None) -> None:
        rank.clock.advance(1.0)
        with contextlib.suppress(OSError), getattr(rank.watch, part)(name):
            rank.clock.advance(1.0)
            if error is not None:
                raise error

    reported = []
    for step in rank.watch.steps(4):
        run(FULL if step in (1, 3) else None)
        run()
        reported.append([note["what"] for note in rank.notes("checkpoint_succeeded")])
    first = int(what == "save")  # of the process, which does not know what an earlier one could not save
    assert [len(said) - first for said in reported] == [0, 1, 1, 2]
    assert {*reported[-1]} == {what}


def test_a_failure_that_the_script_catches_within_the_save_is_no_success(rank):
    def hook(step: int) -> None:
        rank.clock.advance(1.0)
        with contextlib.suppress(OSError), rank.watch.phase("checkpoint_save"):
            failing(FULL)()

    failures = rank.watch._loop.failures
    with failures.of("save"):
        hook(3)
    assert (len(rank.notes("checkpoint_failed")), rank.notes("checkpoint_succeeded")) == (1, [])
    rank.clock.advance(1.0)
    with failures.of("save"):
        pass
    assert rank.notes("checkpoint_succeeded") == [{"what": "save", "tier": ""}]


def test_a_capture_that_succeeds_says_nothing_of_saves_to_disk(rank):
    failures = rank.watch._loop.failures
    for tier in ("", "memory"):
        with contextlib.suppress(OSError), failures.of("save", tier=tier):
            failing(FULL)()
    rank.clock.advance(1.0)
    with failures.of("save", tier="memory"):
        pass
    assert [note["tier"] for note in rank.notes("checkpoint_succeeded")] == ["memory"]


def test_a_save_that_fails_alike_after_a_success_in_the_same_step_is_reported_again(rank):
    for error in (FULL, None, FULL):
        rank.clock.advance(1.0)
        with contextlib.suppress(OSError), rank.watch.phase("checkpoint_save"):
            if error is not None:
                raise error
    assert len(rank.notes("checkpoint_failed")) == 2


def test_what_a_framework_loads_itself_is_reported_with_its_place_and_the_call_is_passed_on(rank):
    saves = Saves(rank.watch)
    assert saves.loads(lambda *args, **more: (args, more), "here", strict=True) == (("here",), {"strict": True})
    assert saves.loads(lambda **more: more, path="here") == {"path": "here"}
    with pytest.raises(FileNotFoundError):
        saves.loads(os.stat, "/not/there")
    (note,) = rank.notes("checkpoint_failed")
    assert (note["what"], note["location"], note["errno"]) == ("restore", "/not/there", errno.ENOENT)
