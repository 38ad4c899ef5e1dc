"""What follows from an incident that has grown: the policy looks at the worst of it, and acts once for each end."""

from dataclasses import replace
from typing import Any

import pytest

from rankwatch import wire
from rankwatch_detectors.base import Change, Finding, Kind, Occurrence, Severity
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.model import Incident
from rankwatch_service.job.history import JobHistory
from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.policy.checkpoint_ledger import CheckpointTier, Ledger, Shard, Verdict
from rankwatch_service.policy.policy import Mode, Policy, PolicyLimits, Rule
from rankwatch_service.policy.precision import Precision
from rankwatch_service.policy.response import JobSituation, Responder, advice_gone, facts
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.policy.suggestion import RELAUNCH_S
from rankwatch_service.policy.traces import ERROR_CHARACTERS_MAX, TraceAnswer, trace_answer
from rankwatch_service.policy.what_now import what_now
from tests.support.detection.scripted_job import World
from tests.support.values.incidents import finding, topology_state
from tests.support.values.presences import SUMMARY, trace_fields

TOPOLOGY = topology_state()
CAN = ("rollback", "rollback_memory", "rollback_disk", "relaunch")
RELAUNCH_HANGS = Rule("r1", Mode.ACT, kind="hang", action="relaunch")


def on_disk() -> Ledger:
    """A ledger with a good checkpoint of step 5 on disk."""
    ledger = Ledger()
    ledger.saved(Shard("l.0", 5, 0, CheckpointTier.LOCAL, "/5", 1.0, 1, 0), 1)
    ledger.progressed("l.0", 0, 60)
    return ledger


class ResponderWorld:
    """One job, its incident and the commands that have come of it."""

    def __init__(
        self, *rules: Rule, can: tuple[str, ...] = CAN, ledger: Ledger | None = None, precision_min: float = 0.0
    ) -> None:
        self.can = can
        self.ledger = ledger or Ledger()
        self.correlator = Correlator("gpt")
        self.responder = Responder()
        self.settings = SettingsInForce()
        limits = PolicyLimits(cool_down_s=0.0, actions_per_hour=100, precision_min=precision_min)
        self.settings.policy = Policy(rules, limits)
        self.commands: list[CommandRequest] = []

    def find(self, *findings: Finding) -> Incident:
        for one in findings:
            self.correlator.begin(one.attempt)
            for reported in self.correlator.evaluate([one], TOPOLOGY):
                situation = self.situation(one.attempt, one.detected_time_s)
                self.commands += self.responder.respond(reported.incident, situation, self.settings, self.ledger)
        (incident,) = self.correlator.open
        return incident

    def wait(self, at_s: float) -> None:
        for incident in self.correlator.open:
            situation = self.situation(incident.attempt, at_s)
            self.commands += self.responder.reconsider(incident, situation, self.settings, self.ledger)

    def situation(self, attempt: str, now_s: float) -> JobSituation:
        return JobSituation(attempt, 8, 100, 1.0, self.can, now_s)

    @property
    def actions(self) -> list[tuple[str, str]]:
        return [(command.action, command.attempt) for command in self.commands]


def hang(attempt: str = "l.0", at_s: float = 1_010.0) -> Finding:
    times = {"onset_time_s": at_s, "detected_time_s": at_s}
    return finding(Kind.HANG, ranks=(5,), attempt=attempt, severity=Severity.CRITICAL, confidence=0.95, **times)


def test_a_hang_that_a_slow_rank_has_brought_is_dealt_with_as_a_hang():
    world = ResponderWorld(RELAUNCH_HANGS, ledger=on_disk())
    slow = finding(Kind.STRAGGLER, scope="rank:5", confidence=0.5)
    assert world.find(slow).kind is Kind.STRAGGLER
    assert world.commands == []
    incident = world.find(hang())
    assert incident.kind is Kind.STRAGGLER
    assert world.actions == [("relaunch", "l.0"), ("stacks", "l.0")]
    assert incident.suggestion["action"] == "relaunch"


def test_a_job_that_hangs_again_after_a_relaunch_is_relaunched_again_until_that_is_a_loop():
    world = ResponderWorld(RELAUNCH_HANGS, ledger=on_disk())
    incident = world.find(hang(), hang(), hang("m.0", 1_100.0), hang("m.0", 1_100.0))
    assert world.actions == [("relaunch", "l.0"), ("stacks", "l.0"), ("relaunch", "m.0"), ("stacks", "m.0")]
    assert len({command.id for command in world.commands}) == 4
    loop = finding(Kind.RESTART_LOOP, attempt="n.0", severity=Severity.CRITICAL, detected_time_s=1_200.0)
    assert world.find(loop, hang("n.0", 1_210.0)) is incident
    assert world.actions[4:] == [("stacks", "n.0")]


def test_what_the_policy_has_ordered_stays_told_while_it_cools_down():
    world = ResponderWorld(RELAUNCH_HANGS, ledger=on_disk())
    world.settings.policy = replace(world.settings.policy, limits=PolicyLimits())
    incident = world.find(hang())
    ordered = incident.suggestion["policy"]["ordered"]
    assert (ordered["action"], ordered["checkpoint"], ordered["reason"]) == ("relaunch", "local:l.0:5", "rule r1")
    world.find(replace(hang(), change=Change.UPDATE, summary="It hangs on."))
    policy = incident.suggestion["policy"]
    assert (policy["mode"], policy["ordered"]) == ("suggest", ordered)
    assert what_now(incident.version(), 8).automatic.startswith(
        "relaunch from the checkpoint of step 5, ordered by the policy at "
    )


def test_a_rollback_that_a_rule_wants_by_relaunch_is_reported_as_it_will_be():
    rule = Rule("r1", Mode.ACT, kind="nonfinite", action="rollback", rollback_mode="relaunch")
    world = ResponderWorld(rule, ledger=saved_everywhere())
    nan = finding(Kind.NONFINITE, onset_step=80, severity=Severity.CRITICAL, confidence=1.0)
    suggested = world.find(nan).suggestion
    assert (suggested["mode"], suggested["checkpoint"]) == ("relaunch", "local:l.0:51")
    assert world.commands[0].params["checkpoint"] == "local:l.0:51"
    assert suggested["cost_gpu_hours"] == (RELAUNCH_S + 50.0) * 8 / 3_600


def test_a_checkpoint_from_before_anything_was_wrong_is_wanted():
    world = ResponderWorld()
    jump = finding(Kind.LOSS_DIVERGENCE, onset_step=90, severity=Severity.WARNING)
    bad = finding(Kind.NONFINITE, onset_step=120, severity=Severity.CRITICAL)
    looked = facts(world.find(jump, bad), 8)
    assert (looked.kind, looked.onset_step) == ("nonfinite", 90)


def test_what_was_saved_after_a_consequence_that_spoils_weights_is_doubted():
    world, history = ResponderWorld(), JobHistory()
    for step in (103, 110):
        history.ledger.saved(Shard("l.0", step, 0, CheckpointTier.LOCAL, "x", 1.0, 10, 0), 1)
    slow = finding(Kind.STRAGGLER, scope="rank:3", onset_step=100)
    fault = finding(Kind.DEVICE_FAULT, scope="rank:3", onset_step=99)
    history.mark_suspect(world.find(slow, fault))
    assert {entry.verdict for entry in history.ledger.entries} == {Verdict.UNPROVEN}
    history.mark_suspect(world.find(finding(Kind.NONFINITE, scope="rank:3", onset_step=105)))
    assert [entry.verdict for entry in history.ledger.entries] == [Verdict.UNPROVEN, Verdict.SUSPECT]


def lost(severity: Severity) -> Finding:
    return finding(Kind.RANK_LOST, ranks=(5,), severity=severity, confidence=0.95)


def test_a_job_that_its_launcher_starts_again_is_waited_for_and_one_that_nothing_restarts_is_not():
    restarted = ResponderWorld().find(lost(Severity.CRITICAL)).suggestion
    assert (restarted["action"], restarted["reason"]) == ("wait", "the launcher starts the job again by itself")
    assert ResponderWorld(can=()).find(lost(Severity.CRITICAL)).suggestion["action"] == "investigate"


def test_a_job_that_was_asked_to_end_costs_nothing():
    assert ResponderWorld().find(lost(Severity.INFO)).impact_gpu_hours_per_hour == 0.0
    assert ResponderWorld().find(lost(Severity.CRITICAL)).impact_gpu_hours_per_hour == 8.0


def test_what_may_have_spoilt_the_weights_costs_nothing_before_that_is_certain():
    assert ResponderWorld().find(finding(Kind.CORRUPTION, severity=Severity.WARNING)).impact_gpu_hours_per_hour == 0.0
    assert ResponderWorld().find(finding(Kind.CORRUPTION, severity=Severity.CRITICAL)).impact_gpu_hours_per_hour == 8.0


def test_an_action_that_waits_for_precision_is_refused_once_and_done_when_the_precision_is_there():
    world = ResponderWorld(RELAUNCH_HANGS, ledger=on_disk(), precision_min=0.6)
    incident = world.find(hang())
    refused = world.commands[0]
    reason = "the precision of hang is not known: 0 of 5 incidents are judged"
    assert (refused.action, refused.refused_because) == ("relaunch", reason)
    assert incident.suggestion["policy"]["reason"] == reason
    assert world.responder.history == []
    world.settings.precision = {"hang": Precision(2, 3)}
    world.wait(1_020.0)
    world.find(hang())
    assert world.actions == [("relaunch", "l.0"), ("stacks", "l.0")]
    world.settings.precision = {"hang": Precision(3, 2)}
    for at_s in (1_030.0, 1_040.0):
        world.wait(at_s)
    done = world.commands[2]
    assert world.actions == [("relaunch", "l.0"), ("stacks", "l.0"), ("relaunch", "l.0")]
    assert (done.refused_because, done.id == refused.id) == ("", False)


def test_an_action_is_not_refused_for_its_precision_where_it_would_not_have_been_taken_anyway():
    world = ResponderWorld(RELAUNCH_HANGS, precision_min=0.6)
    assert "from scratch" in world.find(hang()).suggestion["policy"]["reason"]
    assert world.actions == [("stacks", "l.0")]


def test_a_hang_that_has_ended_by_itself_suggests_nothing_until_it_is_back() -> None:
    world = ResponderWorld(ledger=on_disk())
    hang = finding(Kind.HANG, severity=Severity.CRITICAL)
    incident = world.find(hang)
    assert incident.suggestion["action"] == "relaunch"
    world.find(replace(hang, change=Change.CLOSE, detected_time_s=1_090.0))
    assert (incident.suggestion["action"], incident.suggestion["alternatives"]) == ("wait", [])
    assert "ended by itself" in incident.suggestion["reason"]
    assert incident.impact_gpu_hours_per_hour == 0.0
    reported = incident.version()
    assert what_now(reported).steps[0].startswith("Nothing: it has ended by itself.")
    world.find(replace(hang, onset_time_s=1_100.0, detected_time_s=1_105.0))
    assert incident.suggestion["action"] == "relaunch"
    assert len(what_now(incident.version()).steps) > 1


def test_a_resolved_incident_suggests_nothing() -> None:
    world = ResponderWorld(ledger=on_disk())
    incident = world.find(finding(Kind.HANG, severity=Severity.CRITICAL))
    world.correlator.finish(100, 1_100.0)
    assert (incident.suggestion, incident.checkpoint) == ({}, None)


def saved_everywhere() -> Ledger:
    """A ledger with good checkpoints of step 51 on disk and step 60 in memory."""
    ledger = Ledger()
    ledger.saved(Shard("l.0", 51, 0, CheckpointTier.LOCAL, "/51", 1.0, 1, 0), 1)
    ledger.saved(Shard("l.0", 60, 0, CheckpointTier.MEMORY, "", 0.0, 1, 0), 1)
    ledger.progressed("l.0", 0, 90)
    return ledger


def test_a_relaunch_goes_on_from_the_newest_good_checkpoint_that_outlives_the_processes() -> None:
    world = ResponderWorld(can=("rollback_memory", "relaunch"), ledger=saved_everywhere())
    # A device that was bad long before any checkpoint was saved does not make the later ones unusable.
    incident = world.find(finding(Kind.DEVICE_FAULT, scope="rank:1", severity=Severity.CRITICAL, onset_step=10))
    assert (incident.suggestion["action"], incident.suggestion["checkpoint"]) == ("relaunch", "local:l.0:51")
    assert incident.checkpoint == "local:l.0:51"
    lost_s = (100 - 51) * 1.0 + 1.0
    assert incident.suggestion["cost_gpu_hours"] == (RELAUNCH_S + lost_s) * 8 / 3_600


def test_captures_in_memory_that_newer_ones_replace_are_no_evidence_where_no_rollback_is_suggested() -> None:
    world = ResponderWorld(can=("rollback_memory", "relaunch"), ledger=saved_everywhere())
    incident = world.find(finding(Kind.NETWORK_DEGRADED, scope="host:node-0", onset_step=None))
    assert (incident.suggestion["action"], incident.checkpoint) == ("wait", "local:l.0:51")
    replaced = world.ledger.lost("memory:l.0:60", "rank 0: newer captures replaced it")
    assert replaced
    assert advice_gone([incident], replaced) == []


def answered(fields: dict[str, Any], rank: int | None = 3) -> TraceAnswer | None:
    return trace_answer("j", Occurrence("trace", "l.0", "node-1", 7.0, rank, 41, fields), 7)


def test_a_whole_summary_is_taken_as_it_is():
    assert answered(trace_fields()) == TraceAnswer("j", "cmd_1", 3, "", SUMMARY, 7)


def test_what_a_newer_agent_adds_is_left_out():
    assert answered(trace_fields(novelty=[1])).summary == SUMMARY


def test_an_error_comes_with_or_without_a_summary():
    assert answered({"request": "cmd_1", "error": "no"}) == TraceAnswer("j", "cmd_1", 3, "no", {}, 7)
    assert answered(trace_fields(error="no kernel")) == TraceAnswer("j", "cmd_1", 3, "no kernel", SUMMARY, 7)
    assert len(answered({"request": "cmd_1", "error": "x" * 9_999}).error) == ERROR_CHARACTERS_MAX
    assert answered({"request": "cmd_1"}).error == "its answer is empty"


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": "41"},
        {"idle_ratio": float("nan")},
        {"idle_ratio": 1.5},
        {"wall_s": float("inf")},
        {"step_times_s": [0.1] * 11},
        {"kinds": {f"kind {number}": 0.1 for number in range(17)}},
        {"top": [{"name": "x" * 121, "kind": "other", "count": 1, "time_s": 0.1}]},
        {"collectives": SUMMARY["collectives"] * 33},
        {"streams": [{"device": 0}]},
        {"spans": 2**60},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_malformed_or_too_large_summary_is_an_error(changes):
    reported = answered(trace_fields(**changes))
    assert reported.summary == {}
    assert reported.error.startswith("its summary cannot be read: ")


@pytest.mark.parametrize("fields", [{}, {"request": 7}])
def test_an_answer_that_does_not_say_to_what_has_no_effect(fields):
    assert answered(fields) is None
    assert answered(trace_fields(), rank=None) is None


def test_an_answer_is_an_effect_and_a_change_before_later_incidents():
    world = World()
    world.train(*range(60, 100))
    world.send(events=(wire.Event("trace", 1, 3, 98, trace_fields()),))
    world.send(events=(wire.Event("trace", 1, 2, None, {"request": "cmd_1", "error": "no"}),))
    assert [(answer.rank, answer.error) for answer in world.effects.traces] == [(3, ""), (2, "no")]
    world.now_s += 5
    world.find("hang", ranks=[3], onset_step=100)
    (opened,) = world.effects.transitions
    assert [change["what"] for change in opened.incident.changes_before] == ["attempt l.0 began", "rank 3 was traced"]
