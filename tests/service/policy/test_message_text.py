"""The text of a message: three lines, whatever the names and texts of a job hold."""

import pytest

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.incidents.answers import changed, confidence_words, impact, save_text
from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.policy.message_text import LINE_CHARS_MAX, command_text, command_to_type, incident_text
from tests.support.values.incidents import NOON_UNIX_NS, incident_version


def lines(size=64, /, **incident):
    return incident_text(incident_version(**incident), size).split("\n")


def test_it_says_what_where_how_bad_how_sure_and_what_to_do_first():
    what, sure, first = lines(severity=Severity.CRITICAL)
    assert what == (
        "CRITICAL in job gpt-small: Rank 3 runs at 0.62 of its peers since step 480. Host node-a, device GPU-3. "
        "Open since 2025-10-09 08:53:17 UTC, found 3 s later. "
        "Impact: the other ranks wait for the slow one; the work of 1.5 of 64 GPUs (2 %) is lost"
    )
    cause = "the rank itself: its device, process or data"
    assert sure == f"Confidence that it is real: certain. Likely cause: {cause}"
    assert first.startswith("Automatic: nothing. You: Compare its GPU with the others on ")
    assert first.endswith(" since the newest checkpoint). Details: rankwatch incidents show 1")


def test_as_many_steps_are_reported_as_the_line_holds():
    way = {"action": "relaunch", "checkpoint": "local:l.0:450"}
    short, long = (lines(job="j" * chars, suggestion=way)[2] for chars in (20, 500))
    assert "If it is still so at " in short
    assert "If it is still so at " not in long
    assert long.startswith("Automatic: nothing. You: Compare its GPU with ")
    assert long.endswith(". Details: rankwatch incidents show 1")


def test_a_value_that_is_neither_loss_nor_gradient_ruins_nothing_by_itself():
    what, _, now = lines(kind=Kind.NONFINITE, severity=Severity.WARNING, impact_gpu_hours_per_hour=0.0)
    assert what.endswith("Impact: none is proven while loss and gradients stay finite")
    assert now.startswith("Automatic: nothing. You: Nothing to do now: while loss and gradients stay finite,")


def test_a_hang_that_may_pass_says_how_long_it_has_stood_and_when_it_becomes_critical():
    evidence = {"critical_after_s": 5.0, "age_s": 3.73, "usual_step_s": 0.421}
    hang = {"kind": Kind.HANG, "severity": Severity.INFO, "evidence": evidence}
    assert (
        "training has stood still for 3.7 s (a step usually takes 0.42 s), which may pass: rankwatch calls it "
        "critical once it has lasted 5 s" in lines(**hang)[0]
    )
    assert "calls it critical" not in lines(**hang | {"severity": Severity.CRITICAL})[0]


def test_what_the_summary_says_of_place_and_time_is_not_said_again():
    said = "Ranks 1, 2 on a wait since 08:53:17 UTC in step 480 (GPU-3)."
    what = lines(ranks=(1, 2), hosts=("a",), summary=said)[0]
    assert what.startswith(f"WARNING in job gpt-small: {said.removesuffix('.')}. Found 3 s later. Impact: ")


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
    what, usual, _ = lines(**hint)
    assert what.endswith(
        "Impact: none is proven; if its gradients are wrong, they go into the weights of all ranks alike"
    )
    assert "Confidence that it is real: possible" in usual
    assert "its gradients go into the weights of all ranks" in lines(**hint | {"severity": Severity.CRITICAL})[0]


def test_a_norm_that_is_not_finite_may_have_been_skipped():
    norm = {"kind": Kind.NONFINITE, "severity": Severity.CRITICAL, "impact_gpu_hours_per_hour": 64.0}
    what, sure, _ = lines(**norm, evidence={"metrics": ["grad_norm"]})
    assert what.endswith(
        "none if a loss scaler skipped this update; else all steps and checkpoints since then are lost"
    )
    assert "certain (that the norm was not finite; whether it went into the weights is not known)" in sure
    for sure in ({"metrics": ["loss"]}, {"metrics": ["grad_norm"], "update_skipped": False}):
        assert "steps and checkpoints since then are ruined; the work of all 64 GPUs" in lines(**norm, evidence=sure)[0]
    assert "change no weight" in lines(**norm, evidence={"metrics": ["optimizer_skipped"]})[0]


def test_an_error_that_the_device_contained_spoils_nothing_that_is_saved():
    wear, broken = ({"xids": [{"xid": 94, "class": name}]} for name in ("wear", "hardware"))
    assert "what is saved is good" in lines(kind=Kind.DEVICE_FAULT, evidence=wear)[0]
    assert "in doubt" in lines(kind=Kind.DEVICE_FAULT, evidence=broken)[0]


def test_of_a_few_ranks_each_is_reported_with_its_host_and_device():
    places = {"ranks": (1, 6), "hosts": ("a", "b"), "devices": ("GPU-1", "GPU-6")}
    assert ". Rank 1 on a (GPU-1), rank 6 on b (GPU-6). Open since" in lines(**places)[0]


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
def test_what_only_the_end_of_the_job_ended_is_not_reported_as_resolved(kind, onset_step, steps, meaning):
    ended = {"state": "resolved", "resolved_unix_ns": NOON_UNIX_NS, "resolved_step": 900, "onset_step": onset_step}
    what, lasted, _ = lines(**ended, kind=kind, evidence={"ended_with_job": True})
    assert what.startswith("ENDED in job gpt-small: ")
    assert lasted == f"It lasted 3 s{steps}. The job ended before it was over{meaning}"


def test_the_cost_is_of_ranks_where_the_job_has_no_devices():
    assert "; the work of 1.5 of 8 ranks (19 %) is lost" in incident_text(incident_version(), 8, accelerated=False)
    assert "; the work of 1.5 of 8 GPUs (19 %) is lost" in incident_text(incident_version(devices=()), 8)


@pytest.mark.parametrize("kind", sorted(Kind))
def test_every_kind_says_how_bad_it_is_where_no_cost_is_known(kind):
    what = lines(8, kind=kind, impact_gpu_hours_per_hour=0.0)[0]
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


def test_where_the_first_step_has_no_command_it_is_the_one_that_shows_the_incident():
    assert command_to_type(incident_version(suggestion={"action": "wait"})).startswith("rankwatch incidents show ")
    back = {"action": "rollback", "reason": "why", "checkpoint": "local:l.0:470", "cost_gpu_hours": 0.3}
    nan = incident_version(kind=Kind.NONFINITE, severity=Severity.CRITICAL, suggestion=back)
    assert command_to_type(nan) == "rankwatch rollback gpt-small"


@pytest.mark.parametrize(
    ("confidence", "words"),
    [(1.0, "certain"), (0.97, "certain"), (0.9, "likely"), (0.66, "likely"), (0.65, "possible")],
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
