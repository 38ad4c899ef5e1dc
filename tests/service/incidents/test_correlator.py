import math

import pytest

from rankwatch_detectors.base import Change, Kind, Severity
from rankwatch_service.incidents import correlator as correlator_module
from rankwatch_service.incidents.correlator import LOOK_FRAMES, PROGRESS_FRAMES, Correlator
from rankwatch_service.incidents.model import incident_id
from tests.support.values.incidents import finding, topology_state

TOPOLOGY = topology_state()
SAVE, RESTORE = finding(Kind.CHECKPOINT_FAILED, ranks=(3,)), finding(Kind.RESTORE_FAILED, ranks=(3,))


def evaluate(correlator, *findings) -> list[tuple[str, str]]:
    """(what, kind of the incident) of everything told."""
    return [(str(reported.what), str(reported.incident.kind)) for reported in correlator.evaluate(findings, TOPOLOGY)]


def go_on(correlator, attempt, frames=PROGRESS_FRAMES, from_step=100) -> list[str]:
    steps = range(from_step, from_step + frames)
    return [str(reported.what) for step in steps for reported in correlator.progress(attempt, step, 2_000.0)]


def test_a_finding_opens_an_incident_and_its_end_resolves_it(correlator):
    assert evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:5")) == [("opened", "straggler")]
    (incident,) = correlator.open
    assert incident.id == incident_id("gpt", "l.0", "straggler", "rank:5", 1)
    assert (incident.ranks, incident.hosts, incident.devices) == ((5,), ["node-1"], ["GPU-5"])
    closed = finding(Kind.STRAGGLER, Change.CLOSE, "rank:5", detected_step=200, detected_time_s=1_100.0)
    assert evaluate(correlator, closed) == [("resolved", "straggler")]
    assert (incident.state, incident.resolved_step, incident.resolved_time_s) == ("resolved", 200, 1_100.0)
    assert correlator.open == []


def test_an_incident_that_ended_can_open_again_under_another_id(correlator):
    first = correlator.evaluate([finding(Kind.LOSS_SPIKE)], TOPOLOGY)[0].incident
    correlator.evaluate([finding(Kind.LOSS_SPIKE, Change.CLOSE)], TOPOLOGY)
    second = correlator.evaluate([finding(Kind.LOSS_SPIKE)], TOPOLOGY)[0].incident
    assert first.id != second.id


def test_one_that_lasts_does_not_open_again(correlator):
    evaluate(correlator, finding(Kind.HANG, ranks=(3,)))
    assert evaluate(correlator, finding(Kind.HANG, ranks=(3,))) == [("evidence", "hang")]
    assert len(correlator.open) == 1


@pytest.mark.parametrize(
    ("cause", "effect"),
    [
        (finding(Kind.RANK_LOST, scope="rank:3"), finding(Kind.HANG, ranks=(3,))),
        (finding(Kind.RANK_LOST, scope="rank:3"), finding(Kind.TELEMETRY_LOST, scope="host:node-1")),
        (finding(Kind.NONFINITE, scope="rank:3"), finding(Kind.NONFINITE, scope="rank:7")),
        (finding(Kind.NONFINITE, scope="rank:3"), finding(Kind.LOSS_SPIKE)),
        (finding(Kind.NONFINITE, scope="rank:3"), finding(Kind.GRAD_NORM)),
        (finding(Kind.CORRUPTION, scope="rank:3"), finding(Kind.LOSS_DIVERGENCE)),
        (finding(Kind.STRAGGLER, scope="rank:3"), finding(Kind.SLOWDOWN)),
        (finding(Kind.DEVICE_FAULT, scope="rank:3"), finding(Kind.RANK_LOST, scope="rank:3")),
        (finding(Kind.HANG, ranks=(3,)), finding(Kind.RANK_LOST, scope="rank:4", onset_step=103)),
        (finding(Kind.HANG, ranks=(3,)), finding(Kind.RANK_LOST, scope="rank:3", onset_step=103, onset_time_s=1_600.0)),
        (SAVE, finding(Kind.RANK_LOST, scope="rank:3")),
        (SAVE, finding(Kind.HANG, ranks=(1,))),
        (SAVE, finding(Kind.CHECKPOINT_OVERDUE, onset_step=900, onset_time_s=9_000.0)),
        (RESTORE, finding(Kind.RANK_LOST, scope="rank:3")),
        (RESTORE, finding(Kind.HANG, ranks=(1,))),
    ],
)
def test_a_consequence_joins_and_pages_nobody(correlator, cause, effect):
    assert evaluate(correlator, cause) == [("opened", str(cause.kind))]
    assert evaluate(correlator, effect) == [("evidence", str(cause.kind))]
    (incident,) = correlator.open
    assert [(one.kind, one.scope) for one in incident.version().consequences] == [(effect.kind, effect.scope)]
    assert incident.ranks == cause.ranks


def test_of_findings_that_come_together_the_earliest_is_the_cause(correlator):
    spike = finding(Kind.LOSS_SPIKE, onset_time_s=1_000.5)
    bad = finding(Kind.NONFINITE, scope="rank:3", onset_time_s=1_000.0)
    assert evaluate(correlator, spike, bad) == [("opened", "nonfinite"), ("evidence", "nonfinite")]


def test_with_the_same_onset_the_table_decides(correlator):
    assert evaluate(correlator, finding(Kind.SLOWDOWN), finding(Kind.STRAGGLER, scope="rank:2"))[0] == (
        "opened",
        "straggler",
    )


def test_a_cause_found_later_takes_over_as_first_mover(correlator):
    evaluate(correlator, finding(Kind.SLOWDOWN, onset_step=105, evidence={"ratio": 1.3}))
    (incident,) = correlator.open
    opened_as = incident.id
    slow = finding(Kind.STRAGGLER, scope="rank:6", onset_step=103, evidence={"ratio": 1.5})
    assert evaluate(correlator, slow) == [("updated", "straggler")]
    assert correlator.open == [incident]
    assert incident.id == opened_as
    assert (incident.ranks, str(incident.scope), incident.hosts) == ((6,), "rank:6", ["node-1"])
    assert incident.evidence == {"ratio": 1.5, "ranks_on_host": 4, "slowdown": {"ratio": 1.3}}
    assert [one.kind for one in incident.version().consequences] == ["slowdown"]


def test_how_a_rank_ended_is_the_headline_of_a_hang_that_named_it_while_its_process_was_ending(correlator):
    evaluate(correlator, finding(Kind.HANG, ranks=(3,)))
    lost = finding(Kind.RANK_LOST, scope="rank:3", onset_time_s=1_020.0, detected_time_s=1_021.0)
    assert evaluate(correlator, lost) == [("updated", "rank_lost")]
    (incident,) = correlator.open
    assert (incident.summary, [one.kind for one in incident.version().consequences]) == (lost.summary, ["hang"])


def test_an_incident_lasts_as_long_as_any_of_its_parts(correlator):
    evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:3"), finding(Kind.SLOWDOWN, onset_step=110))
    assert evaluate(correlator, finding(Kind.STRAGGLER, Change.CLOSE, "rank:3")) == []
    assert evaluate(correlator, finding(Kind.SLOWDOWN, Change.CLOSE)) == [("resolved", "straggler")]


def test_most_ranks_of_a_host_make_it_the_hosts_incident(correlator):
    assert evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:4")) == [("opened", "straggler")]
    assert evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:5")) == [("evidence", "straggler")]
    (incident,) = correlator.open
    assert (str(incident.scope), incident.ranks) == ("rank:4", (4, 5))
    later = finding(Kind.STRAGGLER, scope="rank:6", detected_time_s=1_100.0)
    assert evaluate(correlator, later) == [("updated", "straggler")]
    assert evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:7")) == [("evidence", "straggler")]
    correlator.evaluate([finding(Kind.STRAGGLER, Change.CLOSE, "rank:7")], TOPOLOGY)
    assert (str(incident.scope), incident.ranks, incident.hosts) == ("host:node-1", (4, 5, 6, 7), ["node-1"])
    assert incident.summary.startswith("Host node-1 is slow, all its 4 ranks (4-7): ")


def test_graver_is_an_update_and_more_of_the_same_is_evidence(correlator):
    evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:3"))
    same = finding(Kind.STRAGGLER, Change.UPDATE, "rank:3", evidence={"ratio": 1.7})
    assert evaluate(correlator, same) == [("evidence", "straggler")]
    graver = finding(Kind.STRAGGLER, Change.UPDATE, "rank:3", severity=Severity.CRITICAL)
    assert evaluate(correlator, graver) == [("updated", "straggler")]
    (incident,) = correlator.open
    assert (incident.severity, incident.evidence) == (Severity.CRITICAL, {"ratio": 1.7, "ranks_on_host": 4})


def test_what_ended_with_its_attempt_is_over_when_training_makes_progress_again(correlator):
    evaluate(correlator, finding(Kind.NONFINITE, scope="rank:3"))
    correlator.begin("l.1")
    assert evaluate(correlator, finding(Kind.NONFINITE, Change.CLOSE, "rank:3")) == []
    assert go_on(correlator, "l.0") == []
    assert go_on(correlator, "l.1", PROGRESS_FRAMES - 1) == []
    assert go_on(correlator, "l.1", 1) == ["resolved"]


def test_a_rollback_does_not_end_a_slow_rank_but_a_new_launch_does(correlator):
    evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:3"))
    correlator.begin("l.1")
    assert go_on(correlator, "l.1") == []
    correlator.begin("m.0")
    assert go_on(correlator, "m.0", LOOK_FRAMES - 1) == []
    assert go_on(correlator, "m.0", 1) == ["resolved"]


def test_a_slow_rank_that_is_seen_again_after_a_relaunch_stays_one_incident(correlator):
    evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:3"))
    correlator.begin("m.0")
    assert evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:3", attempt="m.0")) == [("evidence", "straggler")]
    assert go_on(correlator, "m.0") == []
    assert len(correlator.open) == 1


def test_the_same_trouble_in_a_later_attempt_is_another_incident(correlator):
    evaluate(correlator, finding(Kind.NONFINITE, scope="rank:3"))
    correlator.begin("l.1")
    assert evaluate(correlator, finding(Kind.NONFINITE, scope="rank:3", attempt="l.1")) == [("opened", "nonfinite")]
    assert len(correlator.open) == 2


def test_news_of_an_attempt_that_is_over_is_over_soon_too(correlator):
    correlator.begin("m.0")
    go_on(correlator, "m.0")
    assert evaluate(correlator, finding(Kind.RANK_LOST, scope="rank:3")) == [("opened", "rank_lost")]
    assert go_on(correlator, "m.0", 1) == ["resolved"]


def test_the_end_of_the_job_ends_everything(correlator):
    evaluate(correlator, finding(Kind.LOSS_DIVERGENCE), finding(Kind.STRAGGLER, scope="rank:3"))
    assert [str(reported.what) for reported in correlator.finish(500, 3_000.0)] == ["resolved", "resolved"]


def test_open_incidents_are_bounded(correlator, monkeypatch):
    monkeypatch.setattr(correlator_module, "OPEN_MAX", 2)
    for rank in (0, 4):
        evaluate(correlator, finding(Kind.STRAGGLER, scope=f"rank:{rank}"))
    assert evaluate(correlator, finding(Kind.LOSS_SPIKE)) == []
    assert correlator.counts["refused"] == 1


def test_consequences_are_listed_up_to_a_limit(correlator):
    evaluate(correlator, finding(Kind.NONFINITE, scope="rank:0"))
    for rank in range(1, 200):
        evaluate(correlator, finding(Kind.NONFINITE, scope=f"rank:{rank}"))
    (incident,) = correlator.open
    assert len(incident.parts) == 64
    assert incident.parts_total == 200


def test_a_score_that_is_no_number_can_be_stored(correlator):
    evaluate(correlator, finding(Kind.CORRUPTION, score=math.nan, confidence=math.nan, evidence={"x": math.inf}))
    now = correlator.open[0].version()
    assert (now.score, now.confidence, now.evidence) == (math.inf, 0.0, {"x": "Inf"})


def test_a_restored_correlator_goes_on_as_before(correlator):
    evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:3"), finding(Kind.SLOWDOWN, onset_step=120))
    again = Correlator("gpt")
    again.restore(correlator.state())
    assert [incident.version() for incident in again.open] == [incident.version() for incident in correlator.open]
    evaluate(again, finding(Kind.SLOWDOWN, Change.CLOSE))
    assert evaluate(again, finding(Kind.STRAGGLER, Change.CLOSE, "rank:3")) == [("resolved", "straggler")]
    reopened = again.evaluate([finding(Kind.STRAGGLER, scope="rank:3")], TOPOLOGY)[0].incident
    assert reopened.id == incident_id("gpt", "l.0", "straggler", "rank:3", 2)


def test_a_person_can_end_an_incident_and_its_detectors_end_is_ignored(correlator):
    evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:3"))
    (incident,) = correlator.open
    correlator.resolve(incident, 150, 1_500.0)
    assert correlator.open == []
    assert evaluate(correlator, finding(Kind.STRAGGLER, Change.CLOSE, "rank:3")) == []
    assert correlator.get(incident.id) is incident


def test_a_spike_that_does_not_come_back_becomes_a_divergence_in_the_same_incident(correlator):
    evaluate(correlator, finding(Kind.LOSS_SPIKE, severity=Severity.INFO))
    spike = correlator.open[0]
    turn = (finding(Kind.LOSS_SPIKE, Change.CLOSE), finding(Kind.LOSS_DIVERGENCE, severity=Severity.CRITICAL))
    assert evaluate(correlator, *turn) == [("updated", "loss_divergence")]
    (incident,) = correlator.open
    assert incident is spike
    assert (incident.kind, incident.severity) == (Kind.LOSS_DIVERGENCE, Severity.CRITICAL)
    assert evaluate(correlator, finding(Kind.LOSS_DIVERGENCE, Change.CLOSE)) == [("resolved", "loss_divergence")]


def test_a_job_that_dies_again_and_again_is_one_incident_from_the_loop_on(correlator):
    evaluate(correlator, finding(Kind.RANK_LOST, scope="rank:3"))
    correlator.begin("m.0")
    loop = finding(Kind.RESTART_LOOP, attempt="m.0", severity=Severity.CRITICAL, onset_time_s=1_100.0)
    assert evaluate(correlator, loop) == [("updated", "rank_lost")]
    again = finding(Kind.RANK_LOST, scope="rank:3", attempt="m.0", onset_time_s=1_200.0)
    assert evaluate(correlator, again) == [("evidence", "rank_lost")]
    correlator.begin("n.0")
    over = finding(Kind.RESTART_LOOP, Change.CLOSE, attempt="n.0")
    assert evaluate(correlator, over) == []
    assert go_on(correlator, "n.0") == ["resolved"]


@pytest.mark.parametrize("kind", [Kind.LIMIT_REACHED, Kind.FORGED_TELEMETRY])
def test_what_is_about_senders_neither_causes_nor_ends_with_what_happens_in_training(correlator, kind):
    evaluate(correlator, finding(Kind.HANG, ranks=(3,)))
    assert evaluate(correlator, finding(kind)) == [("opened", str(kind))]
    assert evaluate(correlator, finding(Kind.DEVICE_FAULT, scope="rank:5")) == [("opened", "device_fault")]
    correlator.begin("m.0")
    go_on(correlator, "m.0")
    assert kind in {incident.kind for incident in correlator.open}
    assert evaluate(correlator, finding(kind, Change.CLOSE)) == [("resolved", str(kind))]


def test_a_host_whose_ranks_follow_within_seconds_is_reported_once(correlator):
    for second, rank in enumerate((4, 5, 6, 7)):
        reported = evaluate(correlator, finding(Kind.STRAGGLER, scope=f"rank:{rank}", detected_time_s=1_001.0 + second))
        assert reported == [("evidence" if second else "opened", "straggler")]
    assert str(correlator.open[0].scope) == "host:node-1"


STANDS = {"evidence": {"standing": True}, "onset_step": 0, "onset_time_s": 900.0, "detected_time_s": 918.0}


@pytest.mark.parametrize(
    "later",
    [
        finding(Kind.SLOWDOWN),
        finding(Kind.SLOWDOWN, scope="stage:3"),
        finding(Kind.STRAGGLER, scope="rank:5"),
        finding(Kind.STRAGGLER, scope="rank:6"),
        finding(Kind.HANG, scope="rank:5"),
    ],
    ids=lambda one: f"{one.kind} {one.scope}",
)
def test_what_stands_from_the_first_steps_takes_up_nothing_that_begins_later(correlator, later):
    stage = finding(Kind.SLOWDOWN, scope="stage:3", severity=Severity.INFO, **STANDS)
    assert evaluate(correlator, stage) == [("opened", "slowdown")]
    assert evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:5", **STANDS)) == [("opened", "straggler")]
    assert evaluate(correlator, later) == [("opened", str(later.kind))]
    assert [len(incident.parts) for incident in correlator.open] == [1, 1, 1]


def test_ranks_of_one_host_that_were_slow_from_the_start_are_one_incident(correlator):
    evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:5", **STANDS))
    evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:6", **STANDS))
    assert [incident.ranks for incident in correlator.open] == [(5, 6)]


def test_a_change_of_what_stands_ends_by_itself(correlator):
    evaluate(correlator, finding(Kind.SLOWDOWN, scope="stage:3", severity=Severity.INFO, **STANDS))
    evaluate(correlator, finding(Kind.SLOWDOWN, scope="stage:3"))
    assert evaluate(correlator, finding(Kind.SLOWDOWN, Change.CLOSE, "stage:3")) == [("resolved", "slowdown")]
    assert [incident.first.standing for incident in correlator.open] == [True]


def test_a_detector_that_begins_anew_does_not_make_a_lasting_trouble_a_standing_one(correlator):
    evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:5"))
    evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:5", **STANDS))
    assert [(incident.first.standing, incident.first.onset_step) for incident in correlator.open] == [(False, 100)]


def test_a_job_that_was_ended_on_request_takes_with_it_all_that_was_open(correlator):
    evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:5"), finding(Kind.LOSS_SPIKE))
    asked = {"severity": Severity.INFO, "onset_time_s": 1_100.0, "detected_time_s": 1_100.0, "onset_step": 200}
    evaluate(correlator, finding(Kind.RANK_LOST, scope="rank:2", **asked))
    reported = correlator.evaluate(
        [finding(Kind.RANK_LOST, Change.CLOSE, "rank:2", evidence={"ended_on_request": True}, **asked)], TOPOLOGY
    )
    assert {str(one.what) for one in reported} == {"resolved"}
    assert {one.text for one in reported} == {"rank_lost of rank:2"}
    assert correlator.open == []


def times(incident) -> tuple:
    now = incident.version()
    return tuple(getattr(now, f"{moment}_{unit}") for moment in ("onset", "detected") for unit in ("step", "unix_ns"))


def test_a_jump_that_becomes_a_divergence_began_and_was_found_when_the_divergence_was(correlator):
    evaluate(correlator, finding(Kind.LOSS_SPIKE, severity=Severity.INFO, onset_step=298, detected_step=299))
    later = {"onset_step": 303, "onset_time_s": 1_005.0, "detected_step": 310, "detected_time_s": 1_012.0}
    evaluate(correlator, finding(Kind.LOSS_DIVERGENCE, severity=Severity.CRITICAL, **later))
    (incident,) = correlator.open
    assert times(incident) == (303, 1_005_000_000_000, 310, 1_012_000_000_000)
    assert incident.opened_time_s == 1_001.0


def test_a_first_mover_of_the_same_kind_brings_its_own_evidence_and_times(correlator):
    evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:5", onset_step=103, evidence={"ratio": 2.4, "sigma": 0.1}))
    first = {"onset_step": 90, "onset_time_s": 990.0, "detected_step": 104, "detected_time_s": 1_004.0}
    evaluate(
        correlator, finding(Kind.STRAGGLER, scope="rank:4", evidence={"ratio": 1.39}, summary="1.39 times", **first)
    )
    (incident,) = correlator.open
    assert (incident.ranks, incident.summary, incident.evidence) == (
        (4, 5),
        "1.39 times",
        {"ratio": 1.39, "ranks_on_host": 4},
    )
    assert times(incident) == (90, 990_000_000_000, 104, 1_004_000_000_000)


def test_an_update_that_names_another_culprit_has_its_times_and_accuses_nobody_else(correlator):
    evaluate(correlator, finding(Kind.RANK_LOST, scope="rank:0", severity=Severity.CRITICAL))
    moved = {"onset_step": 103, "onset_time_s": 1_003.0, "detected_step": 103, "detected_time_s": 1_004.0}
    evaluate(correlator, finding(Kind.RANK_LOST, Change.UPDATE, "rank:0", ranks=(3,), **moved))
    (incident,) = correlator.open
    assert incident.ranks == (3,)
    assert times(incident) == (103, 1_003_000_000_000, 103, 1_004_000_000_000)


def test_an_update_of_the_same_culprit_keeps_when_it_was_found(correlator):
    evaluate(correlator, finding(Kind.STRAGGLER, scope="rank:3"))
    evaluate(correlator, finding(Kind.STRAGGLER, Change.UPDATE, "rank:3", detected_step=400, detected_time_s=1_400.0))
    assert times(correlator.open[0]) == (100, 1_000_000_000_000, 101, 1_001_000_000_000)


def test_what_the_store_knows_of_a_job_that_goes_on_in_the_same_attempt_stays_open(correlator):
    evaluate(correlator, finding(Kind.NONFINITE, scope="rank:3"))
    again = Correlator("gpt")
    again.restore_open(correlator.open, "l.0", 1_000)
    again.begin("l.0")
    assert go_on(again, "l.0") == []
    again.begin("m.0")
    assert go_on(again, "m.0") == ["resolved"]


def test_a_rank_that_is_lost_minutes_after_a_failed_save_has_another_cause(correlator):
    evaluate(correlator, SAVE)
    lost = finding(Kind.RANK_LOST, scope="rank:3", onset_time_s=1_100.0, detected_time_s=1_101.0)
    assert evaluate(correlator, lost) == [("opened", "rank_lost")]


def test_a_job_whose_saves_were_overdue_before_one_failed_has_one_incident(correlator):
    evaluate(correlator, finding(Kind.CHECKPOINT_OVERDUE))
    failed = finding(Kind.CHECKPOINT_FAILED, ranks=(3,), onset_time_s=1_500.0, onset_step=600, cause="disk")
    assert evaluate(correlator, failed) == [("updated", "checkpoint_failed")]
    (incident,) = correlator.open
    assert (incident.ranks, incident.cause) == ((3,), "disk")
    assert evaluate(correlator, finding(Kind.CHECKPOINT_OVERDUE, Change.CLOSE)) == []
    assert evaluate(correlator, finding(Kind.CHECKPOINT_FAILED, Change.CLOSE)) == [("resolved", "checkpoint_failed")]


def test_a_restore_that_fails_in_launch_after_launch_is_the_cause_of_what_they_end_with(correlator):
    evaluate(correlator, RESTORE)
    for launch in ("m.0", "n.0"):
        correlator.begin(launch)
        lost = finding(Kind.RANK_LOST, scope="rank:3", attempt=launch, onset_step=None, onset_time_s=1_060.0)
        assert evaluate(correlator, lost) == [("evidence", "restore_failed")]
    for step in range(PROGRESS_FRAMES):
        assert correlator.progress("n.0", step, 2_000.0) == []
    assert [incident.kind for incident in correlator.open] == [Kind.RESTORE_FAILED]


@pytest.mark.parametrize(
    ("attempt", "said"),
    [("l.1", " The job was rolled back to step 90."), ("m.0", " The job was relaunched from step 90.")],
)
def test_what_a_later_attempt_ended_says_from_which_step_on_it_made_its_steps_again(correlator, attempt, said):
    correlator.evaluate([finding(Kind.NONFINITE, scope="rank:3")], topology_state())
    (incident,) = correlator.open
    summary = incident.summary
    correlator.begin(attempt)
    go_on(correlator, attempt, PROGRESS_FRAMES - 1, from_step=90)
    restored = Correlator("gpt")
    restored.restore(correlator.state())
    (incident,) = restored.open
    assert go_on(restored, attempt, 1, from_step=100) == ["resolved"]
    assert incident.summary == summary + said


@pytest.mark.parametrize(
    ("hosts", "hosts_per_switch", "listed"),
    [
        (["node-1", "node-2"], 2, {}),
        (["node-0", "node-1"], 0, {}),
        (["node-0", "node-1"], 6, {}),
        (["node-2", "node-3"], 2, {"hosts_hit": 6}),
    ],
    ids=["of several", "of unknown ones", "of the only one", "a list that was cut"],
)
def test_hosts_of_no_certain_switch_are_the_jobs_incident(correlator, hosts, hosts_per_switch, listed):
    silent = finding(Kind.TELEMETRY_LOST, scope="host:node-1", ranks=(), evidence={"hosts": hosts} | listed)
    correlator.evaluate([silent], topology_state(ranks=24, hosts_per_switch=hosts_per_switch))
    assert str(correlator.open[0].scope) == "job"


def test_hosts_of_one_switch_that_fall_silent_together_are_the_switchs_incident(correlator):
    placement = topology_state(ranks=24, hosts_per_switch=2)
    silent = {"ranks": (), "evidence": {"hosts": ["node-2", "node-3"]}}
    correlator.evaluate([finding(Kind.TELEMETRY_LOST, scope="host:node-2", **silent)], placement)
    (incident,) = correlator.open
    assert (str(incident.scope), incident.hosts) == ("switch:leaf-1", ["node-2", "node-3"])
    assert incident.summary.startswith("Switch leaf-1, all its 8 ranks (8-15): ")


def test_a_switch_that_is_slow_as_a_whole_takes_over_the_incidents_of_its_ranks(correlator):
    placement = topology_state(ranks=24, hosts_per_switch=2)
    for scope, onset in (("rank:8", 100), ("rank:12", 101)):
        correlator.evaluate([finding(Kind.STRAGGLER, scope=scope, onset_step=onset, detected_step=106)], placement)
    first, second = correlator.open
    whole = finding(Kind.STRAGGLER, scope="switch:leaf-1", ranks=tuple(range(8, 16)), onset_step=104, detected_step=120)
    correlator.evaluate([whole], placement)
    assert (first.state, str(first.scope), first.ranks) == ("open", "switch:leaf-1", tuple(range(8, 16)))
    assert (first.hosts, first.summary) == (["node-2", "node-3"], "straggler of switch:leaf-1")
    assert second.state == "resolved"
