"""A save or a restore that fails is told, with its reason; the exception is the script's own."""

import contextlib
import errno
import os

import pytest

from rankwatch.integrations.started import Saves
from rankwatch.layout import Directive
from tests.support.ranks.recorders import Rank

FULL = OSError(errno.ENOSPC, "No space left on device", "/data/step-3.pt")


@pytest.fixture
def rank(tmp_path):
    return Rank(tmp_path)


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
def test_an_exception_that_leaves_a_part_of_the_loop_that_saves_or_loads_is_told(rank, part, name, what):
    for step in rank.watch.steps(4):
        if step == 2:
            with pytest.raises(OSError, match="No space"), getattr(rank.watch, part)(name):
                failing(FULL)()
    (note,) = rank.notes("checkpoint_failed")
    assert (note["what"], note["type"], note["errno"]) == (what, "OSError", errno.ENOSPC)
    assert note["location"] == "/data/step-3.pt"
    assert note["where"].startswith("tests/collectors/test_checkpoint_failures.py:")
    assert [entry.step for entry in rank.entries if getattr(entry, "kind", None) == "checkpoint_failed"] == [2]


@pytest.mark.parametrize("name", ["eval", "data_wait"])
def test_an_exception_in_another_part_is_none(rank, name):
    with pytest.raises(OSError, match="No space"), rank.watch.phase(name):
        failing(FULL)()
    assert rank.notes("checkpoint_failed") == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_a_save_that_is_interrupted_has_not_failed(rank, error):
    with pytest.raises(type(error)), rank.watch.phase("checkpoint_save"):
        failing(error)()
    assert rank.notes("checkpoint_failed") == []


def test_an_exception_that_follows_from_an_interruption_is_none(rank):
    with pytest.raises(RuntimeError), rank.watch.phase("checkpoint_save"):
        failing_while(KeyboardInterrupt())
    assert rank.notes("checkpoint_failed") == []


def test_the_file_systems_error_behind_another_one_is_found(rank):
    with pytest.raises(RuntimeError), rank.watch.phase("checkpoint_save"):
        failing_while(FULL)
    (note,) = rank.notes("checkpoint_failed")
    assert (note["type"], note["errno"]) == ("RuntimeError", errno.ENOSPC)


def test_a_failure_that_passes_through_several_parts_is_told_once_with_what_each_knows(rank):
    saves = Saves(rank.watch)
    for _ in rank.watch.steps(1):
        with pytest.raises(RuntimeError), saves.save(3, "/data/three"), rank.watch.phase("checkpoint_save"):
            failing(RuntimeError("broken"))()
    (note,) = rank.notes("checkpoint_failed")
    assert (note["location"], note["message"]) == ("/data/three", "broken")
    assert rank.notes("checkpoint_saved") == []


def test_an_ordered_save_that_raises_is_told_and_training_goes_on(rank):
    rank.watch.on_checkpoint(failing(FULL))
    fields = {"action": "checkpoint", "step": 3}
    rank._put(Directive("o", "l.0", "hold", **fields))
    rank.write_after(1, Directive("o", "l.0", "do", **fields, lease_s=120.0))
    rank.write_after(3, Directive("o", "l.0", "go", **fields))
    assert list(rank.watch.steps(5)) == [0, 1, 2, 3, 4]
    (note,) = rank.notes("checkpoint_failed")
    assert (note["what"], note["type"]) == ("save", "OSError")


def test_an_ordered_rollback_whose_load_raises_is_told_with_its_checkpoint(rank):
    rank.watch.on_rollback(failing(EOFError("Ran out of input")))
    fields = {"action": "rollback", "step": 3, "checkpoint": "local:k.0:2", "location": "/data/two", "k": 1}
    rank._put(Directive("o", "l.0", "hold", **fields))
    rank.write_after(1, Directive("o", "l.0", "do", **fields, lease_s=0.01))
    with pytest.raises(SystemExit):
        list(rank.watch.steps(5))
    (note,) = rank.notes("checkpoint_failed")
    assert (note["what"], note["checkpoint"], note["location"]) == ("restore", "local:k.0:2", "/data/two")
    assert (note["type"], note["message"], note["ordered"]) == ("EOFError", "Ran out of input", True)


def test_a_capture_that_fails_is_told_and_its_step_is_recorded(rank):
    class Model:
        state_dict = load_state_dict = failing(MemoryError("no room"))

    rank.watch.state(model=Model(), data=lambda position: iter(()), keep=2, every=2)
    assert list(rank.watch.steps(4)) == [0, 1, 2, 3]
    assert [(note["tier"], note["type"]) for note in rank.notes("checkpoint_failed")] == [("memory", "MemoryError")] * 2
    assert [entry.step for entry in rank.entries if hasattr(entry, "step_time_s")] == [0, 1, 2, 3]


@pytest.mark.parametrize("part", ["phase", "pause"])
@pytest.mark.parametrize(("name", "what"), [("checkpoint_save", "save"), ("checkpoint_load", "restore")])
def test_the_first_part_without_an_exception_after_a_failure_is_told_once(rank, part, name, what):
    def run(error: Exception | None = None) -> None:
        rank.clock.advance(1.0)
        with contextlib.suppress(OSError), getattr(rank.watch, part)(name):
            rank.clock.advance(1.0)
            if error is not None:
                raise error

    told = []
    for step in rank.watch.steps(4):
        run(FULL if step in (1, 3) else None)
        run()
        told.append([note["what"] for note in rank.notes("checkpoint_succeeded")])
    first = int(what == "save")  # of the process, which does not know what an earlier one could not save
    assert [len(said) - first for said in told] == [0, 1, 1, 2]
    assert {*told[-1]} == {what}


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


def test_a_save_that_fails_alike_after_a_success_in_the_same_step_is_told_again(rank):
    for error in (FULL, None, FULL):
        rank.clock.advance(1.0)
        with contextlib.suppress(OSError), rank.watch.phase("checkpoint_save"):
            if error is not None:
                raise error
    assert len(rank.notes("checkpoint_failed")) == 2


def test_what_a_framework_loads_itself_is_told_with_its_place_and_the_call_is_passed_on(rank):
    saves = Saves(rank.watch)
    assert saves.loads(lambda *args, **more: (args, more), "here", strict=True) == (("here",), {"strict": True})
    assert saves.loads(lambda **more: more, path="here") == {"path": "here"}
    with pytest.raises(FileNotFoundError):
        saves.loads(os.stat, "/not/there")
    (note,) = rank.notes("checkpoint_failed")
    assert (note["what"], note["location"], note["errno"]) == ("restore", "/not/there", errno.ENOENT)
