"""A checkpoint that is ordered while the job is paused, over a real database: it is saved, and the job stays paused."""

import pytest

from rankwatch_service.orders import commands
from rankwatch_service.orders.order import CommandOutcome
from rankwatch_service.policy.control_records import OrderPhase, decode_control
from rankwatch_service.store.engine import write
from tests.support.orders.driven_world import DrivenWorld, check, phases
from tests.support.orders.training_world import S


def saved_in_a_pause(world: DrivenWorld) -> None:
    """The ranks saved once at the step of the pause, and trained again only after it was resumed."""
    assert (world.command, world.state_of("checkpoint"), world.state_of("resume")) == ("applied",) * 3
    for rank in world.ranks:
        (_, _, paused_at), *others = rank.acted
        assert [action for _, action, _ in rank.acted] == ["pause", "checkpoint"]
        assert {step for _, _, step in others} == {paused_at}
    check(world)


def test_a_checkpoint_in_a_pause_saves_at_its_step_and_the_job_stays_paused(tmp_path):
    world = DrivenWorld(3, "pause", tmp_path)
    world.also_asked = [(3.0, "checkpoint")]
    world.run(seconds=30.0)
    assert ({rank.mode for rank in world.ranks}, world.state_of("checkpoint")) == ({"paused"}, "applied")
    assert [(order.action, order.phase) for order in world.orders] == [("pause", "closed"), ("pause", "do")]
    assert phases(world) == ["view", "hold", "do", "closed", "hold", "do", "do"]
    world.go_on(20.0, (30.5, "resume"))
    saved_in_a_pause(world)


def test_stream_is_told_that_a_job_is_paused_while_it_saves(tmp_path):
    world = DrivenWorld(3, "pause", tmp_path)
    world.also_asked = [(3.0, "checkpoint"), (6.0, "resume")]
    world.run(seconds=30.0)
    records = [decode_control(record.value) for record in world.controls.read(0, 1_000)]
    paused = [record.paused for record in records if isinstance(record, OrderPhase) and record.command == "checkpoint"]
    assert paused == [True, True, True, False, False]


def test_each_checkpoint_in_a_pause_follows_the_one_before(tmp_path):
    world = DrivenWorld(4, "pause", tmp_path)
    world.run(seconds=3.0)
    world.ask("first", "checkpoint")
    world.ask("second", "checkpoint")
    world.go_on(10.0)
    assert (world.state_of("first"), world.state_of("second")) == ("applied", "applied")
    assert {rank.mode for rank in world.ranks} == {"paused"}
    assert [len({step for _, _, step in rank.acted}) for rank in world.ranks] == [1] * len(world.ranks)
    check(world)


def test_ranks_of_an_older_version_are_not_asked_to_save_in_a_pause(tmp_path):
    world = DrivenWorld(3, "pause", tmp_path)
    for rank in world.ranks:
        rank.of_older_version = True
    world.also_asked = [(3.0, "checkpoint")]
    world.run(seconds=80.0)
    assert ({rank.mode for rank in world.ranks}, world.state_of("checkpoint")) == ({"paused"}, "expired")
    check(world)


def test_a_resume_that_is_requested_while_the_job_saves_follows_the_save(tmp_path):
    world = DrivenWorld(3, "pause", tmp_path)
    world.also_asked = [(3.0, "checkpoint"), (3.05, "resume")]
    world.run(seconds=30.0)
    saved_in_a_pause(world)


def test_a_checkpoint_that_is_requested_after_a_resume_is_saved_in_training(tmp_path):
    world = DrivenWorld(3, "pause", tmp_path)
    world.run(seconds=3.0)
    world.ask("resume", "resume")
    world.now_ns += S // 100
    world.ask("checkpoint", "checkpoint")
    world.go_on(30.0)
    assert (world.state_of("resume"), world.state_of("checkpoint")) == ("applied", "applied")
    assert all(before < after for rank in world.ranks for (*_, before), (*_, after) in [rank.acted])
    check(world)


@pytest.mark.parametrize("effect", ["before", "after"])
def test_a_checkpoint_in_a_pause_outlives_an_api_that_dies_at_any_write(tmp_path, monkeypatch, effect):
    for n in range(1, 10):
        folder = tmp_path / str(n)
        folder.mkdir()
        world = DrivenWorld(n, "pause", folder)
        world.also_asked = [(2.0, "checkpoint"), (6.0, "resume")]
        world.kill_first_api(monkeypatch, n, effect)
        world.run(seconds=60.0)
        saved_in_a_pause(world)


def test_a_checkpoint_that_is_cancelled_in_a_pause_does_not_end_it(tmp_path):
    world = DrivenWorld(3, "pause", tmp_path)
    world.run(seconds=3.0)
    world.ask("checkpoint", "checkpoint")
    world.drivers[0]()
    with write(world.engine) as connection:
        cancelled = CommandOutcome("cancelled", "by me")
        commands.settle(connection, "checkpoint", cancelled, "me", world.now_ns)
    world.go_on(10.0)
    assert ({rank.mode for rank in world.ranks}, world.state_of("checkpoint")) == ({"paused"}, "cancelled")
    assert {len(rank.acted) for rank in world.ranks} == {2}
    check(world)


@pytest.mark.parametrize("seed", range(6))
def test_with_faults_a_checkpoint_in_a_pause_is_saved_at_one_step_or_not_at_all(tmp_path, seed):
    world = DrivenWorld(seed, "pause", tmp_path, faults=True)
    world.also_asked = [(3.0, "checkpoint"), (20.0, "resume")]
    world.run(seconds=300.0)
    assert world.state_of("checkpoint") not in ("requested", "sent", "accepted")
    assert not {rank.mode for rank in world.ranks if rank.state == "running"} & {"held", "acted", "paused"}
    check(world)
