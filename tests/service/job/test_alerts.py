"""Alerts of a Prometheus in one job: from the control record to what people get, through launches and idle times."""

import pytest

from rankwatch import wire
from rankwatch_detectors.alerts import AlertDetector
from rankwatch_service.incidents.correlator import FLAPPING_QUIET_S, QUIET_S
from rankwatch_service.job.job import IDLE_AFTER_S
from rankwatch_service.policy.control_records import (
    AlertsReceived,
    IncidentReview,
    ReportedAlert,
    decode_control,
    encode_control,
)
from rankwatch_service.policy.policy import Mode, Rule
from tests.support.detection.scripted_job import World
from tests.support.values.batches import ranks


@pytest.fixture
def world() -> World:
    return World(detector=AlertDetector)


def receive(world: World, state: str = "firing", fingerprint: str = "a", **fields) -> None:
    reported = {"severity": "critical", "summary": "Disk of node-1 is full", "starts_s": 900.0} | fields
    alert = ReportedAlert(fingerprint, "DiskFull", state, **reported)
    record = decode_control(encode_control(AlertsReceived((alert,))))
    world.job.control(record, world.now_s, world.effects)


def end(world: World, state: str = "resolved") -> None:
    """The alert ends, and does not come back."""
    receive(world, state)
    world.tick(QUIET_S)


def launch(world: World, attempt: str) -> None:
    """The next attempt, whose ranks come once those before are silent or have ended."""
    world.tick(700.0)
    world.send(attempt, ranks=ranks(4))


def test_an_alert_is_an_incident_until_it_ends(world):
    receive(world, hosts=("node-1:9100",))
    (transition,) = world.effects.transitions
    incident = transition.incident
    assert (incident.kind, str(incident.scope), incident.severity) == ("alert", "alert:DiskFull", "critical")
    assert (incident.ranks, incident.hosts) == ((2, 3), ("node-1",))
    assert incident.onset_unix_ns == 900 * 10**9
    (announcement,) = world.effects.announcements
    assert "Alert DiskFull: Disk of node-1 is full" in announcement.data["text"]
    end(world)
    assert world.reported() == ["opened", "evidence", "resolved"]
    resolved = world.effects.transitions[-1].incident
    assert resolved.resolved_unix_ns == 1_000 * 10**9, "as of its end"


def test_an_alert_that_comes_and_goes_is_one_incident_and_two_messages(world):
    for _ in range(5):
        receive(world)
        world.tick(30.0)
        receive(world, "resolved")
        world.tick(30.0)
    world.tick(FLAPPING_QUIET_S)
    assert [what for what in world.reported() if what != "evidence"] == ["opened", "resolved"]
    assert len(world.effects.announcements) == 2
    assert world.effects.transitions[-1].incident.evidence["flaps"] == 4


def test_a_further_host_widens_the_incident_and_is_reported(world):
    receive(world, hosts=("node-0",))
    receive(world, fingerprint="b", hosts=("node-1",))
    assert world.reported() == ["opened", "updated"]
    assert world.effects.transitions[-1].incident.hosts == ("node-0", "node-1")


def test_hosts_and_links_of_alerts_that_have_ended_are_no_longer_told(world):
    receive(world, hosts=("node-0",), url="https://p/graph")
    receive(world, fingerprint="b", severity="warning", hosts=("node-1",))
    receive(world, "resolved")
    incident = world.effects.transitions[-1].incident
    assert (incident.ranks, incident.hosts) == ((2, 3), ("node-1",))
    assert (incident.evidence["alerts_firing"], incident.evidence["url"]) == (1, "")


def test_the_end_of_an_attempt_does_not_end_it_and_neither_does_training(world):
    receive(world)
    for attempt in ("l.1", "m.0"):
        launch(world, attempt)
        world.train(*range(100), attempt=attempt)
    assert set(world.reported()) == {"opened", "evidence"}
    end(world)
    assert world.reported()[-1] == "resolved"


def test_it_ends_also_while_the_job_is_idle(world):
    receive(world)
    world.tick(IDLE_AFTER_S + 1)
    assert world.job.is_idle
    receive(world, "expired")
    assert world.reported() == ["opened", "evidence", "resolved"]


def test_it_ends_with_the_last_telemetry_of_a_job_where_nothing_will_show_whether_it_comes_back(world):
    receive(world)
    world.tick(IDLE_AFTER_S)
    receive(world, "resolved")
    assert world.reported() == ["opened", "evidence"]
    world.tick(1.0)
    assert world.reported() == ["opened", "evidence", "resolved"]


def test_a_person_who_resolves_it_accepts_what_fires(world):
    receive(world)
    incident = world.effects.transitions[0].incident.id
    world.job.control(IncidentReview(incident, "resolved", "ann"), world.now_s, world.effects)
    launch(world, "m.0")
    receive(world, "resolved")
    assert world.reported() == ["opened", "resolved"]
    receive(world)
    assert world.reported() == ["opened", "resolved", "opened"]


def test_a_restored_job_goes_on_with_its_alerts(world):
    receive(world)
    world.restart()
    receive(world, fingerprint="b")
    receive(world, "resolved")
    assert world.reported() == ["opened", "evidence", "evidence"]
    receive(world, "resolved", "b")
    world.tick(QUIET_S)
    assert world.reported()[-1] == "resolved"


def test_only_a_rule_for_alerts_acts_on_them():
    for kind, actions in (("", []), ("alert", ["pause"])):
        world = World(Rule("r1", Mode.ACT, kind=kind, action="pause"), detector=AlertDetector)
        receive(world)
        assert [command.action for command in world.effects.commands] == actions


def test_the_end_of_the_job_ends_it_and_a_relaunch_opens_it_anew(world):
    receive(world)
    world.send(events=tuple(wire.Event("rank_left", 1, rank, 5, {"reason": "end"}) for rank in range(4)))
    world.tick()
    assert world.reported() == ["opened", "resolved"]
    launch(world, "m.0")
    assert world.reported() == ["opened", "resolved", "opened"]
    world.train(*range(100), attempt="m.0")
    assert world.reported() == ["opened", "resolved", "opened"]
