"""What the summary of a job shows: running, paused, stalled, lost or ended, and the topology of its attempts."""

from rankwatch import wire
from rankwatch_detectors.base import AttemptStart
from rankwatch_service.job.effects import Effects
from rankwatch_service.job.job import IDLE_AFTER_S
from rankwatch_service.job.summary import SummaryBuilder
from rankwatch_service.job.topology_state import TopologyState
from rankwatch_service.policy.control_records import OrderPhase
from rankwatch_service.store.rows import attempt_columns
from tests.support.values.batches import progress, ranks, table


def test_the_summary_shows_how_far_training_is(world):
    world.train(7)
    world.send(progress=tuple(progress(rank, 8) for rank in range(4)))
    world.tick()
    row = world.effects.jobs["gpt"]
    assert (row.state, row.attempt, row.world_size, row.step) == ("running", "l.0", 4, 7)
    assert (row.ranks_reporting, row.loss, row.step_time_s) == (4, 2.0, 0.5)
    attempt = world.effects.attempts["gpt", "l.0"]
    assert (attempt.number, attempt.first_step, attempt.last_step) == (1, 7, 7)
    columns = attempt_columns(attempt)
    assert (columns["world_size"], columns["ended_unix_ns"]) == (4, None)
    assert columns["topology"]["ranks"][3]["host"] == "node-1"
    assert columns["topology"]["can"] == [
        "checkpoint", "pause", "relaunch", "rollback", "rollback_disk", "rollback_memory",
    ]  # fmt: skip


def test_a_summary_that_did_not_change_is_not_written_again(world):
    world.tick()
    world.effects = Effects()
    world.tick()
    assert world.effects.jobs == {}


def test_a_paused_job_is_shown_as_paused_until_it_resumes(world):
    states = []
    for phase in ("hold", "do", "go"):
        order = OrderPhase("o1", "c1", "gpt", "l.0", "pause", phase, 9)
        world.job.control(order, world.now_s, world.effects)
        world.tick()
        states.append(world.effects.jobs["gpt"].state)
    assert states == ["running", "paused", "running"]


def test_a_job_that_saves_in_a_pause_is_shown_as_paused_until_it_resumes(world):
    states = []
    phases = [("pause", "do"), ("pause", "closed"), ("checkpoint", "hold"), ("checkpoint", "do"), ("pause", "do")]
    for action, phase in [*phases, ("pause", "go")]:
        paused = action == "checkpoint" or (action, phase) == ("pause", "do")
        world.job.control(OrderPhase("o", "c", "gpt", "l.0", action, phase, 9, paused=paused), 1.0, world.effects)
        if phase != "closed":  # it is followed by the hold in the same transaction
            world.tick()
            states.append(world.effects.jobs["gpt"].state)
    assert states == ["paused"] * 4 + ["running"]


def test_what_an_order_did_is_a_change_before_later_incidents_and_how_it_did_it_is_not(world):
    for action, phase, step, back in (
        ("pause", "hold", 9, -1), ("pause", "do", 9, -1), ("pause", "go", 9, -1), ("rollback", "do", 12, 5),
        ("rollback", "go", 12, 5), ("relaunch", "kill", -1, 5),
    ):  # fmt: skip
        mode = "full" if action == "rollback" else ""
        order = OrderPhase("o1", "c1", "gpt", "l.0", action, phase, step, 0, "", back, mode)
        world.job.control(order, world.now_s, world.effects)
    changes = [(change["what"], change["step"]) for change in world.job.history.before(world.now_s)]
    assert changes[-4:] == [
        ("pause", 9), ("went on after a pause", 9), ("rollback (full) to step 5", 12), ("relaunch from step 5", None)
    ]  # fmt: skip


def test_the_change_that_a_new_attempt_is_says_where_it_went_on(world):
    world.train(*range(181, 184))
    (began,) = world.job.history.before(world.now_s)
    assert (began["what"], began["step"]) == ("attempt l.0 began", 181)


def shown(world):
    return world.effects.jobs["gpt"].state


def stand_still(world, seconds, phase="forward"):
    """Ranks report, and finish no step."""
    for _ in range(seconds):
        world.send(progress=tuple(progress(rank, 8, phase=phase) for rank in range(4)))
        world.tick()


def test_a_job_that_hangs_is_stalled_and_shows_its_last_progress(world):
    world.train(7)
    moved_s = world.now_s
    stand_still(world, 6)
    world.find("hang", ranks=[3])
    world.tick()
    row = world.effects.jobs["gpt"]
    assert (row.state, row.last_progress_unix_ns) == ("stalled", int(moved_s * 1e9))
    world.send("m.0", ranks=ranks(4))
    world.tick()
    assert shown(world) == "running"


def test_a_job_whose_log_is_not_understood_says_so_until_its_first_step(world):
    for phase, state in (("unreported", "running"), ("log_not_understood", "log_not_understood")):
        world.send(progress=(progress(0, 0, phase=phase),))
        world.tick()
        assert shown(world) == state
    world.train(7)
    world.tick()
    assert shown(world) == "running"


def test_a_hang_that_ended_leaves_a_running_job(world):
    world.train(7)
    world.find("hang", ranks=[3])
    world.tick()
    assert shown(world) == "stalled"
    world.find("hang", change="close")
    world.train(8)
    world.tick()
    assert shown(world) == "running"


def test_a_job_that_finishes_no_step_for_a_minute_is_stalled_whatever_is_open(world):
    world.train(7)
    stand_still(world, 59)
    assert shown(world) == "running"
    stand_still(world, 3)
    assert shown(world) == "stalled"


def test_a_job_that_evaluates_or_was_paused_for_long_is_not_stalled(world):
    world.train(7)
    stand_still(world, 90, phase="eval")
    assert shown(world) == "running"
    for phase in ("do", "go"):
        world.job.control(OrderPhase("o1", "c1", "gpt", "l.0", "pause", phase, 9), world.now_s, world.effects)
        stand_still(world, 2)
    assert shown(world) == "running"


def test_a_loss_that_is_not_a_number_is_shown_as_such(world):
    world.send(steps=table([7] * 4, [0, 1, 2, 3], loss=[float("nan")] * 4))
    world.tick()
    assert world.effects.jobs["gpt"].loss == "NaN"
    assert world.effects.feed[-1].data["loss"] == "NaN"


def test_a_job_whose_ranks_left_has_ended_and_so_have_its_incidents(world):
    world.find("loss_divergence")
    world.send(events=tuple(wire.Event("rank_left", 1, rank, 9, {"reason": "end"}) for rank in range(4)))
    world.tick()
    assert world.effects.jobs["gpt"].state == "ended"
    assert world.effects.attempts["gpt", "l.0"].ended_unix_ns is not None
    assert world.reported() == ["opened", "resolved"]
    over = world.effects.transitions[-1].incident
    assert (over.state, over.evidence["ended_with_job"]) == ("resolved", True)
    assert over.summary.endswith(" The job has ended.")


def test_an_incident_that_was_over_before_the_job_ended_is_resolved_and_nothing_else(world):
    world.find("loss_divergence")
    world.find("loss_divergence", change="close")
    world.send(events=tuple(wire.Event("rank_left", 1, rank, 9, {"reason": "end"}) for rank in range(4)))
    world.tick()
    over = world.effects.transitions[-1].incident
    assert (over.state, "ended_with_job" in over.evidence) == ("resolved", False)


def test_a_silent_job_is_lost_then_idle_and_goes_on_with_new_telemetry(world):
    world.find("loss_divergence")
    world.tick(60)
    assert world.effects.jobs["gpt"].state == "lost"
    world.tick(IDLE_AFTER_S)
    assert world.job.is_idle
    world.send("m.0", ranks=ranks(4))
    assert not world.job.is_idle
    world.train(1, 2, 3, attempt="m.0")
    assert world.reported() == ["opened", "resolved"]


LINE = "watching Net (4 parameters), AdamW: gradient norm; not watched: fingerprints (switched off)"


def stored(state: TopologyState):
    """The topology of an attempt that starts so, as its row has it."""
    start = AttemptStart("l.0", state.topology(), 0.0)
    return attempt_columns(SummaryBuilder("gpt").attempt_started(start, state, 0.0))["topology"]


def test_the_line_of_one_rank_is_the_line_of_the_attempt():
    topology_state = TopologyState()
    topology_state.learn([wire.RankInfo(0, 2, watched=LINE, optimizers=1), wire.RankInfo(1, 2, optimizers=1)])
    topology = stored(topology_state)
    assert topology["watched"] == LINE
    assert all("watched" not in rank for rank in topology["ranks"])


def test_a_line_that_comes_later_changes_the_topology():
    topology_state = TopologyState()
    assert topology_state.learn([wire.RankInfo(0, 1)])
    assert topology_state.learn([wire.RankInfo(0, 1, watched=LINE)])
    assert not topology_state.learn([wire.RankInfo(0, 1, watched=LINE)])


def test_the_switch_of_a_host_is_part_of_the_topology_and_stored_with_it():
    topology_state = TopologyState()
    reported = [wire.RankInfo(rank, 3, host=f"node-{rank}", switch=("a", "a", "")[rank]) for rank in range(3)]
    topology_state.learn(reported)
    assert topology_state.topology().switch == ("a", "a", "")
    assert topology_state.switch_of(["node-0", "node-1"]) == "a"
    assert topology_state.switch_of(["node-1", "node-2"]) == topology_state.switch_of([]) == ""
    assert topology_state.ranks_below("a") == [0, 1]
    assert [rank["switch"] for rank in stored(topology_state)["ranks"]] == ["a", "a", ""]


def test_the_device_of_a_rank_comes_later_too_and_makes_the_job_an_accelerated_one():
    topology_state = TopologyState()
    assert topology_state.accelerated, "as long as nothing is known"
    topology_state.learn([wire.RankInfo(0, 2), wire.RankInfo(1, 2, device_type="cpu")])
    assert not topology_state.topology().accelerated
    assert not topology_state.accelerated
    assert topology_state.learn([wire.RankInfo(0, 2, device_type="cuda", device_uuid="GPU-a")])
    topology = topology_state.topology()
    assert (topology.device_type, topology.accelerated, topology_state.accelerated) == (("cuda", "cpu"), True, True)
    assert TopologyState.restored(topology_state.state()).topology().device_type == ("cuda", "cpu")
    ranks = stored(topology_state)["ranks"]
    assert [(rank["device_type"], rank["device_uuid"]) for rank in ranks] == [("cuda", "GPU-a"), ("cpu", "")]
