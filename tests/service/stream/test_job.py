"""One job from its records to what people get: incidents, notifications, commands, the ledger."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from rankwatch import wire
from rankwatch_detectors.base import Change, Finding, Kind, Observation, Occurrence, Severity
from rankwatch_service.control.policy import Limits, Mode, Policy, Rule
from rankwatch_service.control.records import Judgement, OrderPhase
from rankwatch_service.stream.bank import FAILURES_MAX, Bank
from rankwatch_service.stream.decode import check
from rankwatch_service.stream.desk import Desk
from rankwatch_service.stream.effects import Effects
from rankwatch_service.stream.job import REST_AFTER_S, JobStream
from rankwatch_service.stream.packing import pack, unpack
from tests.support.batches import batch, progress, ranks, table
from tests.support.findings import finding


class Scripted:
    """Finds what a note event tells it to find."""

    name = "scripted"
    version = 1

    def __init__(self) -> None:
        self.notes = 0

    def observe(self, observation: Observation) -> Sequence[Finding]:
        if not isinstance(observation, Occurrence) or observation.kind != "note":
            return []
        self.notes += 1
        if observation.fields.get("fail"):
            raise Panic("out of sigmas")
        said = observation.fields
        return [
            finding(
                Kind(said["kind"]),
                Change(said.get("change", "open")),
                said.get("scope", "job"),
                attempt=observation.attempt,
                ranks=tuple(said.get("ranks", ())),
                onset_step=said.get("onset_step", 100),
                onset_time_s=observation.time_s,
                detected_time_s=observation.time_s,
                severity=Severity(said.get("severity", "critical")),
            )
        ]

    def inherit(self, before: Any) -> None: ...

    def snapshot(self) -> dict[str, Any]:
        return {"notes": self.notes}

    def restore(self, state) -> None:
        self.notes = state["notes"]


class Panic(BaseException):
    pass


class World:
    """A job of two hosts with two ranks each, told of by hand."""

    def __init__(
        self, *rules: Rule, can=("pause", "checkpoint", "rollback", "relaunch"), detector=Scripted, **limits
    ) -> None:
        self.seq = itertools.count()
        self.effects = Effects()
        desk = Desk()
        desk.policy = Policy(rules, Limits(**limits))
        desk.receivers = ({"name": "oncall", "kinds": (), "severities": (), "jobs": (), "enabled": True},)
        self.job = JobStream("gpt", lambda: [detector()], lambda job, incident: {"incident": incident}, desk)
        self.now_s = 1_000.0
        infos = tuple(
            wire.RankInfo(rank, 4, rank % 2, f"node-{rank // 2}", f"GPU-{rank}", can=can) for rank in range(4)
        )
        self.send(ranks=infos)

    def send(self, attempt="l.0", **fields) -> None:
        self.job.telemetry(check(batch(next(self.seq), attempt=attempt, **fields)), self.now_s, self.effects)

    def train(self, *steps: int, attempt="l.0") -> None:
        for step in steps:
            self.send(attempt, steps=table([step] * 4, [0, 1, 2, 3], loss=[2.0] * 4, step_time_s=[0.5] * 4))

    def find(self, kind: str, attempt="l.0", **fields) -> None:
        event = wire.Event("note", 1, None, 1, {"kind": kind} | fields)
        self.send(attempt, events=(event,))

    def save(self, step: int, attempt="l.0", tier="memory", **fields) -> None:
        told = {"tier": tier, "location": "x", "seconds": 1.0, "bytes": 10, "shards": 1} | fields
        self.send(attempt, events=(wire.Event("checkpoint_saved", 1, 0, step, told),))

    def tick(self, seconds: float = 1.0) -> None:
        self.now_s += seconds
        self.job.tick(self.now_s, 0.0, self.effects)

    def told(self) -> list[str]:
        return [str(transition.what) for transition in self.effects.transitions]

    def verdicts(self) -> dict[str, str]:
        return {entry.id: str(entry.verdict) for _, entry in self.effects.checkpoints}


def test_an_incident_is_told_with_everything_a_person_needs():
    world = World()
    world.train(*range(60, 100))
    world.save(99, tier="local")
    world.now_s += 5
    world.find("hang", ranks=[3], onset_step=100)
    (transition,) = world.effects.transitions
    row = transition.incident
    assert (row["kind"], row["ranks"], row["hosts"], row["devices"]) == ("hang", [3], ["node-1"], ["GPU-3"])
    assert row["impact_gpu_hours_per_hour"] == 4.0
    assert row["suggestion"]["action"] == "relaunch"
    assert [change["what"] for change in row["changes_before"]] == [
        "attempt l.0 began",
        "checkpoint local:l.0:99 saved",
    ]
    assert row["transitions"] == transition.number == 1
    (notification,) = world.effects.outbox
    assert (notification["receiver"], notification["state"]) == ("oncall", "waiting")
    assert b'"incident.opened"' in notification["body"]
    assert [record["host"] for record in world.effects.host_records] == ["node-1"]


def test_the_stacks_of_a_hang_are_asked_for_and_become_its_evidence():
    world = World()
    world.find("hang", ranks=[3])
    (command,) = world.effects.commands
    assert (command["action"], command["params"], command["attempt"]) == ("stacks", {"ranks": [3]}, "l.0")
    dump = {"order": command["id"], "stack": "File train.py, line 7", "os_state": "R"}
    world.send(events=(wire.Event("stack_dump", 1, 3, 100, dump),))
    assert world.told() == ["opened", "evidence"]
    evidence = world.effects.transitions[-1].incident["evidence"]
    assert evidence["stacks"] == {"3": {"stack": "File train.py, line 7", "os_state": "R"}}
    world.send(events=(wire.Event("stack_dump", 1, 3, 100, dump),))
    assert world.told() == ["opened", "evidence"]


def test_where_nobody_is_named_some_stacks_are_asked_for():
    world = World()
    world.find("hang")
    assert world.effects.commands[0]["params"] == {"ranks": [0, 1, 2, 3]}


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
    assert command["action"] == "rollback"
    assert command["params"] == {"checkpoint": "memory:l.0:79"}
    assert command["requested_by"] == "policy"
    assert world.verdicts() == {"memory:l.0:79": "good", "memory:l.0:99": "suspect"}
    assert world.effects.transitions[0].incident["checkpoint"] == "memory:l.0:79"


def test_policy_acts_later_when_what_kept_it_has_passed():
    world = World(Rule("r1", Mode.ACT, action="pause"), cool_down_s=10.0)
    world.find("straggler", scope="rank:0")
    world.find("loss_divergence")
    assert [command["action"] for command in world.effects.commands] == ["pause"]
    for _ in range(12):
        world.tick()
    assert [command["incident_id"] for command in world.effects.commands] == [
        transition.incident["id"] for transition in world.effects.transitions
    ]


def test_nothing_is_done_to_an_attempt_that_the_trouble_was_not_in():
    world = World(Rule("r1", Mode.ACT, action="relaunch"))
    world.send("m.0", ranks=ranks(4))
    world.find("rank_lost", attempt="l.0", scope="rank:1")
    world.tick()
    assert world.told() == ["opened"]
    assert world.effects.commands == []


def test_a_person_who_has_taken_over_is_left_alone():
    world = World(Rule("r1", Mode.ACT, action="pause"), cool_down_s=10.0)
    world.find("straggler", scope="rank:0")
    world.find("loss_divergence")
    second = world.effects.transitions[1].incident["id"]
    world.job.control(Judgement(second, "acknowledged", "ann"), world.now_s, world.effects)
    for _ in range(12):
        world.tick()
    assert len(world.effects.commands) == 1


def test_what_people_say_becomes_transitions():
    world = World()
    world.find("loss_spike")
    incident = world.effects.transitions[0].incident["id"]
    for what in ("acknowledged", "acknowledged", "commented", "resolved", "resolved", "commented"):
        world.job.control(Judgement(incident, what, "ann", "well"), world.now_s, world.effects)
    assert world.told() == ["opened", "acknowledged", "commented", "resolved", "commented"]
    assert [t.number for t in world.effects.transitions] == [1, 2, 3, 4, 5]
    assert world.effects.transitions[1].incident["acknowledged_by"] == "ann"
    assert world.effects.transitions[-1].incident["state"] == "resolved"
    types = [body for body in (b"opened", b"resolved") if any(body in row["body"] for row in world.effects.outbox)]
    assert (len(types), len(world.effects.outbox)) == (2, 2)


def test_detectors_hear_that_a_person_accepts_what_still_stands():
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
    incident = world.effects.transitions[0].incident["id"]
    world.job.control(Judgement(incident, "resolved", "ann", ""), world.now_s, world.effects)
    assert heard == [("l.0", ["loss_divergence"])]


@pytest.mark.parametrize(("severity", "verdict"), [("info", "good"), ("warning", "suspect")])
def test_a_loss_that_climbs_a_little_leaves_checkpoints_good(severity, verdict):
    world = World()
    world.save(0)
    world.train(*range(60))
    world.save(60)
    world.find("loss_divergence", severity=severity, onset_step=50)
    world.train(*range(60, 130))
    assert world.verdicts()["memory:l.0:60"] == verdict


def test_what_a_job_declares_is_listed_beside_what_opens_soon_after():
    world = World()
    world.train(0, 1)
    world.send(events=(wire.Event("declared", 1, 0, 1, {"what": "curriculum", "detail": ""}),))
    world.find("slowdown")
    assert "declared: curriculum" in json.dumps(world.effects.transitions[0].incident)


def test_the_first_that_a_receiver_hears_of_an_incident_is_that_it_opened():
    world = World()
    severe = world.job.desk.receivers[0] | {"name": "severe", "severities": ("warning", "critical")}
    world.job.desk.receivers = (*world.job.desk.receivers, severe)
    world.find("slowdown", severity="info")
    world.find("slowdown", change="update", severity="warning")
    world.find("slowdown", change="close")
    told = [(row["receiver"], json.loads(row["body"])["type"]) for row in world.effects.outbox]
    assert told == [
        ("oncall", "incident.opened"),
        ("oncall", "incident.updated"),
        ("severe", "incident.opened"),
        ("oncall", "incident.resolved"),
        ("severe", "incident.resolved"),
    ]


def test_who_hears_of_no_incident_hears_of_no_end():
    world = World()
    world.job.desk.receivers = (world.job.desk.receivers[0] | {"severities": ("critical",)},)
    world.find("slowdown", severity="warning")
    world.find("slowdown", change="close")
    assert world.effects.outbox == []


def test_a_judgement_about_an_unknown_incident_changes_nothing():
    world = World()
    world.job.control(Judgement("inc_0", "resolved", "ann"), world.now_s, world.effects)
    assert world.effects.transitions == []


def test_a_rollback_ends_in_a_resolved_incident_and_what_lay_ahead_is_gone():
    world = World()
    world.train(*range(70, 100))
    world.save(80)
    world.train(100)
    world.save(100)
    world.find("corruption", scope="rank:1", onset_step=95)
    world.send("l.1", ranks=ranks(4))
    world.train(81, 82, 83, attempt="l.1")
    assert world.told() == ["opened", "resolved"]
    assert world.effects.transitions[1].text == "training goes on in attempt l.1"
    assert world.effects.transitions[1].incident["resolved_step"] == 83
    assert world.verdicts()["memory:l.0:100"] == "gone"


def test_the_memory_of_ended_processes_is_gone():
    world = World()
    world.train(*range(30))
    world.save(5)
    world.save(6, tier="local")
    world.train(*range(30, 60))
    world.send("m.0", ranks=ranks(4))
    world.train(7, attempt="m.0")
    assert world.verdicts() == {"memory:l.0:5": "gone", "local:l.0:6": "good"}


@pytest.mark.parametrize(
    "fields", [{"tier": "moon"}, {"seconds": "long"}, {"seconds": float("nan")}, {"bytes": []}, {"shards": {}}]
)
def test_a_checkpoint_event_that_makes_no_sense_is_counted(fields):
    world = World()
    world.save(5, **fields)
    assert world.effects.checkpoints == []
    assert world.job.books.counts["checkpoint_saved"] == 1


def test_a_detector_that_fails_is_begun_anew_and_switched_off_in_the_end():
    world = World()
    for _ in range(FAILURES_MAX + 3):
        world.send(events=(wire.Event("note", 1, None, 1, {"fail": True}),))
    failures = [failure for _, failure in world.effects.failures]
    assert [failure.failures for failure in failures] == list(range(1, FAILURES_MAX + 1))
    assert [failure.off for failure in failures] == [False] * (FAILURES_MAX - 1) + [True]
    assert failures[0].error == "Panic: out of sigmas"
    world.train(1)
    assert len(world.effects.frames) == 1


def test_control_c_is_not_a_detectors_failure():
    class Interrupted(Scripted):
        def observe(self, observation):
            raise KeyboardInterrupt

    bank = Bank(lambda: [Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        bank.observe(Occurrence("note", "l.0", "h", 0.0, None, None, {}))


def test_detectors_of_another_version_begin_cold():
    class Newer(Scripted):
        version = 2

    world = World()
    world.find("loss_spike")
    state = unpack(pack(world.job.state()))
    same = JobStream("gpt", lambda: [Scripted()], lambda job, incident: {}, Desk())
    same.restore(state)
    assert same.cold == []
    newer = JobStream("gpt", lambda: [Newer()], lambda job, incident: {}, Desk())
    newer.restore(state)
    assert newer.cold == ["scripted"]
    assert len(newer.correlator.open) == 1


def test_the_job_row_shows_where_training_stands():
    world = World()
    world.train(7)
    world.send(progress=tuple(progress(rank, 8) for rank in range(4)))
    world.tick()
    row = world.effects.jobs["gpt"]
    assert (row["state"], row["attempt"], row["world_size"], row["step"]) == ("running", "l.0", 4, 7)
    assert (row["ranks_reporting"], row["loss"], row["step_time_s"]) == (4, 2.0, 0.5)
    attempt = world.effects.attempts["gpt", "l.0"]
    assert (attempt["number"], attempt["first_step"], attempt["last_step"]) == (1, 7, 7)
    assert attempt["topology"]["ranks"][3]["host"] == "node-1"
    assert attempt["topology"]["can"] == ["checkpoint", "pause", "relaunch", "rollback"]


def test_a_row_that_did_not_change_is_not_written_again():
    world = World()
    world.tick()
    world.effects = Effects()
    world.tick()
    assert world.effects.jobs == {}


def test_a_paused_job_is_shown_as_paused_until_it_goes_on():
    world = World()
    states = []
    for phase in ("hold", "do", "go"):
        order = OrderPhase("o1", "c1", "gpt", "l.0", "pause", phase, 9)
        world.job.control(order, world.now_s, world.effects)
        world.tick()
        states.append(world.effects.jobs["gpt"]["state"])
    assert states == ["running", "paused", "running"]


def shown(world):
    return world.effects.jobs["gpt"]["state"]


def stand_still(world, seconds, phase="forward"):
    """Ranks report, and finish no step."""
    for _ in range(seconds):
        world.send(progress=tuple(progress(rank, 8, phase=phase) for rank in range(4)))
        world.tick()


def test_a_job_that_hangs_is_stalled_and_says_when_it_last_moved():
    world = World()
    world.train(7)
    moved_s = world.now_s
    stand_still(world, 6)
    world.find("hang", ranks=[3])
    world.tick()
    row = world.effects.jobs["gpt"]
    assert (row["state"], row["last_progress_unix_ns"]) == ("stalled", int(moved_s * 1e9))
    world.send("m.0", ranks=ranks(4))
    world.tick()
    assert shown(world) == "running"


def test_a_hang_that_ended_leaves_a_running_job():
    world = World()
    world.train(7)
    world.find("hang", ranks=[3])
    world.tick()
    assert shown(world) == "stalled"
    world.find("hang", change="close")
    world.train(8)
    world.tick()
    assert shown(world) == "running"


def test_a_job_that_finishes_no_step_for_a_minute_is_stalled_whatever_is_open():
    world = World()
    world.train(7)
    stand_still(world, 59)
    assert shown(world) == "running"
    stand_still(world, 3)
    assert shown(world) == "stalled"


def test_a_job_that_evaluates_or_was_paused_for_long_is_not_stalled():
    world = World()
    world.train(7)
    stand_still(world, 90, phase="eval")
    assert shown(world) == "running"
    for phase in ("do", "go"):
        world.job.control(OrderPhase("o1", "c1", "gpt", "l.0", "pause", phase, 9), world.now_s, world.effects)
        stand_still(world, 2)
    assert shown(world) == "running"


def test_a_loss_that_is_not_a_number_is_shown_as_such():
    world = World()
    world.send(steps=table([7] * 4, [0, 1, 2, 3], loss=[float("nan")] * 4))
    world.tick()
    assert world.effects.jobs["gpt"]["loss"] == "NaN"
    assert world.effects.feed[-1]["data"]["loss"] == "NaN"


def test_a_job_whose_ranks_left_has_ended_and_so_have_its_incidents():
    world = World()
    world.find("loss_divergence")
    world.send(events=tuple(wire.Event("rank_left", 1, rank, 9, {"reason": "end"}) for rank in range(4)))
    world.tick()
    assert world.effects.jobs["gpt"]["state"] == "ended"
    assert world.effects.attempts["gpt", "l.0"]["ended_unix_ns"] is not None
    assert world.told() == ["opened", "resolved"]


def test_a_silent_job_is_lost_then_rests_and_wakes_up():
    world = World()
    world.find("loss_divergence")
    world.tick(60)
    assert world.effects.jobs["gpt"]["state"] == "lost"
    world.tick(REST_AFTER_S)
    assert world.job.resting
    world.send("m.0", ranks=ranks(4))
    assert not world.job.resting
    world.train(1, 2, 3, attempt="m.0")
    assert world.told() == ["opened", "resolved"]


def test_a_capture_that_a_rank_has_lost_is_gone_in_the_ledger_and_the_one_before_it_is_the_target():
    world = World()
    world.save(0)
    world.save(20)
    world.train(*range(60))
    assert world.verdicts() == {"memory:l.0:0": "good", "memory:l.0:20": "good"}
    fields = {"checkpoint": "memory:l.0:20", "reason": "newer captures took its place"}
    world.send(events=(wire.Event("checkpoint_gone", 1, 3, 60, fields),))
    assert world.verdicts() == {"memory:l.0:0": "good", "memory:l.0:20": "gone"}
    assert world.job.books.ledger.newest_good().id == "memory:l.0:0"


@pytest.mark.parametrize("fields", [{}, {"checkpoint": 7}, {"checkpoint": "memory:l.0:0", "reason": []}])
def test_a_loss_that_makes_no_sense_is_counted(fields):
    world = World()
    world.save(0)
    world.send(events=(wire.Event("checkpoint_gone", 1, 3, 60, fields),))
    assert world.verdicts()["memory:l.0:0"] != "gone"
    assert world.job.books.counts["checkpoint_gone"] == 1


def test_when_a_process_has_ended_what_was_in_memory_is_gone_before_anything_starts_again():
    world = World()
    world.save(0)
    world.save(1, tier="local")
    world.train(*range(40))
    exited = {"code": 1, "signal": None, "how": "pidfd", "left": False, "exit_order": 0}
    world.send(events=(wire.Event("process_exit", 1, 3, 40, exited),))
    assert world.verdicts() == {"memory:l.0:0": "gone", "local:l.0:1": "good"}
