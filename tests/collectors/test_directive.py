import os
from collections.abc import Callable

import pytest

from rankwatch.layout import Directive
from rankwatch.loop.directive import EXIT_STATUS, end_process
from tests.support.ranks.recorders import Rank


def directive(order: str, phase: str, action: str = "pause", step: int = 3, **fields: object) -> Directive:
    return Directive(order, "l.0", phase, action, step, **fields)


def while_held(rank: Rank, act: Callable[[], object]) -> None:
    """Act whenever the held rank is about to sleep."""
    sleep = rank.watch._loop._follower._sleep
    rank.watch._loop._follower._sleep = lambda seconds: (act(), sleep(seconds))[1]


def run(rank: Rank, max_steps: int = 6) -> list[int]:
    """The steps that were done; each takes 10 ms."""
    done = []
    for step in rank.watch.steps(max_steps):
        rank.clock.advance(0.01)
        done.append(step)
    return done


def test_without_orders_a_rank_never_sleeps(rank):
    assert run(rank) == [0, 1, 2, 3, 4, 5]
    assert rank.sleeps == 0
    assert rank.answer.order == ""


def test_a_rank_holds_at_the_boundary_of_the_ordered_step_and_reports_it(rank):
    seen = []
    rank.write("o", "hold", step=3)
    steps = rank.watch.steps(6)
    assert [next(steps) for _ in range(3)] == [0, 1, 2]
    assert rank.answer.order == ""
    while_held(rank, lambda: seen.append((rank.answer, rank.state)) or rank.write("o", "release"))
    assert next(steps) == 3
    (answer, state), *_ = seen
    assert (answer.order, answer.answer, answer.step, state) == ("o", "held", 3, "held")
    assert (rank.answer.answer, rank.state) == ("released", "running")


def test_a_rank_that_is_past_the_step_says_passed_and_goes_on(rank):
    steps = rank.watch.steps(6)
    assert [next(steps) for _ in range(5)] == [0, 1, 2, 3, 4]
    rank.write("o", "hold", step=3)
    assert next(steps) == 5
    assert (rank.answer.answer, rank.answer.step, rank.sleeps) == ("passed", 5, 0)
    rank.write("o", "do", step=3)
    assert list(steps) == []
    assert rank.answer.answer == "passed"


def test_a_hold_without_do_ends_by_its_lease(rank):
    rank.write("o", "hold", step=3, lease_s=5.0)
    before_s = rank.clock.monotonic_s()
    assert run(rank) == [0, 1, 2, 3, 4, 5]
    assert 5.0 <= rank.clock.monotonic_s() - before_s < 5.2
    assert rank.answer.answer == "released"


def test_a_do_that_comes_after_the_lease_is_not_obeyed(rank):
    rank.write("o", "hold", "stop", step=3)
    steps = rank.watch.steps(6)
    for _ in range(4):
        next(steps)
    rank.write("o", "do", "stop", step=3)
    assert list(steps) == [4, 5]
    assert rank.answer.answer == "released"


def test_a_release_before_the_step_is_reached_takes_the_hold_away(rank):
    rank.write("o", "hold", step=3)
    steps = rank.watch.steps(6)
    next(steps)
    rank.write("o", "release", step=3)
    assert list(steps) == [1, 2, 3, 4, 5]
    assert (rank.answer.answer, rank.sleeps) == ("released", 0)


@pytest.mark.parametrize("attempt", ["other.0", "l.1", "l", ""])
def test_an_order_for_another_attempt_is_ignored(rank, attempt):
    rank._put(Directive("o", attempt, "hold", "stop", 3))
    assert run(rank) == [0, 1, 2, 3, 4, 5]
    assert (rank.answer.order, rank.sleeps) == ("", 0)


DO = directive("o", "do", lease_s=60.0)


@pytest.mark.parametrize(
    ("written", "sleeps", "detail"),
    [
        ({5: directive("o", "closed")}, 5, ""),
        ({2: DO, 500: directive("o", "go")}, 500, ""),
        ({1: DO}, 30_000, "the pause's lease ended"),
        ({1: DO, 25_000: DO}, 55_000, "the pause's lease ended"),
    ],
    ids=["closed", "until go", "by its lease", "by its renewed lease"],
)
def test_how_a_pause_ends(rank, written, sleeps, detail):
    rank.write("o", "hold", step=3)
    for after, one in written.items():
        rank.write_after(after, one)
    assert run(rank) == [0, 1, 2, 3, 4, 5]
    assert rank.sleeps == pytest.approx(sleeps, abs=50)
    assert rank.answer.detail == detail
    assert rank.answer.step == 3


def test_a_paused_rank_takes_the_next_order_at_the_same_boundary(rank):
    rank.write("o", "hold", step=3)
    rank.write_after(2, directive("o", "do"))
    rank.write_after(4, directive("p", "hold", "stop", step=3))
    rank.write_after(6, directive("p", "do", "stop", step=3))
    assert run(rank) == [0, 1, 2]
    assert (rank.answer.order, rank.answer.answer) == ("p", "done")


def test_a_stop_ends_the_loop_at_its_step_and_the_rank_has_left(rank):
    rank.write("o", "hold", "stop", step=3)
    rank.write_after(2, directive("o", "do", "stop"))
    assert run(rank) == [0, 1, 2]
    assert (rank.answer.answer, rank.answer.step, rank.state) == ("done", 3, "left")
    assert rank.notes("rank_left") == [{"reason": "stop"}]


def test_an_order_is_done_at_most_once_however_often_it_is_written(rank):
    saves = []
    rank.watch.on_checkpoint(lambda step: saves.append(step) or f"/c/{step}")
    rank.order("checkpoint", 3)
    steps = rank.watch.steps(10)
    for _ in range(5):
        next(steps)
    for phase in ("hold", "do", "hold", "do", "go"):
        rank.write("o", phase, "checkpoint", step=6)
        next(steps)
    assert saves == [3]
    assert rank.answer.answer == "went"


@pytest.mark.parametrize("fails", [False, True])
def test_a_checkpoint_is_saved_once_answered_with_its_place_and_registered_and_after_a_failure_training_goes_on(
    rank, fails
):
    @rank.watch.on_checkpoint
    def save(step: int) -> str:
        if fails:
            raise OSError("disk full")
        return f"/c/{step}"

    answers = []
    rank.order("checkpoint", 3)
    while_held(rank, lambda: answers.append(rank.answer))
    assert run(rank) == [0, 1, 2, 3, 4, 5]
    expected = ("failed", "OSError: disk full", 3) if fails else ("done", "/c/3", 3)
    assert expected in [(answer.answer, answer.detail, answer.step) for answer in answers]
    saved = [(note["checkpoint"], note["tier"], note["location"]) for note in rank.notes("checkpoint_saved")]
    assert saved == ([] if fails else [("local:l.0:3", "local", "/c/3")])
    failed = [(note["what"], note["type"]) for note in rank.notes("checkpoint_failed")]
    assert failed == ([("save", "OSError")] if fails else [])
    assert rank.ended == []


def checkpoint_in_a_pause(rank: Rank) -> None:
    rank.write("p", "hold", step=3)
    rank.write_after(1, directive("p", "do", lease_s=60.0))
    rank.write_after(10, directive("o", "hold", "checkpoint", lease_s=60.0))
    rank.write_after(20, directive("o", "do", "checkpoint", lease_s=120.0))
    rank.write_after(30, directive("o", "do", lease_s=60.0))


@pytest.mark.parametrize("fails", [False, True])
def test_a_paused_rank_saves_at_the_step_of_the_pause_and_is_paused_again(rank, fails):
    saves, answers = [], []

    @rank.watch.on_checkpoint
    def save(step: int) -> str:
        saves.append(step)
        if fails:
            raise OSError("disk full")
        return f"/c/{step}"

    checkpoint_in_a_pause(rank)
    rank.write_after(500, directive("o", "go"))
    while_held(rank, lambda: answers.append(rank.answer))
    assert run(rank) == [0, 1, 2, 3, 4, 5]
    assert (saves, rank.sleeps) == ([3], 500)
    reported = [(answer.order, answer.answer) for answer in answers]
    assert list(dict.fromkeys(reported)) == [
        ("p", "held"), ("p", "done"), ("o", "held"), ("o", "failed" if fails else "done"), ("o", "done")
    ][: 5 if fails else 4]  # fmt: skip
    assert (rank.answer.answer, rank.answer.step) == ("went", 3)


def test_a_pause_that_follows_a_checkpoint_ends_by_its_lease_and_training_goes_on(rank):
    rank.watch.on_checkpoint(lambda step: f"/c/{step}")
    checkpoint_in_a_pause(rank)
    assert run(rank) == [0, 1, 2, 3, 4, 5]
    assert rank.ended == []
    assert rank.answer.detail == "the pause's lease ended"


def rolling_back(rank: Rank, hook=lambda checkpoint: checkpoint.step) -> None:
    rank.watch.on_rollback(hook)
    rank.write("o", "hold", "rollback", step=3, checkpoint="local:l.0:1")
    fields = {"checkpoint": "local:l.0:1", "location": "/c/1", "checkpoint_step": 1, "k": 1, "lease_s": 120.0}
    rank.write_after(2, directive("o", "do", "rollback", **fields))


def test_a_rollback_goes_on_from_the_restored_step_in_the_next_attempt(rank):
    asked = []
    rolling_back(rank, lambda checkpoint: asked.append(checkpoint) or checkpoint.step)
    rank.write_after(5, directive("o", "go", "rollback"))
    assert run(rank) == [0, 1, 2, 1, 2, 3, 4, 5]
    assert [tuple(checkpoint) for checkpoint in asked] == [("local:l.0:1", "/c/1", 1, "full")]
    assert (rank.answer.answer, rank.answer.step, rank.answer.k) == ("went", 1, 1)
    entries = [(entry.k, entry.step) for entry in rank.steps]
    assert entries == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]
    assert rank.notes("checkpoint_loaded")[0]["checkpoint"] == "local:l.0:1"


def test_after_a_rollback_orders_of_the_attempt_before_are_ignored_and_new_ones_obeyed(rank):
    rolling_back(rank)
    rank.write_after(5, directive("o", "go", "rollback"))
    steps = rank.watch.steps(20)
    for _ in range(5):
        next(steps)
    rank._put(Directive("old", "l.0", "hold", "stop", 2))
    next(steps)
    assert rank.answer.order == "o"
    rank._put(Directive("new", "l.1", "hold", "stop", 9))
    rank.write_after(1, Directive("new", "l.1", "do", "stop", 9))
    assert list(steps)[-1] == 8
    assert rank.answer.order == "new"


@pytest.mark.parametrize("phase", ["release", "closed", "hold"])
def test_after_a_rollback_only_go_lets_a_rank_go_on_and_without_it_the_process_ends(rank, phase):
    rolling_back(rank)
    rank.write_after(5, directive("o", phase, "rollback"))
    rank.write_after(9, directive("other", "hold", "pause"))
    with pytest.raises(SystemExit):
        run(rank)
    assert rank.ended == [EXIT_STATUS]
    assert rank.sleeps * 0.002 == pytest.approx(120.0, abs=0.2)
    assert rank.answer.answer == "done"


def test_a_rollback_that_fails_never_goes_on(rank):
    def load(checkpoint):
        raise FileNotFoundError(checkpoint.location)

    rolling_back(rank, load)
    rank.write_after(5, directive("o", "go", "rollback"))
    with pytest.raises(SystemExit):
        run(rank)
    assert (rank.answer.answer, rank.answer.detail) == ("failed", "FileNotFoundError: /c/1")


def test_a_rank_that_waits_for_slower_ones_keeps_waiting_while_do_is_renewed(rank):
    rolling_back(rank)
    rank.write_after(50_000, directive("o", "do", "rollback", lease_s=120.0))
    rank.write_after(90_000, directive("o", "go", "rollback"))
    assert run(rank)[3] == 1
    assert rank.ended == []


@pytest.mark.parametrize("action", ["checkpoint", "rollback", "dance"])
def test_what_the_job_cannot_do_is_refused_before_anyone_holds(rank, action):
    rank.write("o", "hold", action, step=3, checkpoint="local:l.0:1" if action == "rollback" else "")
    assert run(rank) == [0, 1, 2, 3, 4, 5]
    assert (rank.answer.answer, rank.sleeps) == ("failed", 0)
    assert f"does not support {action}" in rank.answer.detail


def test_a_torn_or_senseless_directive_is_counted_and_the_next_one_obeyed(rank):
    steps = rank.watch.steps(20)
    next(steps)
    cell = rank.recorder.directive
    for payload in (b"{", b'{"order":"o"}', b"[1]"):
        cell.write(payload)
        next(steps)
    assert rank.recorder.dropped["directives"] == 3
    rank.write("o", "hold", "stop", step=6)
    rank.write_after(1, directive("o", "do", "stop", step=6))
    assert list(steps) == [4, 5]


def test_an_interrupt_while_held_reaches_the_user_and_the_state_is_running_again(rank):
    def interrupt() -> None:
        raise KeyboardInterrupt

    while_held(rank, interrupt)
    rank.write("o", "hold", step=3)
    with pytest.raises(KeyboardInterrupt):
        run(rank)
    assert rank.state != "held"


def test_the_process_really_ends_with_status_75():
    child = os.fork()
    if child == 0:
        end_process()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 75
