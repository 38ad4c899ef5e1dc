"""Synthetic cascades through all detectors, the correlator and the routing: what a receiver gets by default."""

from collections.abc import Iterable

import pytest

from rankwatch import wire
from rankwatch_detectors.base import AttemptStart, Kind, Observation, Severity, Topology
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.api.routes.receivers import NewReceiver
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.model import Incident, Transition, TransitionKind, Update
from rankwatch_service.job.detection import DetectionPipeline
from rankwatch_service.job.topology_state import TopologyState
from rankwatch_service.notify.pipeline import ReceiverRoute
from rankwatch_service.policy.announcement import Announcement, incident_announcement
from rankwatch_service.simulate.faults import Hang, HostLoss, Kill, NonFinite, NormSpike, Restart, Slow
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, RankPlacement
from suite.pipeline import topology_state_of
from tests.support.values.incidents import finding, routed, topology_state
from tests.support.values.presences import Clockwork, topology

DEFAULTS = NewReceiver(name="on-call", url="https://on-call.example/")
RECEIVER = ReceiverRoute("on-call", tuple(DEFAULTS.kinds), tuple(DEFAULTS.severities), tuple(DEFAULTS.jobs))


def reported_first(updates: Iterable[Update], notified: set[str]) -> list[Announcement]:
    """What a receiver gets of these by default, besides ends; notes the incidents that it is notified of."""
    sent: list[Announcement] = []
    for news in updates:
        news.incident.transitions += 1
        now = news.incident.version()
        change = Transition(news.incident.transitions, news.what, news.actor, news.text, {}, 0.0, now)
        announcement = incident_announcement(change, {}, world_size=1_024)
        if announcement and routed(announcement, [RECEIVER], notified=[RECEIVER.name] if now.id in notified else []):
            notified.add(now.id)
            sent += [announcement] if news.what is not TransitionKind.RESOLVED else []
    return sent


def reported_of(job: Job) -> tuple[list[Incident], int]:
    """The incidents in the order in which they opened, and how many messages told more than an end."""
    pipeline, topology_state, notified = DetectionPipeline("gpt", detectors), topology_state_of(job.topology()), 0
    incidents: dict[str, Incident] = {}
    known: set[str] = set()
    for observation in generate(job):
        for news in pipeline.observe(observation, topology_state)[0]:
            incidents.setdefault(news.incident.id, news.incident)
            now = news.incident.version()
            assert now.onset_unix_ns <= now.detected_unix_ns
            assert now.onset_step is None or (now.detected_step is not None and now.onset_step <= now.detected_step)
            notified += len(reported_first([news], known))
    return list(incidents.values()), notified


CASCADES = {
    "slow, hung, lost": ([Slow(5, 60, 1.4), Hang(5, 100, 25.0), Kill(5, 100), Restart(100, 90)], "straggler rank:5", 2),
    "lost again and again": (
        [*[Kill(5, 100, None, 1, "CUDA error: ECC error"), Restart(100, 90)] * 4],
        "rank_lost rank:5",
        1,
    ),
    "hung again and again": ([Hang(5, 60 + 4 * turn, 9.0) for turn in range(9)], "hang job", 1),
    "slow host": ([Slow((4, 5, 6, 7), 80, 1.3)], "straggler host:host-1", 1),
    "norm, then NaN": ([NormSpike(98, 50.0, 3), NonFinite(5, 100)], "nonfinite rank:5", 1),
    "lost host": ([HostLoss("host-1", 100, 30.0), Kill(0, 100), Restart(100, 95)], "hang host:host-1", 1),
    "two faults at once": ([Slow(1, 80, 1.3), NonFinite(6, 84)], "nonfinite rank:6, straggler rank:1", 2),
}
"""By name: the faults, the incidents they become, and how often a receiver is notified."""


@pytest.mark.parametrize("name", CASCADES)
def test_a_cascade_is_one_incident_and_told_once_and_when_it_becomes_critical(name):
    faults, expected, notified = CASCADES[name]
    incidents, messages = reported_of(Job(8, 130, seed=4, placement=RankPlacement(ranks_per_host=4)).inject(*faults))
    assert ", ".join(f"{one.kind} {one.scope}" for one in incidents) == expected
    assert messages == notified


class Judged:
    """A pipeline where a detector is expected: answers with what is told."""

    def __init__(self, topology: Topology) -> None:
        self.pipeline, self.topology_state, self.notified = DetectionPipeline("gpt", detectors), TopologyState(), []
        ranks = enumerate(topology.host)
        self.topology_state.learn(wire.RankInfo(rank, topology.world_size, host=host) for rank, host in ranks)

    def observe(self, observation: Observation) -> list[Update]:
        notified, failures = self.pipeline.observe(observation, self.topology_state)
        assert not failures
        self.notified += notified
        return notified


def wide_job() -> tuple[Judged, Clockwork]:
    """A job of 256 ranks on 128 hosts that has made some steps."""
    wide = topology(256, hosts=128)
    judged = Judged(wide)
    job = Clockwork(judged, 256)
    job.attempt = "wide.0"
    judged.observe(AttemptStart("wide.0", wide, job.now_s))
    job.train(20)
    return judged, job


def test_a_sender_of_128_hosts_that_dies_is_one_incident_that_grows_and_is_reported_once():
    judged, job = wide_job()
    for _ in range(8):
        job.silent |= set(range(len(job.silent), len(job.silent) + 32))
        job.train(1)
    job.train(40)
    (incident,) = judged.pipeline.correlator.open
    assert (incident.kind, str(incident.scope), len(incident.hosts)) == (Kind.TELEMETRY_LOST, "job", 64)
    assert incident.evidence["hosts_hit"] == 128
    assert incident.summary.startswith("None of the job's 128 hosts has sent telemetry for")
    moments = [news.what for news in judged.notified]
    assert [moment for moment in moments if moment is not TransitionKind.EVIDENCE] == [TransitionKind.OPENED]
    job.silent = set()
    job.train(1)
    assert incident.evidence["hosts_hit"] == 128
    assert not incident.goes_on


def test_127_hosts_that_fall_silent_at_once_are_one_page():
    judged, job = wide_job()
    job.silent = set(range(2, 256))
    job.train(60)
    (page,) = reported_first(judged.notified, set())
    assert "127 of the job's 128 hosts" in page.data["text"]


def test_127_hosts_whose_ranks_are_lost_at_once_are_one_page():
    ranks = [finding(Kind.RANK_LOST, scope=f"rank:{rank}", severity=Severity.CRITICAL) for rank in range(8, 1_024)]
    correlator = Correlator("gpt")
    correlator.begin("l.0")
    (page,) = reported_first(correlator.evaluate(ranks, topology_state(1_024, per_host=8)), set())
    what = page.data["text"].split("\n")[0]
    assert what.startswith("CRITICAL in job gpt: rank_lost of rank:")
    assert " of 1024 on node-1, and at least 63 more ranks. Open since step 100, " in what
