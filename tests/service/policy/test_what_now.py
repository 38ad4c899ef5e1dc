"""What is done about an incident: by itself, by a person first, and then; each command with what it does and costs."""

from typing import Any

import pytest

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.policy.policy import NOT_CRITICAL_YET, ONLY_SUGGESTS
from rankwatch_service.policy.suggestion import RESTARTED
from rankwatch_service.policy.what_now import WhatNow, what_now
from tests.support.values.incidents import NOON_UNIX_NS, incident_version

BACK = {"action": "rollback", "reason": "why", "checkpoint": "memory:l.0:470", "cost_gpu_hours": 0.31}
RELAUNCH = {"action": "relaunch", "reason": "why", "checkpoint": "local:l.0:450", "cost_gpu_hours": 0.5}
SAVE = {"action": "checkpoint", "reason": "why", "cost_gpu_hours": 0.0002}
WAIT = {"action": "wait", "reason": "it may pass by itself", "cost_gpu_hours": 1.5}


def now(kind, severity="critical", evidence=None, ways=(), policy=None, /, *, accelerated=True, **more: Any) -> WhatNow:
    first, *others = ways or ({},)
    suggestion = {**first, "alternatives": others, "policy": policy or {}}
    reported = {
        "kind": Kind(kind),
        "severity": Severity(severity),
        "evidence": evidence or {},
        "suggestion": suggestion,
    }
    return what_now(incident_version(**reported | more), 64, accelerated)


def steps(*case, **more):
    return now(*case, **more).steps


def ordered(way, **more):
    reported = {name: way.get(name) for name in ("action", "checkpoint", "cost_gpu_hours")}
    return {"ordered": reported | {"reason": "rule r1", "unix_ns": NOON_UNIX_NS, "approval": False} | more}


@pytest.mark.parametrize("kind", sorted(Kind))
@pytest.mark.parametrize("severity", list(Severity))
def test_of_every_kind_something_is_reported_without_anything_being_known(kind, severity):
    reported = now(kind, severity, hosts=(), ranks=(), devices=(), onset_step=None, checkpoint=None)
    assert all(reported.steps)
    for step in reported.steps:
        assert not any(word in step for word in ("None", "PID", " JOB")), step


def test_where_the_first_step_is_to_go_back_the_command_is_it():
    reported = now("corruption", "critical", {"fingerprints": {}}, (BACK, RELAUNCH))
    assert (reported.automatic, reported.command) == ("nothing", "rankwatch rollback gpt-small")
    assert reported.steps[0] == (
        "Go back: `rankwatch rollback gpt-small` (loads the checkpoint of step 470 in memory; costs 17 s of the job)."
    )
    assert reported.steps[1] == (
        "It usually recurs: once the job trains and a spare is free, put it in place of node-a, "
        "`rankwatch relaunch gpt-small`, and test its GPU (`dcgmi diag -r 3`). "
        "Without a spare, continue; if it recurs: `rankwatch stop gpt-small`."
    )


def test_what_the_policy_has_ordered_is_reported_with_its_time_and_left_to_be_watched():
    reported = now("nonfinite", "critical", {}, (BACK, RELAUNCH), ordered(BACK))
    assert reported.automatic == (
        "rollback to the checkpoint of step 470 in memory, ordered by the policy at 08:53:20 UTC "
        "(rule r1; costs 17 s of the job)"
    )
    assert reported.steps[0].startswith(
        "Nothing to do before 08:57 UTC. If no step is trained by then (`rankwatch jobs show gpt-small`): "
        "`rankwatch relaunch gpt-small` (new processes from the checkpoint of step 450; "
    )
    assert reported.command == ""
    assert reported.listed[0].startswith("Automatic: rollback to ")
    same = steps("nonfinite", "critical", {}, (RELAUNCH,), ordered(RELAUNCH))[0]
    assert "rankwatch relaunch" not in same
    assert same.endswith(" training goes on from the checkpoint of step 450, as later ones are in doubt.")
    fresh = now("corruption", "critical", {}, (RELAUNCH,), ordered(BACK, mode="relaunch")).automatic
    assert fresh.startswith("rollback to the checkpoint of step 470 in memory with new processes, ")
    waits = now("nonfinite", "critical", {}, (BACK,), ordered(BACK, approval=True)).automatic
    assert waits.endswith("and waits for an approval: `rankwatch commands --waiting`")
    paused = now("metric", "warning", {}, (), ordered({"action": "pause", "cost_gpu_hours": 64.0})).automatic
    assert paused.endswith("(rule r1; costs 64 GPU-hours an hour), until `rankwatch resume gpt-small`")


def test_why_the_policy_does_not_act_is_reported():
    held = {"mode": "suggest", "action": "rollback", "reason": "the hands-off switch is on"}
    assert now("nonfinite", "critical", {}, (BACK,), held).automatic == (
        "nothing (no rollback, since the hands-off switch is on)"
    )
    assert now("nonfinite", "critical", {}, (BACK,), held | {"reason": ONLY_SUGGESTS}).automatic == "nothing"


def test_the_same_rank_again_is_its_device_and_the_same_step_again_its_batch():
    (_, one, *_), (_, two, *_), (_, every, *_) = (
        steps("nonfinite", "critical", {}, (BACK,), ranks=ranks) for ranks in ((3,), (1, 6), ())
    )
    again, relaunch = "If it recurs in step 480: skip that batch.", "then `rankwatch relaunch gpt-small`."
    assert one == f"{again} If rank 3 has it again in another step: put a spare in place of node-a, {relaunch}"
    assert (
        two == f"{again} If one of these ranks has it again in another step: put a spare in place of node-a, {relaunch}"
    )
    assert every.endswith("Else lower the learning rate.")


def test_an_inf_that_a_loss_scaler_may_have_skipped_is_no_fault_of_a_device():
    norm = {"metrics": ["grad_norm", "local_grad_norm"]}
    cause = steps("nonfinite", "critical", norm, (BACK,))[1]
    assert cause.startswith("If the job has a loss scaler, as with fp16, it has skipped that update: do nothing. ")
    going_back = steps("nonfinite", "critical", norm, (BACK,), ordered(BACK))[1]
    assert "to prevent another one, set rule r1 to suggest (`rankwatch policy`)" in going_back
    assert "spare" not in cause
    assert "spare" in steps("nonfinite", "critical", norm | {"update_skipped": False}, (BACK,))[1]


def test_nobody_is_sent_back_where_there_is_nothing_to_go_back_to():
    for kind in ("nonfinite", "corruption"):
        first = steps(kind, "critical", {"fingerprints": {}})[0]
        assert first.startswith("Stop the job (`rankwatch stop gpt-small`), and start it from a checkpoint from before")


def test_a_gradient_norm_alone_is_nothing_to_act_on():
    first, if_, *_ = steps("corruption", "info", {"local_grad_norm": 2.8}, (BACK,))
    assert first.startswith(
        "Nothing to do now. If it is still so at 09:04 UTC: see whether rank 3 has batches of another kind than the "
        "others (source, lengths, labels): if so, mend them, or leave them if that is meant; if they are alike, put a "
    )
    assert if_ == "If you are not sure, let it train: you get a message if the loss suffers."
    assert "Nothing to do now" in steps("nonfinite", "warning")[0]


def test_time_is_waited_for_until_a_relaunch_has_cost_as_much_and_needs_a_spare_host():
    slow = ("straggler", "warning", {"ranks_on_host": 8}, (WAIT, RELAUNCH, SAVE))
    look, act, *_ = steps(*slow, impact_gpu_hours_per_hour=6.4)
    assert look.startswith("Compare its GPU with the others on node-a (`nvidia-smi -q -d TEMPERATURE,POWER,CLOCK`: ")
    assert act == (
        "If it is still so at 09:14 UTC and a spare host is free: `rankwatch checkpoint gpt-small`, and once "
        "`rankwatch checkpoints gpt-small` lists it as good, put the spare in place of node-a and `rankwatch "
        "relaunch gpt-small` (costs 2 min of the job, as much as the fault has cost by then). Without a spare go on: "
        "leaving node-a out would lose 8 GPUs, and 6.4 are lost now."
    )
    late = steps(*slow, impact_gpu_hours_per_hour=8_000.0)[1]
    assert late.startswith("If a spare host is free: `rankwatch checkpoint ")
    assert "as much as" not in late
    few = steps("straggler", "warning", {"ranks_on_host": 4}, (RELAUNCH,), impact_gpu_hours_per_hour=6.4)[1]
    assert few.endswith("Without a spare leave node-a out: it has 4 GPUs, and 6.4 are lost now.")
    assert "Without" not in steps("straggler", "warning", {}, (RELAUNCH,))[1]


def test_a_job_that_cannot_save_at_will_goes_on_from_what_it_has_then():
    slow = ("straggler", "warning", {}, (WAIT, RELAUNCH))
    costs = "`rankwatch relaunch gpt-small` (costs 2 min and the steps since {})."
    assert steps(*slow)[1].endswith(costs.format("the newest checkpoint"))
    assert steps(*slow, checkpoint=None)[1].endswith(costs.format("the start"))
    assert "checkpoint gpt-small" not in steps(*slow)[1]


def test_a_cause_in_the_data_is_no_matter_for_another_host():
    data = steps("straggler", "warning", {}, (WAIT, RELAUNCH), cause="data")
    assert "loader workers" in data[0]
    assert "spare" not in data[1]


def test_what_costs_little_is_nothing_to_do_now():
    first, stays, *_ = steps("slowdown", "info", {}, (WAIT,), hosts=())
    assert first == "Nothing to do now, as little is lost: you get a message, as a warning, if that changes."
    assert stays.startswith("If it is still so at 09:04 UTC: ")
    trace = {"action": "trace", "reason": "why", "cost_gpu_hours": 0.0}
    reported = now("slowdown", "warning", {}, (WAIT, trace), hosts=(), cause="")
    assert reported.command == "rankwatch trace gpt-small"
    assert reported.steps == (
        "First `rankwatch trace gpt-small` (prints what some steps spend their time on; costs next to nothing). If "
        "collectives take most of it, look at the network; if devices idle for much of it, at what else runs on the "
        "hosts (`top`); else at heat and clocks (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,CLOCK`). Let it train "
        "meanwhile: all ranks are equally slow, so a spare host does not help.",
    )
    assert "nvidia-smi" not in steps("slowdown", "warning", {}, (trace,), hosts=(), cause="", accelerated=False)[0]
    assert steps("slowdown", "warning", {}, (trace,), hosts=(), cause="data")[1].startswith("Then `rankwatch trace ")


def test_a_hang_that_is_not_critical_yet_says_when_it_will_be_and_what_follows():
    hang = ("hang", "info", {"critical_after_s": 5.0, "pids": {"node-a": [4711]}}, (RELAUNCH,))
    reported = now(*hang)
    assert reported.automatic == "nothing"
    assert reported.steps[:2] == (
        "Nothing to do before it becomes critical by itself, at 08:53:22 UTC if it still stands then: it may pass. "
        "Then: see where a rank that waits stands: `py-spy dump --pid 4711` on node-a.",
        "Then `rankwatch relaunch gpt-small` (new processes from the checkpoint of step 450; costs 28 s of the job).",
    )
    reported = now(*hang, {"mode": "suggest", "action": "relaunch", "reason": NOT_CRITICAL_YET})
    assert reported.automatic.startswith(
        "relaunch from the checkpoint of step 450, at 08:53:22 UTC if it still stands then (costs 28 s of the job)"
    )
    assert reported.steps[0].startswith(
        "Nothing to do before 08:57 UTC. If no step is trained by then (`rankwatch jobs show gpt-small`): end the job, "
    )
    assert "py-spy" not in reported.steps[1], "the processes are ended by then"


def test_a_rank_that_waits_in_its_own_code_is_looked_at_there():
    slow = ("straggler", "warning", {"witness": "own"}, (WAIT, RELAUNCH))
    first = steps(*slow, cause="worker", impact_gpu_hours_per_hour=1.0)[0]
    assert first == "Find what its own code waits for in each step: a file, a download, a lock, a sleep."


def test_a_rank_that_a_signal_stopped_is_to_be_continued_on_its_host():
    late = {"rank": 1, "os_state": "T", "phase": ""}
    stopped = {"decided_by": "stopped by a signal", "missing": [late], "stacks": [{"ranks": "0", "stack": "File a.py"}]}
    (first, then, who), find = steps("hang", "info", stopped), "`grep -lz '^RANK=1$' /proc/*/environ`"
    assert (
        first
        == f"Continue the stopped process: `kill -CONT` with its process id on node-a ({find} prints its process id)."
    )
    assert then.startswith("Then if no step follows within a minute: ")
    assert who.startswith("Find out who or what stopped it")
    known = stopped | {"pids": {"node-b": [4711], "node-c": [12, 13]}}
    assert steps("hang", "critical", known, hosts=("node-b", "node-c"))[0] == (
        "Continue the stopped processes: `kill -CONT 4711` on node-b, `kill -CONT 12 13` on node-c "
        "(within its container, if it has one)."
    )
    dead = stopped | {"missing": [late | {"os_state": "Z"}]}
    assert not any("kill -CONT" in step for step in steps("hang", "critical", dead))
    waits = {"mode": "suggest", "action": "relaunch", "reason": NOT_CRITICAL_YET}
    soon = steps("hang", "info", stopped | {"critical_after_s": 5.0, "pids": {"node-a": [4711]}}, (RELAUNCH,), waits)
    assert soon[0].startswith("Nothing to do before 08:57 UTC.")
    assert "If it shows no relaunch, continue the stopped process: `kill -CONT 4711` on node-a (within its" in soon[0]
    assert "Else end the job, and start it with the command that launched it: training goes on from" in soon[0]


def test_nobody_is_told_to_read_a_stack_that_was_not_taken():
    read = "Read the stack of the named rank"
    assert steps("hang", "critical", {"stacks": [{"ranks": "0", "stack": "File a.py"}]})[0].startswith(read)
    for none in ({}, {"stacks": [{"ranks": "0", "stack": "", "reason": "it did not answer"}]}):
        reported = steps("hang", "critical", none)
        assert "`py-spy dump --pid`" in reported[0]
        assert not any(step.startswith(read) for step in reported)


def test_a_host_that_is_silent_cannot_be_asked_for_stacks():
    silent = steps("hang", "critical", {"missing": [{"rank": 3, "silent_s": 4.0}]})
    assert silent[0].startswith(
        "First `ping` node-a: it last reported 4 s before this was found. If it is down: put a spare in its place, "
    )
    assert silent[1].startswith("If it is up: ")
    assert not any("py-spy" in step for step in silent)
    waits = {"mode": "suggest", "action": "relaunch", "reason": NOT_CRITICAL_YET}
    evidence = {"missing": [{"rank": 3, "silent_s": 4.0}], "critical_after_s": 5.0}
    first, up, *_ = steps("hang", "info", evidence, (RELAUNCH,), waits)
    assert first.endswith(
        "If it is down, a relaunch fails: put a spare in its place, or restart it if there is none, then `rankwatch "
        "relaunch gpt-small`."
    )
    assert up.startswith("If it is up: nothing to do before 08:57 UTC.")


@pytest.mark.parametrize(
    ("kind", "cause", "step"),
    [
        ("straggler", "data", "loader workers"),
        ("straggler", "host", "`top`"),
        ("straggler", "device", "nvidia-smi"),
        ("slowdown", "data", "storage"),
        ("slowdown", "communication", "network"),
        ("slowdown", "", "which part of the steps grew"),
    ],
)
def test_the_first_step_follows_the_cause_where_it_is_known(kind, cause, step):
    assert step in steps(kind, "warning", cause=cause)[0]


def test_a_slow_rank_without_a_device_is_no_matter_for_nvidia_smi():
    on_cores = steps("straggler", "warning", {"pids": {"node-a": [4711]}}, accelerated=False)[0]
    assert on_cores.startswith(
        "See what else runs on node-a (`top`), which cores process 4711 may use (`taskset -cp 4711`)"
    )
    assert "taskset" not in steps("straggler", "warning", accelerated=False)[0]


def test_who_asked_a_job_to_end_is_not_sent_to_look_for_a_killer():
    assert steps("rank_lost", "info", {"requested": True}) == ("Nothing: the job was asked to end.",)
    assert "do not wait for it" in steps("rank_lost", "info", {"requested": False, "standing": True})[0]


@pytest.mark.parametrize(
    ("end", "step"),
    [
        ({"signal": 9}, "grep -i oom"),
        ({"abrupt": True, "pids": {"node-a": [4711]}}, "grep -i oom`: if the kernel killed process 4711, "),
        ({"signal": 11}, "On node-a `dmesg -T | tail -50`"),
        ({"code": 3}, "exit code 3"),
        ({"code": 0}, "less data"),
        (
            {"error": "ValueError: bad batch\nat", "where": "data.py:88 next_batch", "code": 1, "signal": 9},
            "Find `ValueError: bad batch` in the output of rank 3, and mend what the traceback above it shows",
        ),
        ({"error": "RuntimeError: CUDA error: an illegal access"}, "On node-a `dmesg -T | grep -i xid`: an Xid other "),
        ({}, "the output of rank 3"),
    ],
)
def test_the_first_step_about_a_lost_rank_follows_from_how_it_ended(end, step):
    reported = {"code": None, "signal": None, "error": "", **end}
    first, then = steps("rank_lost", "critical", reported, checkpoint="local:l.0:450")
    assert step in first
    assert ("oom" in first) is ("oom" in step)
    assert then.startswith(
        "Then start the job with the command that launched it: training goes on from the checkpoint of step 450. "
        "If it ends so again: "
    )
    assert ("put a spare in place of node-a" in then) is (end.get("signal") == 11)
    (over,) = steps("rank_lost", "critical", {"ended_with_job": True, **end}, state="resolved")
    assert over.startswith("The job has ended. Before you start it again: ")
    assert steps("rank_lost", "critical", end, state="resolved") == ("Nothing: it is over.",)


def test_a_launcher_that_starts_the_job_again_is_waited_for():
    reported = now("rank_lost", "critical", {"signal": 9}, (WAIT | {"reason": RESTARTED},), checkpoint="local:l.0:450")
    assert reported.automatic == "the launcher starts the job again, from the checkpoint of step 450"
    assert reported.steps[1].startswith(
        "If no step is trained by 09:03 UTC: start the job with the command that launched it"
    )
    stopped = now("rank_lost", "critical", {"signal": 9}, (WAIT | {"reason": RESTARTED},), ordered({"action": "stop"}))
    assert stopped.automatic == "stop of all ranks, ordered by the policy at 08:53:20 UTC (rule r1)"
    assert stopped.steps[1].startswith("Then start the job with the command that launched it")


def test_a_faulty_device_is_saved_from_then_replaced_then_mended():
    said = {"summary": "GPU-3, rank 3 on node-a: Xid 79, GPU has fallen off the bus; restart the machine."}
    spare, host, *_ = steps("device_fault", "critical", {}, (SAVE, RELAUNCH), **said)
    assert spare.startswith(
        "If steps still go on, save first: `rankwatch checkpoint gpt-small`. Put a spare in place of node-a, "
    )
    assert host == (
        "Without a spare: `rankwatch stop gpt-small`, restart node-a, then start the job with the command that "
        "launched it. If it comes again: replace the GPU."
    )
    reported = now("device_fault", "critical", {}, (SAVE, RELAUNCH), ordered(SAVE), **said)
    assert reported.automatic.endswith("(rule r1; costs next to nothing; it fails if the device is gone)")
    assert reported.steps[0].startswith("Put a spare in place of node-a")
    mild = steps("device_fault", "warning", {}, (SAVE, RELAUNCH), ordered(SAVE), **said)[0]
    assert mild.startswith(
        "As soon as `rankwatch checkpoints gpt-small` lists it as good: `rankwatch relaunch gpt-small` (new processes "
    )
    assert "If none is listed by 08:57 UTC: `rankwatch relaunch gpt-small` (new processes from the checkpoint" in mild


def test_the_disk_of_a_failed_save_is_named():
    full = steps("checkpoint_failed", "warning", {"path": "/saved/x"}, (SAVE,), cause="disk")
    assert full[0].startswith("Make room on the disk of `/saved/x` on node-a (`df -h`): ")
    assert full[1].startswith("Then `rankwatch checkpoint gpt-small` (saves the work so far; costs next to nothing)")


def test_a_divergence_that_was_meant_is_accepted_and_another_one_gone_back_from():
    (first, *_), paused = steps("loss_divergence", "critical", {}, (BACK,)), {"action": "pause", "cost_gpu_hours": 64.0}
    assert "--reason planned`. If not: to try once more as it is, `rankwatch rollback gpt-small` (" in first
    assert "to change the learning rate or the data, `rankwatch stop gpt-small`, and start it with that." in first
    held = steps("loss_divergence", "critical", {}, (BACK,), ordered(paused))[0]
    assert "--reason planned`, and `rankwatch resume gpt-small`. If not: " in held
    assert ", which ends the pause; " in held
    assert held.endswith("If you do not know, leave it paused, and ask its owner.")


def test_whether_steps_go_on_says_whether_a_silent_host_is_down():
    away, down = (
        steps("telemetry_lost", "warning", {"steps_go_on": go_on}, (WAIT, RELAUNCH)) for go_on in (True, False)
    )
    assert "`gpt-small.agent.log`" in away[0]
    assert "`pgrep -f 'rankwatch.agent.*gpt-small'` finds none there, start it as the user of the job: " in away[1]
    assert "rankwatch relaunch" in down[1]


def test_a_job_name_that_a_shell_would_read_is_quoted():
    reported = now("nonfinite", "critical", {}, (BACK,), job="a; rm -rf b")
    assert reported.command == "rankwatch rollback 'a; rm -rf b'"
