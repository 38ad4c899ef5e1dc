"""The driver over a real database: whole commands, crashes at every write, two drivers, commands that meet."""

import msgspec
import pytest
from sqlalchemy import func, insert, select, update

from rankwatch.wire import View
from rankwatch_service.api.background.order_cache import orders_of
from rankwatch_service.orders import commands, driver
from rankwatch_service.orders.order import CommandOutcome
from rankwatch_service.orders.running_attempt import ReceivedView, read_training, store_views
from rankwatch_service.policy.control_records import OrderPhase, decode_control
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Attempt, Audit, Checkpoint, Command, Feed, Job
from tests.support.orders.driven_world import DrivenWorld, phases
from tests.support.orders.training_world import S, World
from tests.support.trials.selection import trials

ACTIONS = ("pause", "checkpoint", "rollback", "stop")
SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.ci) for seed in range(4, 12))]


@pytest.mark.parametrize("action", ACTIONS)
def test_a_command_is_applied_and_every_phase_is_told_to_stream(driven, action):
    world = driven(1, action)
    if action == "pause":
        world.also_asked = [(3.0, "resume")]
    world.run(seconds=30.0)
    assert world.command == "applied"
    assert phases(world) == ["view", "hold", "do", "go", "closed"]
    assert {len(rank.acted) for rank in world.ranks} == {1}
    if action == "pause":
        assert world.state_of("resume") == "applied"


@pytest.mark.parametrize("effect", ["before", "after"])
def test_an_api_that_dies_at_any_write_is_followed_by_another(driven, monkeypatch, effect):
    for n in range(1, 9):
        world = driven(n, "rollback")
        world.kill_first_api(monkeypatch, n, effect)
        world.run(seconds=60.0)
        assert world.command == "applied", f"write {n}: {world.command} {world.result}"


@pytest.mark.parametrize("seed", SEEDS)
def test_with_faults_and_two_drivers_nothing_is_mixed(driven, seed):
    world = driven(seed, ACTIONS[seed % 4], (8.0, "resume"), faults=True)
    world.run(seconds=300.0)
    assert world.command not in ("requested", "sent", "accepted")


def test_a_rollback_ends_a_pause_first(driven):
    world = driven(3, "pause", (3.0, "rollback"))
    world.run(seconds=40.0)
    assert (world.command, world.state_of("rollback")) == ("applied", "applied")
    assert {rank.weights for rank in world.ranks} == {"memory:l.0:0@1"}


def test_a_resume_without_a_pause_is_refused(driven):
    world = driven(3, "checkpoint", (0.1, "resume"))
    world.run(seconds=20.0)
    assert world.state_of("resume") == "refused"


def test_a_pause_lasts_until_it_is_resumed_however_long(driven):
    world = driven(5, "pause")
    world.run(seconds=90.0)
    assert {rank.mode for rank in world.ranks} == {"paused"}
    world.go_on(30.0, (90.5, "resume"))
    assert {rank.state for rank in world.ranks} == {"running"}


def test_a_pause_ends_by_its_lease_when_every_api_is_gone(driven):
    world = driven(5, "pause")
    world.run(seconds=3.0)
    assert {rank.mode for rank in world.ranks} == {"paused"}
    world.drivers_stop_until_ns = [world.now_ns + 10**15] * 2
    step = max(rank.step for rank in world.ranks)
    world.go_on(75.0)
    assert min(rank.step for rank in world.ranks) > step


@pytest.mark.parametrize("action", [*ACTIONS, "relaunch"])
def test_a_command_that_two_drivers_find_due_at_once_has_one_order(driven, monkeypatch, action):
    world = driven(1, action)
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


def test_commands_for_an_attempt_that_has_ended_are_refused(driven):
    world = driven(1, "pause")
    with write(world.engine) as connection:
        columns = {"started_unix_ns": 1, "world_size": 1, "topology": {}, "number": 9}
        connection.execute(insert(Attempt).values(job="j", attempt="later.0", **columns))
    store_views(world.engine, [ReceivedView(View("j", "later.0", "9", "b", 0, ()))], world.now_ns)
    world.run(seconds=2.0)
    assert (world.command, world.orders) == ("refused", [])
    assert "later.0" in world.result


@pytest.mark.parametrize("attempt", ["later.0", "l.7"])
def test_a_view_alone_makes_no_attempt_the_one_that_commands_are_for(driven, attempt):
    """Neither of a launch that stream has not accepted nor by an agent that carries no rank of the launch."""
    world = driven(1, "pause")
    with write(world.engine) as connection:
        topology = connection.scalar(select(Attempt.topology))
        for rank in topology["ranks"]:
            rank["agent"] = f"agent of {rank['host']}"
        connection.execute(update(Attempt).values(topology=topology))
    world.agent_of = "agent of {}".format
    store_views(world.engine, [ReceivedView(View("j", attempt, "9", "b", 0, ()), "stranger")], world.now_ns)
    world.run(seconds=5.0)
    assert world.command == "applied"


def test_ranks_that_hold_the_same_slices_must_answer_a_rollback_alike(driven):
    world = driven(1, "rollback")
    with write(world.engine) as connection:
        topology = connection.scalar(select(Attempt.topology)) | {"replicated": False}
        connection.execute(update(Attempt).values(topology=topology))
        assert read_training(connection, "j", "l.0").replicas == ()
        topology |= {"shared_slices": [[0, 2], [1, 3]]}
        connection.execute(update(Attempt).values(topology=topology))
        assert read_training(connection, "j", "l.0").replicas == ((0, 2), (1, 3))


def test_a_command_waits_for_approval_and_expires_without(driven):
    world = driven(1, "pause")
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


def test_a_relaunch_ends_every_process_and_is_applied(driven):
    world = driven(1, "relaunch")
    world.store_checkpoint("local:l.0:1")
    world.run(seconds=20.0)
    assert {rank.state for rank in world.ranks} == {"exited"}
    assert world.command == "applied"


def advised(world: DrivenWorld) -> str:
    """The checkpoint from which the next launch resumes; empty: none."""
    with read(world.engine) as connection:
        resume = orders_of(connection, "j", world.now_ns).resume
    assert resume is not None
    return resume.checkpoint


def test_a_relaunch_whose_last_good_checkpoint_is_gone_is_refused(driven):
    world = driven(1, "relaunch")
    world.store_checkpoint("local:l.0:1", "gone")
    world.run(seconds=5.0)
    assert (world.command, world.orders) == ("refused", [])
    assert "training would begin from scratch: there is no good checkpoint on disk" in world.result


def test_a_relaunch_from_scratch_goes_on_from_no_checkpoint_until_the_next_launch_has_begun(driven):
    world = driven(1, "relaunch")
    world.store_checkpoint("local:l.0:1")
    assert advised(world) == "local:l.0:1"
    world._begin = lambda: (world.ask("c", "relaunch", from_scratch=True), world._look())
    world.run(seconds=20.0)
    assert (world.command, advised(world)) == ("applied", "")
    assert {rank.state for rank in world.ranks} == {"exited"}
    with write(world.engine) as connection:
        connection.execute(update(Job).values(attempt="m.0"))
    assert advised(world) == "local:l.0:1"


def test_a_relaunch_from_scratch_that_failed_leaves_the_advice_as_it_is(driven):
    world = driven(1, "relaunch")
    world.store_checkpoint("local:l.0:1")
    world._begin = lambda: (world.ask("c", "relaunch", from_scratch=True), world._look())
    world.run(seconds=20.0)
    with write(world.engine) as connection:
        connection.execute(update(Command).values(state="failed"))
    assert advised(world) == "local:l.0:1"


def test_the_feed_tells_each_change_of_a_command(driven):
    world = driven(1, "checkpoint")
    world.run(seconds=20.0)
    with read(world.engine) as connection:
        rows = connection.execute(select(Feed.topic, Feed.data)).all()
        assert connection.scalar(select(func.count()).select_from(Feed)) == len(rows)
    states = [row.data["state"] for row in rows if "state" in row.data]
    assert states == ["requested", "sent", "accepted", "applied"]
    assert msgspec.json.encode([row.data for row in rows])


def test_agents_hear_which_capture_in_memory_is_the_newest_good_one(driven):
    world = driven(1, "pause")

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


def test_a_rollback_says_beside_applied_what_went_back(driven):
    world = driven(2, "rollback")
    world.can(*WHOLE)
    world.run(seconds=30.0)
    assert rolled_back(world) == ("applied", "full", [("memory:l.0:0", "full", False)])
    with read(world.engine) as connection:
        reported = [row.data for row in connection.execute(select(Feed.data)) if row.data.get("state") == "applied"]
    assert [one["mode"] for one in reported] == ["full"]


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
def test_a_rollback_is_tried_in_one_way_after_the_other(driven, can, stored, lacking, tries, end):
    world = driven(2, "rollback")
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


def test_a_checkpoint_that_was_lost_after_it_was_asked_for_gives_way_to_an_older_one(driven):
    world = driven(2, "rollback")
    world.can(*WHOLE)
    world.store_checkpoint("memory:l.0:2", "gone")
    world._begin = lambda: (world.ask("c", "rollback", checkpoint="memory:l.0:2"), world._look())
    world.run(seconds=30.0)
    assert rolled_back(world) == ("applied", "full", [("memory:l.0:0", "full", False)])


def test_a_relaunch_goes_on_from_the_checkpoint_that_was_asked_for_until_the_next_launch_has_begun(driven):
    world = driven(2, "rollback")
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


# ---- A checkpoint that is ordered while the job is paused: it is saved, and the job stays paused ---------------------


def saved_in_a_pause(world: DrivenWorld) -> None:
    """The ranks saved once at the step of the pause, and trained again only after it was resumed."""
    assert (world.command, world.state_of("checkpoint"), world.state_of("resume")) == ("applied",) * 3
    for rank in world.ranks:
        (_, _, paused_at), *others = rank.acted
        assert [action for _, action, _ in rank.acted] == ["pause", "checkpoint"]
        assert {step for _, _, step in others} == {paused_at}


def test_a_checkpoint_in_a_pause_saves_at_its_step_and_the_job_stays_paused(driven):
    world = driven(3, "pause", (3.0, "checkpoint"))
    world.run(seconds=30.0)
    assert ({rank.mode for rank in world.ranks}, world.state_of("checkpoint")) == ({"paused"}, "applied")
    assert [(order.action, order.phase) for order in world.orders] == [("pause", "closed"), ("pause", "do")]
    assert phases(world) == ["view", "hold", "do", "closed", "hold", "do", "do"]
    world.go_on(20.0, (30.5, "resume"))
    saved_in_a_pause(world)


def test_stream_is_told_that_a_job_is_paused_while_it_saves(driven):
    world = driven(3, "pause", (3.0, "checkpoint"), (6.0, "resume"))
    world.run(seconds=30.0)
    records = [decode_control(record.value) for record in world.controls.read(0, 1_000)]
    paused = [record.paused for record in records if isinstance(record, OrderPhase) and record.command == "checkpoint"]
    assert paused == [True, True, True, False, False]


def test_each_checkpoint_in_a_pause_follows_the_one_before(driven):
    world = driven(4, "pause")
    world.run(seconds=3.0)
    world.ask("first", "checkpoint")
    world.ask("second", "checkpoint")
    world.go_on(10.0)
    assert (world.state_of("first"), world.state_of("second")) == ("applied", "applied")
    assert {rank.mode for rank in world.ranks} == {"paused"}
    assert [len({step for _, _, step in rank.acted}) for rank in world.ranks] == [1] * len(world.ranks)


def test_a_resume_that_is_requested_while_the_job_saves_follows_the_save(driven):
    world = driven(3, "pause", (3.0, "checkpoint"), (3.05, "resume"))
    world.run(seconds=30.0)
    saved_in_a_pause(world)


def test_a_checkpoint_that_is_requested_after_a_resume_is_saved_in_training(driven):
    world = driven(3, "pause")
    world.run(seconds=3.0)
    world.ask("resume", "resume")
    world.now_ns += S // 100
    world.ask("checkpoint", "checkpoint")
    world.go_on(30.0)
    assert (world.state_of("resume"), world.state_of("checkpoint")) == ("applied", "applied")
    assert all(before < after for rank in world.ranks for (*_, before), (*_, after) in [rank.acted])


@pytest.mark.parametrize("effect", ["before", "after"])
def test_a_checkpoint_in_a_pause_outlives_an_api_that_dies_at_any_write(driven, monkeypatch, effect):
    for n in range(1, 10):
        world = driven(n, "pause", (2.0, "checkpoint"), (6.0, "resume"))
        world.kill_first_api(monkeypatch, n, effect)
        world.run(seconds=60.0)
        saved_in_a_pause(world)


def test_a_checkpoint_that_is_cancelled_in_a_pause_does_not_end_it(driven):
    world = driven(3, "pause")
    world.run(seconds=3.0)
    world.ask("checkpoint", "checkpoint")
    world.drivers[0]()
    with write(world.engine) as connection:
        cancelled = CommandOutcome("cancelled", "by me")
        commands.set_state(connection, "checkpoint", cancelled, "me", world.now_ns)
    world.go_on(10.0)
    assert ({rank.mode for rank in world.ranks}, world.state_of("checkpoint")) == ({"paused"}, "cancelled")
    assert {len(rank.acted) for rank in world.ranks} == {2}


@pytest.mark.parametrize("seed", SEEDS)
def test_with_faults_a_checkpoint_in_a_pause_is_saved_at_one_step_or_not_at_all(driven, seed):
    world = driven(seed, "pause", (3.0, "checkpoint"), (20.0, "resume"), faults=True)
    world.run(seconds=300.0)
    assert world.state_of("checkpoint") not in ("requested", "sent", "accepted")
    assert not {rank.mode for rank in world.ranks if rank.state == "running"} & {"held", "acted", "paused"}


RANDOM_SEEDS = trials(100, 250)


def play(action: str, seed: int) -> World:
    # 600 s are longer than every lease together: what has not come to an end by then never will.
    return World(seed, action).run(seconds=600.0)


@pytest.mark.parametrize("action", ACTIONS)
def test_ranks_never_act_at_different_steps_and_never_train_on_mixed_weights(action):
    applied = 0
    for seed in range(RANDOM_SEEDS):
        world = play(action, seed)
        reported = f"seed {seed}: {world.command} {world.result}"
        assert not world.violations, reported
        for order, steps in world.acted_steps().items():
            assert len(steps) == 1, f"{reported}: {order} at steps {steps}"
        for rank in world.ranks:
            orders = [order for order, _, _ in rank.acted]
            assert len(orders) == len(set(orders)), f"{reported}: rank {rank.number} acted twice on one order"
        if world.command == "applied":
            lagging = [rank.number for rank in world.ranks if not rank.acted]
            assert not lagging, f"{reported}: applied without ranks {lagging}"
        assert world.over(), f"{reported}: not at rest after 600 s, {[rank.mode for rank in world.ranks]}"
        applied += world.command == "applied"
    # Faults are many, but the rule must not win by never doing anything.
    assert applied > RANDOM_SEEDS / 2


@pytest.mark.parametrize("action", ACTIONS)
def test_without_faults_every_command_is_applied_on_all_ranks_by_its_first_order(action):
    for seed in range(40):
        world = World(seed, action, faults=False).run(seconds=60.0)
        assert (world.command, len(world.orders)) == ("applied", 1), f"seed {seed}: {world.result}"
        assert [len(rank.acted) for rank in world.ranks] == [1] * len(world.ranks)
        assert world.over()


def test_a_rank_that_did_not_act_never_trains_with_ranks_that_went_back():
    for seed in range(RANDOM_SEEDS):
        world = play("rollback", seed)
        trained = {rank.weights for rank in world.ranks if rank.state == "running"}
        assert len(trained) <= 1, f"seed {seed}: {trained}"
