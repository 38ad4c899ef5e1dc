"""One job from its records to what people get: incidents, notifications, commands, the ledger."""

import json
from collections.abc import Sequence

import pytest

from rankwatch import wire
from rankwatch_detectors.base import SERVICE_KINDS, AttemptStart, Finding, Kind, Observation, Occurrence
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.explanation import ExplainedDetector
from rankwatch_detectors.refusals import RefusalConfig, RefusalDetector
from rankwatch_detectors.scope import WHOLE_JOB
from rankwatch_service.incidents import hang
from rankwatch_service.incidents.correlator import WHY
from rankwatch_service.incidents.hang import StacksReceived
from rankwatch_service.job.detection import DETECTOR_OFF, FAILURES_MAX, DetectionPipeline, DetectorBank
from rankwatch_service.job.job import JobStream
from rankwatch_service.policy.control_records import IncidentReview, TelemetryRefused, decode_control, encode_control
from rankwatch_service.policy.policy import Mode, Rule
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.store.rows import incident_row
from rankwatch_service.stream.saved import pack, unpack
from tests.support.detection.scripted_job import Scripted, World
from tests.support.values.batches import ranks
from tests.support.values.incidents import finding, topology_state
from tests.support.values.presences import ATTEMPT, frame, topology


def test_an_incident_opens_with_everything_a_person_needs(world):
    world.train(*range(60, 100))
    world.save(99, tier="local")
    world.now_s += 5
    world.find("hang", ranks=[3], onset_step=100)
    (transition,) = world.effects.transitions
    incident = transition.incident
    assert (incident.kind, incident.ranks, incident.hosts, incident.devices) == ("hang", (3,), ("node-1",), ("GPU-3",))
    assert incident.impact_gpu_hours_per_hour == 4.0
    assert incident.suggestion["action"] == "relaunch"
    assert [change["what"] for change in incident.changes_before] == [
        "attempt l.0 began",
        "checkpoint local:l.0:99 saved",
    ]
    assert incident.transitions == transition.number == 1
    (announcement,) = world.effects.announcements
    assert (announcement.type, announcement.incident_id) == ("incident.opened", incident.id)
    assert (announcement.kinds, announcement.places) == (("hang",), (3,))
    assert world.effects.host_incidents == []


def test_a_fault_of_a_device_goes_on_the_record_of_its_host_and_a_hang_that_it_causes_only_with_it(world):
    world.train(*range(60, 100))
    world.find("hang", ranks=[3], onset_step=100)
    assert world.effects.host_incidents == []
    world.find("device_fault", scope="rank:3", ranks=[3], onset_step=99)
    reported = {(entry.host, entry.device_uuid, entry.kind) for entry in world.effects.host_incidents}
    assert reported == {("node-1", "GPU-3", "device_fault")}


@pytest.mark.parametrize(
    ("refusal", "opened"),
    [
        (
            TelemetryRefused("forged", {"what": "view", "agent": "agt_1", "host": "node-9", "count": 2}),
            "forged_telemetry",
        ),
        (TelemetryRefused("limit", {"what": "new jobs within a minute", "limit": 60, "figure": 61}), "limit_reached"),
    ],
)
def test_a_refusal_of_the_api_opens_an_incident_that_ends_a_quiet_time_later(refusal, opened):
    world = World(detector=lambda: RefusalDetector(Kind(opened), RefusalConfig()))
    world.job.control(decode_control(encode_control(refusal)), world.now_s, world.effects)
    (transition,) = world.effects.transitions
    assert (transition.incident.kind, transition.incident.scope) == (opened, WHOLE_JOB)
    assert transition.incident.evidence["what"] == refusal.fields["what"]
    world.tick(RefusalConfig().quiet_s)
    assert world.reported() == ["opened", "resolved"]


@pytest.mark.parametrize("kind", sorted(SERVICE_KINDS))
def test_an_agent_cannot_report_what_the_service_alone_reports(kind):
    world = World(detector=lambda: RefusalDetector(Kind.FORGED_TELEMETRY, RefusalConfig()))
    world.send(events=(wire.Event(kind, 1, None, 1, {"what": "rank", "action": "pause", "phase": "do"}),))
    world.tick()
    assert world.reported() == []
    assert world.effects.jobs["gpt"].dropped == {"reserved_events": 1}


def test_policy_acts_once_with_a_checkpoint_from_before_the_onset():
    world = World(Rule("r1", Mode.ACT, kind="nonfinite", action="rollback"))
    world.train(*range(60, 80))
    world.save(79)
    world.train(*range(80, 100))
    world.save(99)
    world.train(100)
    world.find("nonfinite", scope="rank:2", onset_step=98)
    world.tick()
    world.find("nonfinite", scope="rank:2", change="update")
    (command,) = world.effects.commands
    assert command.action == "rollback"
    assert command.params == {"checkpoint": "memory:l.0:79"}
    assert command.requested_by == "policy"
    assert world.verdicts() == {"memory:l.0:79": "good", "memory:l.0:99": "suspect"}
    assert world.effects.transitions[0].incident.checkpoint == "memory:l.0:79"


def good_on_disk(world: World) -> None:
    world.train(*range(60, 66))
    world.save(65, tier="local", location="/saved/65")
    world.train(*range(66, 90))


def test_a_rule_relaunches_nothing_from_scratch():
    world = World(Rule("r1", Mode.ACT, kind="hang", action="relaunch"))
    world.find("hang", ranks=[3], onset_step=100)
    assert [command.action for command in world.effects.commands] == ["stacks"]
    suggestion = world.effects.transitions[0].incident.suggestion
    reason = "the script has registered no checkpoint with rankwatch"
    assert (suggestion["action"], suggestion["reason"]) == ("relaunch", f"starts new processes from scratch: {reason}")
    assert suggestion["policy"]["reason"] == f"training would begin from scratch: {reason}"


def test_what_the_policy_may_do_by_itself_asks_nobody():
    world = World(Rule("r1", Mode.ACT, kind="hang", action="relaunch"), approval_ranks=4)
    good_on_disk(world)
    world.find("hang", ranks=[3], onset_step=100)
    assert [one.command_id for one in world.effects.announcements] == [""]


def test_policy_acts_on_the_second_incident_after_the_cool_down():
    world = World(Rule("r1", Mode.ACT, action="pause"), cool_down_s=10.0)
    world.find("straggler", scope="rank:0")
    world.find("loss_divergence")
    assert [command.action for command in world.effects.commands] == ["pause"]
    for _ in range(12):
        world.tick()
    assert [command.incident_id for command in world.effects.commands] == [
        transition.incident.id for transition in world.effects.transitions
    ]


def test_policy_acts_on_no_other_attempt_than_that_of_the_incident():
    world = World(Rule("r1", Mode.ACT, action="relaunch"))
    world.send("m.0", ranks=ranks(4))
    world.find("rank_lost", attempt="l.0", scope="rank:1")
    world.tick()
    assert world.reported() == ["opened"]
    assert world.effects.commands == []


def test_policy_does_not_act_on_an_acknowledged_incident():
    world = World(Rule("r1", Mode.ACT, action="pause"), cool_down_s=10.0)
    world.find("straggler", scope="rank:0")
    world.find("loss_divergence")
    second = world.effects.transitions[1].incident.id
    world.job.control(IncidentReview(second, "acknowledged", "ann"), world.now_s, world.effects)
    for _ in range(12):
        world.tick()
    assert len(world.effects.commands) == 1


def test_judgements_of_people_become_transitions(world):
    world.find("loss_spike")
    incident = world.effects.transitions[0].incident.id
    for what in ("acknowledged", "acknowledged", "commented", "resolved", "resolved", "commented"):
        world.job.control(IncidentReview(incident, what, "ann", "well"), world.now_s, world.effects)
    assert world.reported() == ["opened", "acknowledged", "commented", "resolved", "commented"]
    assert [t.number for t in world.effects.transitions] == [1, 2, 3, 4, 5]
    assert world.effects.transitions[1].incident.acknowledged_by == "ann"
    assert world.effects.transitions[-1].incident.state == "resolved"
    assert [one.type for one in world.effects.announcements] == ["incident.opened", "incident.resolved"]


def test_an_incident_is_taken_over_and_given_back(world):
    world.find("loss_spike")
    incident = world.effects.transitions[0].incident.id
    for actor, what in (
        ("ann", "unacknowledged"),  # of an open incident there is nothing to give back
        ("ann", "acknowledged"),
        ("bob", "acknowledged"),
        ("bob", "unacknowledged"),
        ("ann", "resolved"),
        ("ann", "acknowledged"),
    ):
        world.job.control(IncidentReview(incident, what, actor), world.now_s, world.effects)
    owners = [(t.what, t.incident.state, t.incident.acknowledged_by) for t in world.effects.transitions]
    assert owners[1:] == [
        ("acknowledged", "acknowledged", "ann"),
        ("acknowledged", "acknowledged", "bob"),
        ("unacknowledged", "open", None),
        ("resolved", "resolved", None),
    ]
    assert len(world.effects.announcements) == 2


def test_detectors_observe_that_a_person_accepted_what_is_still_open():
    heard = []

    class Listening(Scripted):
        def observe(self, observation: Observation) -> Sequence[Finding]:
            if isinstance(observation, Occurrence) and observation.kind == "accepted":
                heard.append((observation.attempt, observation.fields["kinds"]))
            return super().observe(observation)

    world = World(detector=Listening)
    world.find("loss_divergence")
    world.find("grad_norm")
    world.find("grad_norm", change="close")
    incident = world.effects.transitions[0].incident.id
    world.job.control(IncidentReview(incident, "resolved", "ann", ""), world.now_s, world.effects)
    assert heard == [("l.0", ["loss_divergence"])]


@pytest.mark.parametrize(("severity", "verdict"), [("info", "good"), ("warning", "suspect")])
def test_a_loss_that_climbs_a_little_leaves_checkpoints_good(world, severity, verdict):
    world.save(0)
    world.train(*range(60))
    world.save(60)
    world.find("loss_divergence", severity=severity, onset_step=50)
    world.train(*range(60, 130))
    assert world.verdicts()["memory:l.0:60"] == verdict


def test_what_a_job_declares_is_listed_beside_what_opens_soon_after(world):
    world.train(0, 1)
    world.send(events=(wire.Event("declared", 1, 0, 1, {"what": "curriculum", "detail": ""}),))
    world.find("slowdown")
    assert "declared: curriculum" in json.dumps(incident_row(world.effects.transitions[0].incident))


def test_a_judgement_about_an_unknown_incident_changes_nothing(world):
    world.job.control(IncidentReview("inc_0", "resolved", "ann"), world.now_s, world.effects)
    assert world.effects.transitions == []


def test_a_rollback_resolves_the_incident_and_later_checkpoints_are_gone(world):
    world.train(*range(70, 100))
    world.save(80)
    world.train(100)
    world.save(100)
    world.find("corruption", scope="rank:1", onset_step=95)
    world.send("l.1", ranks=ranks(4))
    world.train(81, 82, 83, attempt="l.1")
    assert world.reported() == ["opened", "resolved"]
    assert world.effects.transitions[1].text == "training goes on in attempt l.1"
    assert world.effects.transitions[1].incident.resolved_step == 83
    assert world.verdicts()["memory:l.0:100"] == "gone"


@pytest.mark.parametrize(
    "fields", [{"tier": "moon"}, {"seconds": "long"}, {"seconds": float("nan")}, {"bytes": []}, {"shards": {}}]
)
def test_an_invalid_checkpoint_event_is_counted(world, fields):
    world.save(5, **fields)
    assert world.effects.checkpoints == []
    assert world.job.history.counts["checkpoint_saved"] == 1


def test_a_detector_that_fails_is_replaced_and_finally_switched_off(world):
    for _ in range(FAILURES_MAX + 3):
        world.send(events=(wire.Event("note", 1, None, 1, {"fail": True}),))
    failures = [failure for _, failure in world.effects.failures]
    assert [failure.failures for failure in failures] == list(range(1, FAILURES_MAX + 1))
    assert [failure.off for failure in failures] == [False] * (FAILURES_MAX - 1) + [True]
    assert failures[0].error == "Panic: out of sigmas"
    world.train(1)
    assert len(world.effects.frames) == 1
    world.tick()
    [off] = [reason for reason in world.effects.jobs[world.job.job].dropped if reason.startswith(DETECTOR_OFF)]
    assert world.effects.jobs[world.job.job].dropped[off] == FAILURES_MAX


def test_control_c_is_not_a_detectors_failure():
    class Interrupted(Scripted):
        def observe(self, observation):
            raise KeyboardInterrupt

    bank = DetectorBank(lambda: [Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        bank.evaluate([[Occurrence("note", "l.0", "h", 0.0, None, None, {})]])


def test_detectors_of_another_version_begin_anew(world):
    class Newer(Scripted):
        version = 2

    world.find("loss_spike")
    state = unpack(pack(world.job.state()))
    same = JobStream("gpt", lambda: [Scripted()], lambda job, incident: {}, SettingsInForce())
    same.restore(state)
    assert same.detectors_without_snapshot == []
    newer = JobStream("gpt", lambda: [Newer()], lambda job, incident: {}, SettingsInForce())
    newer.restore(state)
    assert newer.detectors_without_snapshot == ["scripted"]
    assert len(newer.correlator.open) == 1


def test_a_capture_that_a_rank_has_lost_is_gone_and_the_one_before_it_is_the_newest_good_one(world):
    world.save(0)
    world.save(20)
    world.train(*range(60))
    assert world.verdicts() == {"memory:l.0:0": "good", "memory:l.0:20": "good"}
    fields = {"checkpoint": "memory:l.0:20", "reason": "newer captures replaced it"}
    world.send(events=(wire.Event("checkpoint_gone", 1, 3, 60, fields),))
    assert world.verdicts() == {"memory:l.0:0": "good", "memory:l.0:20": "gone"}
    assert world.job.history.ledger.newest_good().id == "memory:l.0:0"


@pytest.mark.parametrize("fields", [{}, {"checkpoint": 7}, {"checkpoint": "memory:l.0:0", "reason": []}])
def test_an_invalid_report_of_a_lost_capture_is_counted(world, fields):
    world.save(0)
    world.send(events=(wire.Event("checkpoint_gone", 1, 3, 60, fields),))
    assert world.verdicts()["memory:l.0:0"] != "gone"
    assert world.job.history.counts["checkpoint_gone"] == 1


def test_captures_are_gone_as_soon_as_a_process_has_ended(world):
    world.save(0)
    world.save(1, tier="local")
    world.train(*range(40))
    exited = {"code": 1, "signal": None, "how": "pidfd", "left": False, "exit_order": 0}
    world.send(events=(wire.Event("process_exit", 1, 3, 40, exited),))
    assert world.verdicts() == {"memory:l.0:0": "gone", "local:l.0:1": "good"}


def stack_dump(rank: int, order: str, place: str) -> wire.Event:
    fields = {"order": order, "place": place, "where": f"{place} (train.py:7)", "stack": f"File {place}", "reason": ""}
    return wire.Event("stack_dump", 1, rank, 100, fields)


def test_the_stacks_of_all_ranks_of_a_hang_are_requested_and_become_its_evidence_together(world):
    world.find("hang", ranks=[3])
    (command,) = world.effects.commands
    assert (command.action, command.params, command.attempt) == ("stacks", {"ranks": []}, "l.0")
    notified = len(world.effects.announcements)
    for rank in (3, 1, 0, 2):
        world.send(events=(stack_dump(rank, command.id, "load" if rank == 3 else "step"),))
    world.restart()
    world.tick()
    assert world.reported() == ["opened", "evidence"]
    evidence = world.effects.transitions[-1].incident.evidence
    assert world.effects.stacks == [("gpt", StacksReceived(command.id, 4, 4))]
    assert evidence["ranks_stand"] == "3 of 4 ranks stand in step (train.py:7); rank 3 in load (train.py:7)."
    assert [(one["ranks"], one["rank"], one["stack"]) for one in evidence["stacks"]] == [
        ("3", 3, "File load"),
        ("0-2", 0, "File step"),
    ]
    world.send(events=(stack_dump(1, command.id, "load"),))
    world.tick()
    assert world.reported() == ["opened", "evidence"], "each rank answers once"
    assert len(world.effects.announcements) == notified


def test_the_answers_of_many_ranks_are_reported_every_ten_seconds(world, monkeypatch):
    monkeypatch.setattr(hang, "MANY", 1)
    world.find("hang", ranks=[3])
    order = world.effects.commands[0].id
    for rank in range(2):
        world.send(events=(stack_dump(rank, order, "step"),))
    world.tick()
    world.send(events=(stack_dump(2, order, "step"),))
    for _ in range(9):
        world.tick()
    assert world.reported() == ["opened", "evidence"]
    world.tick()
    assert world.reported() == ["opened", "evidence", "evidence"]
    assert world.effects.transitions[-1].incident.evidence["ranks_stand"].startswith("All 3 ranks")


def test_stacks_stay_in_the_evidence_when_the_hang_turns_out_to_have_a_cause(world):
    world.find("hang")
    world.send(events=(stack_dump(0, world.effects.commands[0].id, "step"),))
    world.tick()
    world.find("rank_lost", scope="rank:2", ranks=[2], onset_step=90)
    incident = world.effects.transitions[-1].incident
    assert (incident.kind, incident.evidence["ranks_stand"]) == (
        "rank_lost",
        "The rank stands in step (train.py:7); no answer of 3 ranks.",
    )
    assert "stacks" not in incident.evidence["hang"]


def test_a_rank_that_hangs_at_its_own_pace_is_asked_alone(world):
    world.find("hang", scope="rank:3", ranks=[3])
    (command,) = world.effects.commands
    assert command.params == {"ranks": [3]}
    world.send(events=(stack_dump(3, command.id, "load"),))
    world.tick()
    assert world.effects.stacks == [("gpt", StacksReceived(command.id, 1, 1))]


class Speechless(ExplainedDetector):
    """Finds a spike in step 3, and cannot explain it."""

    kind = Kind.LOSS_SPIKE
    name = "speechless"
    version = 1

    def _on_frame(self, frame):
        return [finding(Kind.LOSS_SPIKE, attempt=ATTEMPT)] if frame.step == 3 else []

    def suspects(self, frame):
        raise ZeroDivisionError(frame.step)

    def _rows_of_steps(self, counts):
        return {}

    crossed = needed = detectable = suspects


class Hanging(DispatchingDetector):
    """Finds a standstill."""

    kind = Kind.HANG
    name = "hanging"
    version = 1

    def _on_frame(self, frame):
        reported = {"age_s": 12.0, "deadline_s": 8.0}
        return [finding(Kind.HANG, attempt=ATTEMPT, evidence=reported)] if frame.step == 3 else []


def run(detector):
    pipeline = DetectionPipeline("gpt", lambda: [detector])
    pipeline.observe(AttemptStart(ATTEMPT, topology(2), 0.0), topology_state())
    updates, failures = [], []
    for step in range(5):
        reported, failed = pipeline.observe(frame(step, {"loss": [2.0, 2.0]}), topology_state())
        updates += reported
        failures += failed
    return updates, failures


def test_what_cannot_be_explained_is_reported_all_the_same():
    updates, failures = run(Speechless())
    assert [str(one.what) for one in updates] == ["opened"]
    assert WHY not in updates[0].fields
    assert {one.detector for one in failures} == {"explanation"}
    assert not any(one.off for one in failures)


def test_a_standstill_is_explained_by_its_deadline():
    (update,), failures = run(Hanging())
    assert failures == []
    (reported,) = update.fields[WHY]
    assert (reported["statistic"], reported["unit"]) == ("seconds_without_progress", "s")
    assert reported["points"]["value"] == [0.0, 12.0]
    assert reported["points"]["threshold"] == [8.0, 8.0]
    assert reported["points"]["step"] == [None, None]
    assert reported["why"] == "The time without progress in seconds reached 12; its threshold is 8."
