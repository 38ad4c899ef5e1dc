"""The driver over a real database: whole commands, crashes at every write, two drivers, commands that meet."""

import msgspec
import pytest
from sqlalchemy import func, insert, select, update

from rankwatch.wire import View
from rankwatch_service.api.background.order_cache import orders_of
from rankwatch_service.orders import driver
from rankwatch_service.orders.running_attempt import ReceivedView, read_training, store_views
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Attempt, Audit, Checkpoint, Command, Feed, Job
from tests.support.orders.driven_world import DrivenWorld, check, phases
from tests.support.orders.training_world import S

ACTIONS = ("pause", "checkpoint", "rollback", "stop")


@pytest.mark.parametrize("action", ACTIONS)
def test_a_command_is_applied_and_every_phase_is_told_to_stream(tmp_path, action):
    world = DrivenWorld(1, action, tmp_path)
    if action == "pause":
        world.also_asked = [(3.0, "resume")]
    world.run(seconds=30.0)
    assert world.command == "applied"
    assert phases(world) == ["view", "hold", "do", "go", "closed"]
    assert {len(rank.acted) for rank in world.ranks} == {1}
    if action == "pause":
        assert world.state_of("resume") == "applied"
    check(world)


@pytest.mark.parametrize("action", ["pause", "rollback"])
@pytest.mark.parametrize("effect", ["before", "after"])
def test_an_api_that_dies_at_any_write_is_followed_by_another(tmp_path, monkeypatch, action, effect):
    for n in range(1, 9):
        folder = tmp_path / str(n)
        folder.mkdir()
        world = DrivenWorld(n, action, folder)
        world.also_asked = [(3.0, "resume")] if action == "pause" else []
        world.kill_first_api(monkeypatch, n, effect)
        world.run(seconds=60.0)
        assert world.command == "applied", f"write {n}: {world.command} {world.result}"
        check(world)


@pytest.mark.parametrize("seed", range(6))
def test_with_faults_and_two_drivers_nothing_is_mixed(tmp_path, seed):
    world = DrivenWorld(seed, ACTIONS[seed % 4], tmp_path, faults=True)
    world.also_asked = [(8.0, "resume")]
    world.run(seconds=300.0)
    assert world.command not in ("requested", "sent", "accepted")
    check(world)


def test_a_rollback_ends_a_pause_first(tmp_path):
    world = DrivenWorld(3, "pause", tmp_path)
    world.also_asked = [(3.0, "rollback")]
    world.run(seconds=40.0)
    assert (world.command, world.state_of("rollback")) == ("applied", "applied")
    assert {rank.weights for rank in world.ranks} == {"memory:l.0:0@1"}
    check(world)


def test_a_resume_without_a_pause_is_refused(tmp_path):
    world = DrivenWorld(3, "checkpoint", tmp_path)
    world.also_asked = [(0.1, "resume")]
    world.run(seconds=20.0)
    assert world.state_of("resume") == "refused"
    check(world)


def test_a_pause_lasts_until_it_is_resumed_however_long(tmp_path):
    world = DrivenWorld(5, "pause", tmp_path)
    world.run(seconds=90.0)
    assert {rank.mode for rank in world.ranks} == {"paused"}
    world.go_on(30.0, (90.5, "resume"))
    assert {rank.state for rank in world.ranks} == {"running"}
    check(world)


def test_a_pause_ends_by_its_lease_when_every_api_is_gone(tmp_path):
    world = DrivenWorld(5, "pause", tmp_path)
    world.run(seconds=3.0)
    assert {rank.mode for rank in world.ranks} == {"paused"}
    world.drivers_stop_until_ns = [world.now_ns + 10**15] * 2
    step = max(rank.step for rank in world.ranks)
    world.go_on(75.0)
    assert min(rank.step for rank in world.ranks) > step
    check(world)


@pytest.mark.parametrize("action", [*ACTIONS, "relaunch"])
def test_a_command_that_two_drivers_find_due_at_once_has_one_order(tmp_path, monkeypatch, action):
    world = DrivenWorld(1, action, tmp_path)
    world.store_checkpoint("local:l.0:1")
    world.ask("c", action)
    with monkeypatch.context() as patch:
        find = driver._to_begin

        def found_by_both(*arguments):
            found = find(*arguments)
            patch.setattr(driver, "_to_begin", find)
            world.drivers[1]()
            return found

        patch.setattr(driver, "_to_begin", found_by_both)
        world.drivers[0]()
    world._look()
    assert (world.command, len(world.orders)) == ("sent", 1), world.result
    check(world)


def test_commands_for_an_attempt_that_has_ended_are_refused(tmp_path):
    world = DrivenWorld(1, "pause", tmp_path)
    with write(world.engine) as connection:
        columns = {"started_unix_ns": 1, "world_size": 1, "topology": {}, "number": 9}
        connection.execute(insert(Attempt).values(job="j", attempt="later.0", **columns))
    store_views(world.engine, [ReceivedView(View("j", "later.0", "9", "b", 0, ()))], world.now_ns)
    world.run(seconds=2.0)
    assert (world.command, world.orders) == ("refused", [])
    assert "later.0" in world.result
    check(world)


@pytest.mark.parametrize("attempt", ["later.0", "l.7"])
def test_a_view_alone_makes_no_attempt_the_one_that_commands_are_for(tmp_path, attempt):
    """Neither of a launch that stream has not accepted nor by an agent that carries no rank of the launch."""
    world = DrivenWorld(1, "pause", tmp_path)
    with write(world.engine) as connection:
        topology = connection.scalar(select(Attempt.topology))
        for rank in topology["ranks"]:
            rank["agent"] = f"agent of {rank['host']}"
        connection.execute(update(Attempt).values(topology=topology))
    world.agent_of = "agent of {}".format
    store_views(world.engine, [ReceivedView(View("j", attempt, "9", "b", 0, ()), "stranger")], world.now_ns)
    world.run(seconds=5.0)
    assert world.command == "applied"
    check(world)


def test_ranks_that_hold_the_same_slices_must_answer_a_rollback_alike(tmp_path):
    world = DrivenWorld(1, "rollback", tmp_path)
    with write(world.engine) as connection:
        topology = connection.scalar(select(Attempt.topology)) | {"replicated": False}
        connection.execute(update(Attempt).values(topology=topology))
        assert read_training(connection, "j", "l.0").replicas == ()
        topology |= {"shared_slices": [[0, 2], [1, 3]]}
        connection.execute(update(Attempt).values(topology=topology))
        assert read_training(connection, "j", "l.0").replicas == ((0, 2), (1, 3))


def test_a_command_waits_for_approval_and_expires_without(tmp_path):
    world = DrivenWorld(1, "pause", tmp_path)
    world.ask("c", "pause")
    with write(world.engine) as connection:
        connection.execute(update(Command).values(approval_required=True))
    assert (world.drivers[0](), world.state_of("c")) == (False, "requested")
    world.now_ns += 100 * S
    world.drivers[0]()
    assert world.state_of("c") == "expired"
    with read(world.engine) as connection:
        assert connection.scalar(select(Command.result).where(Command.id == "c")) == "nobody approved it in time"
        assert connection.scalar(select(Audit.action).order_by(Audit.id.desc()).limit(1)) == "command.pause.expired"
    check(world)


def test_a_relaunch_ends_every_process_and_is_applied(tmp_path):
    world = DrivenWorld(1, "relaunch", tmp_path)
    world.store_checkpoint("local:l.0:1")
    world.run(seconds=20.0)
    assert {rank.state for rank in world.ranks} == {"exited"}
    assert world.command == "applied"
    check(world)


def advised(world: DrivenWorld) -> str:
    """The checkpoint from which the next launch resumes; empty: none."""
    with read(world.engine) as connection:
        resume = orders_of(connection, "j", world.now_ns).resume
    assert resume is not None
    return resume.checkpoint


def test_a_relaunch_whose_last_good_checkpoint_is_gone_is_refused(tmp_path):
    world = DrivenWorld(1, "relaunch", tmp_path)
    world.store_checkpoint("local:l.0:1", "gone")
    world.run(seconds=5.0)
    assert (world.command, world.orders) == ("refused", [])
    assert "training would begin from scratch: there is no good checkpoint on disk" in world.result
    check(world)


def test_a_relaunch_from_scratch_goes_on_from_no_checkpoint_until_the_next_launch_has_begun(tmp_path):
    world = DrivenWorld(1, "relaunch", tmp_path)
    world.store_checkpoint("local:l.0:1")
    assert advised(world) == "local:l.0:1"
    world._begin = lambda: (world.ask("c", "relaunch", from_scratch=True), world._look())
    world.run(seconds=20.0)
    assert (world.command, advised(world)) == ("applied", "")
    assert {rank.state for rank in world.ranks} == {"exited"}
    with write(world.engine) as connection:
        connection.execute(update(Job).values(attempt="m.0"))
    assert advised(world) == "local:l.0:1"
    check(world)


def test_a_relaunch_from_scratch_that_failed_leaves_the_advice_as_it_is(tmp_path):
    world = DrivenWorld(1, "relaunch", tmp_path)
    world.store_checkpoint("local:l.0:1")
    world._begin = lambda: (world.ask("c", "relaunch", from_scratch=True), world._look())
    world.run(seconds=20.0)
    with write(world.engine) as connection:
        connection.execute(update(Command).values(state="failed"))
    assert advised(world) == "local:l.0:1"
    check(world)


def test_the_feed_tells_each_change_of_a_command(tmp_path):
    world = DrivenWorld(1, "checkpoint", tmp_path)
    world.run(seconds=20.0)
    with read(world.engine) as connection:
        rows = connection.execute(select(Feed.topic, Feed.data)).all()
        assert connection.scalar(select(func.count()).select_from(Feed)) == len(rows)
    states = [row.data["state"] for row in rows if "state" in row.data]
    assert states == ["requested", "sent", "accepted", "applied"]
    assert msgspec.json.encode([row.data for row in rows])
    check(world)


def test_agents_hear_which_capture_in_memory_is_the_newest_good_one(tmp_path):
    world = DrivenWorld(1, "pause", tmp_path)

    def proven() -> str:
        with read(world.engine) as connection:
            return orders_of(connection, "j", world.now_ns).proven

    assert proven() == "memory:l.0:0"
    with write(world.engine) as connection:
        connection.execute(update(Checkpoint).values(verdict="gone"))
    assert proven() == ""
    world.engine.dispose()


WHOLE = ("pause", "resume", "rollback", "rollback_memory", "rollback_disk", "relaunch")


def rolled_back(world: DrivenWorld) -> tuple[str, str, list[tuple[str, str, bool]]]:
    """(state, mode) of the command, and (checkpoint, mode, refused) of each of its orders."""
    with read(world.engine) as connection:
        row = connection.execute(select(Command.state, Command.mode).where(Command.id == "c")).one()
    return row.state, row.mode, [(order.checkpoint, order.mode, order.refused) for order in world.orders]


def test_a_rollback_says_beside_applied_what_went_back(tmp_path):
    world = DrivenWorld(2, "rollback", tmp_path)
    world.can(*WHOLE)
    world.run(seconds=30.0)
    assert rolled_back(world) == ("applied", "full", [("memory:l.0:0", "full", False)])
    with read(world.engine) as connection:
        told = [row.data for row in connection.execute(select(Feed.data)) if row.data.get("state") == "applied"]
    assert [one["mode"] for one in told] == ["full"]
    check(world)


@pytest.mark.parametrize(
    ("can", "stored", "lacking", "tries", "end"),
    [
        pytest.param(
            WHOLE, ["memory:l.0:2", "local:l.0:1"], {3: ["memory:l.0:2"]},
            ["memory:l.0:2 full refused", "local:l.0:1 full"], ("applied", "weights", "local:l.0:1@1"),
            id="what one rank has not in memory is loaded from disk by itself",
        ),
        pytest.param(
            WHOLE, ["memory:l.0:2", "local:l.0:1"], {rank: ["memory:l.0:2", "local:l.0:1"] for rank in range(4)},
            ["memory:l.0:2 full refused", "local:l.0:1 full refused", "local:l.0:1 relaunch"],
            ("applied", "state", "exited"),
            id="where no rank can load it either the job is relaunched from it",
        ),
        pytest.param(
            ("rollback", "rollback_memory"), [], {0: ["memory:l.0:0"]},
            ["memory:l.0:0 full refused"], ("refused", "weights", "fresh"),
            id="where there is no other way a refusal is final",
        ),
        pytest.param(
            ("relaunch",), ["local:l.0:0"], {}, ["local:l.0:0 relaunch"], ("applied", "state", "exited"),
            id="a job that cannot go back in its processes is relaunched",
        ),
    ],
)  # fmt: skip
def test_a_rollback_is_tried_in_one_way_after_the_other(tmp_path, can, stored, lacking, tries, end):
    world = DrivenWorld(2, "rollback", tmp_path)
    world.can(*can)
    for checkpoint in stored:
        world.store_checkpoint(checkpoint)
    for rank, checkpoints in lacking.items():
        world.ranks[rank].lacks |= set(checkpoints)
    world.run(seconds=60.0)
    state, mode, orders = rolled_back(world)
    assert [f"{checkpoint} {how}{' refused' * refused}" for checkpoint, how, refused in orders] == tries
    assert (state, mode) == (end[0], orders[-1][1])
    assert {getattr(rank, end[1]) for rank in world.ranks} == {end[2]}
    check(world)


def test_a_checkpoint_that_was_lost_after_it_was_asked_for_gives_way_to_an_older_one(tmp_path):
    world = DrivenWorld(2, "rollback", tmp_path)
    world.can(*WHOLE)
    world.store_checkpoint("memory:l.0:2", "gone")
    world._begin = lambda: (world.ask("c", "rollback", checkpoint="memory:l.0:2"), world._look())
    world.run(seconds=30.0)
    assert rolled_back(world) == ("applied", "full", [("memory:l.0:0", "full", False)])
    check(world)


def test_a_relaunch_goes_on_from_the_checkpoint_that_was_asked_for_until_the_next_launch_has_begun(tmp_path):
    world = DrivenWorld(2, "rollback", tmp_path)
    world.can(*WHOLE)
    world.store_checkpoint("local:l.0:1")
    world.store_checkpoint("local:l.0:2")

    assert advised(world) == "local:l.0:2"
    world._begin = lambda: (world.ask("c", "rollback", checkpoint="local:l.0:1", mode="relaunch"), world._look())
    world.run(seconds=30.0)
    assert rolled_back(world) == ("applied", "relaunch", [("local:l.0:1", "relaunch", False)])
    assert advised(world) == "local:l.0:1"
    with write(world.engine) as connection:
        connection.execute(update(Job).values(attempt="m.0"))
    assert advised(world) == "local:l.0:2"
    check(world)
