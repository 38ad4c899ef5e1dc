"""The text of a message: three lines, whatever the names and texts of a job hold."""

import pytest

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.incidents.answers import changed, confidence_words, impact, normal, save_text
from rankwatch_service.policy.command import CommandRequest
from rankwatch_service.policy.message_text import LINE_CHARS_MAX, command_text, command_to_type, incident_text
from rankwatch_service.policy.suggestion import NOWHERE
from tests.support.values.incidents import NOON_UNIX_NS, incident_version


def lines(size=64, /, **incident):
    return incident_text(incident_version(**incident), size).split("\n")


def test_it_says_what_where_how_bad_what_is_normal_and_what_to_do_first():
    what, normal, first = lines(severity=Severity.CRITICAL)
    assert what == (
        "CRITICAL in job gpt-small: Rank 3 runs at 0.62 of its peers since step 480. Host node-a, device GPU-3. "
        "Open since 2025-10-09 08:53:17 UTC, found 3 s later. "
        "Impact: the other ranks wait for the slow one in every step; the work of 1.5 of 64 GPUs (2 %) is lost"
    )
    assert normal == (
        "Confidence that it is real: almost certain. "
        "Normal: ranks that do the same work take equally long (peers 0.1 s, here 0.161 s). "
        "Likely cause: the rank itself: its device, process or data"
    )
    assert first.startswith("First: Run `nvidia-smi -q -d TEMPERATURE,POWER,CLOCK` on node-a")
    why = "the rank is slow on its own; costs 0.1 GPU-hours an hour"
    assert first.endswith(f"If it stays: rankwatch pause gpt-small ({why}). Details: rankwatch incidents show 1")


def test_where_the_first_step_is_to_go_back_the_command_is_it():
    suggestion = {"action": "rollback", "reason": "why", "checkpoint": "local:l.0:470", "cost_gpu_hours": 0.31}
    now = lines(kind=Kind.CORRUPTION, severity=Severity.CRITICAL, suggestion=suggestion)[2]
    assert now == (
        "First: rankwatch rollback gpt-small (why: that of step 470; costs about 17 s of the job, 0.31 GPU-hours). "
        "Then: Train on without node-a, and test its GPU (`dcgmi diag -r 3`): such faults mostly come again. "
        "Details: rankwatch incidents show 1"
    )


def test_a_long_name_leaves_no_room_for_the_reasons_but_for_the_commands():
    now = lines(kind=Kind.HANG, job="j" * 200)[2]
    assert f" If it stays: rankwatch pause {'j' * 200} (" in now
    reason = {"action": "pause", "reason": "r" * 200, "checkpoint": "local:l.0:470", "cost_gpu_hours": 0.31}
    now = lines(kind=Kind.HANG, job="j" * 200, suggestion=reason)[2]
    assert now.endswith(f" If it stays: rankwatch pause {'j' * 200}. Details: rankwatch incidents show 1")


def test_a_value_that_is_neither_loss_nor_gradient_ruins_nothing_by_itself():
    what, _, now = lines(kind=Kind.NONFINITE, severity=Severity.WARNING, impact_gpu_hours_per_hour=0.0)
    assert what.endswith("Impact: none is proven while loss and gradients stay finite")
    assert now.startswith("First: See whether the loss stays finite: while it does, nothing need be done.")


def test_where_no_command_helps_it_says_what_to_expect():
    waiting = {"action": "wait", "reason": "it may pass by itself", "checkpoint": None, "cost_gpu_hours": 64.0}
    now = lines(suggestion=waiting)[2]
    assert now.endswith(". It may pass by itself. Details: rankwatch incidents show 1")
    waiting["alternatives"] = [{"action": "pause"}, {"action": "relaunch", "cost_gpu_hours": 2.0, "reason": "why"}]
    now = lines(suggestion=waiting, impact_gpu_hours_per_hour=8.0)[2]
    assert (
        ". Wait until 09:08 UTC at the latest: by then it has cost as much as a relaunch without node-a (2 GPU-hours)."
        in now
    )
    now = lines(suggestion=waiting, impact_gpu_hours_per_hour=8_000.0)[2]
    assert ". It has cost more than a relaunch without node-a (2 GPU-hours) by now." in now


def test_no_command_is_advised_that_costs_more_than_the_incident():
    pause = {"action": "pause", "reason": "why", "cost_gpu_hours": 64.0}
    now = lines(suggestion=pause, impact_gpu_hours_per_hour=8.0)[2]
    assert "rankwatch pause" not in now
    assert "save a checkpoint and go on without node-a. Details:" in now
    assert command_to_type(incident_version(suggestion=pause)).startswith("rankwatch incidents show ")
    assert "If it stays: rankwatch pause" in lines(suggestion=pause, impact_gpu_hours_per_hour=64.0)[2]
    back = {"action": "rollback", "reason": "why", "checkpoint": "local:l.0:470", "cost_gpu_hours": 0.3}
    norm = {"kind": Kind.CORRUPTION, "evidence": {"local_grad_norm": 2.8}, "impact_gpu_hours_per_hour": 0.0}
    assert "rankwatch rollback" not in lines(suggestion=back, **norm)[2]


def test_what_the_policy_orders_by_itself_is_no_command_to_type():
    ordered = {"action": "pause", "reason": "why", "policy": {"mode": "act", "action": "pause", "reason": "rule r1"}}
    now = lines(suggestion=ordered)[2]
    assert now.startswith("The policy orders a pause by itself (rule r1; why). First: Run `nvidia-smi")
    assert "rankwatch pause" not in now


def test_a_hang_that_may_pass_says_when_it_becomes_critical():
    hang = {"kind": Kind.HANG, "severity": Severity.INFO, "evidence": {"critical_after_s": 5.0}}
    assert "becomes critical by itself once it has lasted 5 s" in lines(**hang)[0]
    assert "becomes critical" not in lines(**hang | {"severity": Severity.CRITICAL})[0]


def test_what_the_summary_says_of_place_and_time_is_not_said_again():
    said = "Ranks 1, 2 on a wait since 08:53:17 UTC in step 480 (GPU-3)."
    what = lines(ranks=(1, 2), hosts=("a",), summary=said)[0]
    assert what.startswith(f"WARNING in job gpt-small: {said.removesuffix('.')}. Found 3 s later. Impact: ")


def test_a_slow_rank_without_a_device_is_no_matter_for_nvidia_smi():
    assert "nvidia-smi" in lines(8)[2]
    assert "\nFirst: See what else runs" in incident_text(incident_version(), 8, accelerated=False)


def test_nobody_is_sent_back_where_there_is_nothing_to_go_back_to():
    nowhere = {"action": "investigate", "reason": NOWHERE, "checkpoint": None}
    for kind in (Kind.NONFINITE, Kind.CORRUPTION):
        then = lines(kind=kind, severity=Severity.CRITICAL, suggestion=nowhere, checkpoint=None)[2]
        assert then.startswith("First: Stop the job, and start it again from a checkpoint from before the onset;")
        assert "No good checkpoint is known to go back to. Details:" in then


def test_a_job_that_stands_still_costs_all_of_it():
    assert "; the work of all 64 GPUs is lost, 0.053 GPU-hours so far" in lines(impact_gpu_hours_per_hour=64.0)[0]


def test_it_names_the_newest_changes_before_the_onset_and_saves_only_where_nothing_else_changed():
    onset = incident_version().onset_unix_ns
    saved = {"what": save_text("local:l.0:470"), "step": 470, "unix_ns": onset - 65 * 10**9}
    began = {"what": "attempt l.1 began after l.0", "step": None, "unix_ns": onset - 300 * 10**9}
    declared = {"what": "declared: lr 3e-4", "step": 480, "unix_ns": onset - 10**9}
    assert changed([saved, saved], onset) == "a checkpoint was saved at step 470, 1 min 5 s before"
    assert changed([began, saved], onset) == "training was started again, 5 min earlier"
    first = began | {"what": "attempt l.0 began", "step": 0}
    assert changed([first, saved], onset) == "nothing; training began 5 min earlier"
    assert changed([began | {"step": 40}], onset) == "training was started again at step 40, 5 min earlier"
    assert changed([began, saved, declared, declared | {"step": 479}], onset) == (
        "declared: lr 3e-4 at step 480, 1 s before; declared: lr 3e-4 at step 479, 1 s before; and 1 more"
    )


def test_a_gradient_norm_alone_is_no_proof_of_wrong_weights():
    norms = {"local_grad_norm": 1.64, "peers_local_grad_norm": 0.98}
    hint = {"kind": Kind.CORRUPTION, "evidence": norms, "impact_gpu_hours_per_hour": 0.0, "confidence": 0.6}
    what, usual, then = lines(**hint)
    assert what.endswith("Impact: none is proven; wrong gradients of one rank would go into the weights of all")
    assert "Confidence that it is real: possible" in usual
    assert then.startswith("First: Look at the data of that rank, ")
    what, _, then = lines(kind=Kind.CORRUPTION, severity=Severity.CRITICAL, evidence=norms)
    assert "weights may be wrong since the onset" in what
    assert then.startswith("First: Go back to a checkpoint from before the onset")


def test_what_a_script_declares_stays_on_its_line():
    declared = [{"what": "x\n" * 1_000, "step": 3, "unix_ns": incident_version().onset_unix_ns}]
    text = incident_text(incident_version(changes_before=tuple(declared)), 64)
    assert len(text.split("\n")) == 3
    assert "Changed before it: x x" in text


def test_of_a_resolved_incident_it_says_how_long_it_lasted():
    resolved = {"state": "resolved", "resolved_unix_ns": NOON_UNIX_NS + 100_000_000_000, "resolved_step": 900}
    what, lasted, details = lines(**resolved)
    assert what.startswith("RESOLVED in job gpt-small: ")
    assert lasted == "It lasted 1 min 43 s, from step 480 to 900. It has cost 0.043 GPU-hours"
    assert details == "Details: rankwatch incidents show 1"


@pytest.mark.parametrize(
    ("detected_step", "resolved_step", "steps"),
    [(251, 202, "from step 250 to 251"), (None, 202, "at step 250"), (251, 300, "from step 250 to 300")],
)
def test_the_steps_of_an_incident_never_go_backwards_after_a_rollback(detected_step, resolved_step, steps):
    known = {"onset_step": 250, "detected_step": detected_step, "resolved_step": resolved_step}
    assert lines(**known, state="resolved", resolved_unix_ns=NOON_UNIX_NS)[1] == f"It lasted 3 s, {steps}"


@pytest.mark.parametrize(
    ("kind", "onset_step", "steps", "meaning"),
    [
        (Kind.NONFINITE, 480, ", from step 480 to 900", "; steps since 480 may be ruined"),
        (Kind.NONFINITE, None, "", "; steps may be ruined"),
        (Kind.STRAGGLER, 480, ", from step 480 to 900", ""),
    ],
)
def test_what_only_the_end_of_the_job_ended_is_not_told_as_resolved(kind, onset_step, steps, meaning):
    ended = {"state": "resolved", "resolved_unix_ns": NOON_UNIX_NS, "resolved_step": 900, "onset_step": onset_step}
    what, lasted, _ = lines(**ended, kind=kind, evidence={"ended_with_job": True})
    assert what.startswith("ENDED in job gpt-small: ")
    assert lasted == f"It lasted 3 s{steps}. The job ended before it was over{meaning}"


def test_the_cost_is_of_ranks_where_the_job_has_no_devices():
    assert "; the work of 1.5 of 8 ranks (19 %) is lost" in incident_text(incident_version(), 8, accelerated=False)
    assert "; the work of 1.5 of 8 GPUs (19 %) is lost" in incident_text(incident_version(devices=()), 8)


@pytest.mark.parametrize("kind", sorted(Kind))
def test_every_kind_says_what_is_normal_where_the_summary_does_not_and_how_bad_it_is_where_no_cost_is_known(kind):
    what, usual, _ = lines(8, kind=kind, impact_gpu_hours_per_hour=0.0)
    assert f"Normal: {normal(kind, {})}" in usual
    said = {"busy_s": 0.161, "peers_busy_s": 0.1}
    assert "Normal:" not in lines(8, kind=kind, evidence=said, summary="Rank 3 takes 161 ms a step, they 0.1 s.")[1]
    assert what.endswith(f". Impact: {impact(kind, 'warning', {})}")


@pytest.mark.parametrize(
    ("ranks", "hosts", "where"),
    [
        ((), (), ". All ranks (64)"),
        ((1, 2), ("a",), ". 2 of 64 ranks (1, 2) on a"),
        (tuple(range(40)), tuple("abcdef"), ". 40 of 64 ranks (0, 1, 2, 3 and 36 more) on a, b, c, d and 2 more"),
    ],
    ids=["whole job", "two ranks", "many"],
)
def test_long_lists_of_places_are_counted(ranks, hosts, where):
    assert where in lines(ranks=ranks, hosts=hosts)[0]


def test_line_breaks_and_control_characters_of_a_job_add_no_line():
    text = incident_text(incident_version(job="a\nb\u2028c\x1b[2J", summary="x\r\ny"), 0)
    assert len(text.splitlines()) == 3
    assert text.replace("\n", "").isprintable()


def test_a_line_at_the_limit_is_whole_and_a_longer_one_is_cut():
    fixed = len(lines(0, summary="")[0])
    for chars, cut in ((LINE_CHARS_MAX - fixed, False), (LINE_CHARS_MAX - fixed + 1, True)):
        line = lines(0, summary="é" * chars)[0]
        assert (len(line), line.endswith("…")) == (LINE_CHARS_MAX, cut)


def test_a_job_name_that_a_shell_would_read_is_quoted_in_the_command():
    assert command_to_type(incident_version(job="a; rm -rf b")) == "rankwatch pause 'a; rm -rf b'"


def test_where_nothing_is_suggested_the_command_shows_the_incident():
    assert command_to_type(incident_version(suggestion={"action": "wait"})).startswith("rankwatch incidents show ")
    assert command_to_type(incident_version(suggestion={})).startswith("rankwatch incidents show ")


@pytest.mark.parametrize(
    ("confidence", "words"),
    [(1.0, "certain"), (0.99, "almost certain"), (0.9, "very likely"), (0.66, "likely"), (0.65, "possible")],
)
def test_confidence_has_words(confidence, words):
    assert confidence_words(confidence) == words


def test_a_command_that_waits_says_until_when_and_how_to_decide():
    by = {"reason": "NaN", "requested_by": "sam", "requested_unix_ns": NOON_UNIX_NS, "approval_required": True}
    request = CommandRequest(id="cmd_1", job="gpt", attempt="l.0", action="rollback", params={}, world_size=64, **by)
    asked, waits, decide = command_text(request).split("\n")
    assert asked == "APPROVAL NEEDED in job gpt: rollback of all 64 ranks, asked by sam: NaN"
    assert "expires after 15 min" in waits
    assert decide.startswith("Decide: rankwatch commands approve ")
