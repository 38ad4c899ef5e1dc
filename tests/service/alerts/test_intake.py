"""Alerts that come in: which jobs they concern, and what stream is sent of them; on both databases."""

import pytest
from sqlalchemy import select, update

from rankwatch_detectors.alerts import ALERTS_MAX as ALERTS_PER_JOB_MAX
from rankwatch_detectors.alerts import NAMES_MAX
from rankwatch_service import alerts
from rankwatch_service.alerts import LASTS_S, NO_JOB, Alert, store_alerts, why_it_waits
from rankwatch_service.api.background.housekeeping import AlertExpiry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.policy.control_records import decode_control
from rankwatch_service.store.engine import write
from rankwatch_service.store.job_removal import delete_job
from rankwatch_service.store.models import AgentView, AlertRow, Attempt, Job
from tests.support.clock import FakeClock
from tests.support.store.database import add, attempt_row, change, job_row, rows_of

LABELS = ("rankwatch_job", "job_name")


class Site:
    """gpt runs on node-1 and node-2, bert on node-2, and old, which has ended, did on node-3."""

    def __init__(self, engine):
        self.engine, self.clock = engine, FakeClock()
        self.controls = ControlLog(engine, self.clock)
        self.expiry = AlertExpiry(engine, self.controls, self.clock)
        now = self.clock.unix_ns()
        seen = dict.fromkeys(("first_seen_unix_ns", "last_seen_unix_ns"), now)
        states = {"gpt": "running", "bert": "stalled", "old": "ended"}
        add(engine, Job, *[job_row(job, state=state, **seen) for job, state in states.items()])
        self.report(("gpt", "node-1", "agt_1"), ("gpt", "node-2", ""), ("bert", "node-2", ""), ("old", "node-3", ""))
        carried = {
            "gpt": [("node-1", "agt_1"), ("node-2", "")],
            "bert": [("node-2/3fa9c1d2", "")],
            "old": [("node-3", "")],
        }
        for job, hosts in carried.items():
            ranks = [{"rank": rank, "host": host, "agent": agent} for rank, (host, agent) in enumerate(hosts)]
            add(engine, Attempt, attempt_row(job, ranks=ranks))

    def report(self, *who):
        """Views of agents, each of a job and at a host as it says itself."""
        seen = {"attempt": "l.0", "boot": "b", "ranks": b"", "at_unix_ns": self.clock.unix_ns()}
        views = [{"job": job, "host": f"{host}/{agent}" if agent else host, "agent": agent} for job, host, agent in who]
        add(self.engine, AgentView, *[one | seen for one in views])

    def post(self, *alerts, may_see=lambda _job: True):
        """Alerts as `alert` gives them; returns what became of each."""
        now = self.clock.unix_ns()
        read_alerts = [
            Alert.of(labels, {}, None, None if lasts_s is None else now + int(lasts_s * 1e9), "", now)
            for labels, lasts_s in alerts
        ]
        return [str(one) for one in store_alerts(self.engine, self.controls, read_alerts, LABELS, may_see, now)]

    def reported(self):
        """What stream was sent: by record its job, and name and state of its alerts."""
        records = [(one.key, decode_control(one.value)) for one in self.controls.read(0, 10_000)]
        return [(job, [(one.name, one.state) for one in record.alerts]) for job, record in records]

    def rows(self):
        return rows_of(self.engine, select(AlertRow.job, AlertRow.is_reported).order_by(AlertRow.job))


def alert(name="DiskFull", lasts_s=None, **labels):
    return {"alertname": name, **labels}, lasts_s


@pytest.fixture
def site(engine):
    return Site(engine)


def test_stream_is_reported_once_that_an_alert_begins_and_once_that_it_ends(site):
    assert site.post(alert(job_name="gpt")) == ["begun"]
    for _ in range(3):
        site.clock.advance(60)
        assert site.post(alert(job_name="gpt")) == ["repeated"]
    assert site.post(alert(job_name="gpt", lasts_s=0)) == ["ended"]
    assert site.post(alert(job_name="gpt", lasts_s=0)) == ["repeated"]
    assert site.reported() == [("gpt", [("DiskFull", "firing")]), ("gpt", [("DiskFull", "resolved")])]
    assert site.rows() == []


def test_the_jobs_are_those_that_labels_name_else_those_on_the_host(site):
    for labels, expected in [
        ({"rankwatch_job": "gpt"}, ["gpt"]),
        ({"job_name": "gpt", "instance": "node-2"}, ["gpt"]),
        ({"rankwatch_job": "bert", "job_name": "gpt"}, ["bert"]),
        ({"instance": "node-1:9100"}, ["gpt"]),
        ({"Hostname": "node-2.cluster.local"}, ["bert", "gpt"]),
        ({"job_name": "nobody", "node": "node-1"}, ["gpt"]),
        ({"job": "gpt"}, []),
        ({"job_name": "old", "instance": "node-3"}, []),
        ({"job_name": "\x00", "instance": "\x00"}, []),
    ]:
        before = len(site.reported())
        site.post(alert(**labels))
        assert [job for job, _ in site.reported()[before:]] == expected, labels


def test_an_agent_that_says_that_it_is_on_a_host_and_carries_no_rank_there_gets_no_alerts_of_it(site):
    site.report(("gpt", "node-9", "agt_1"), ("bert", "node-1", "agt_2"), ("bert", "node-9", ""))
    assert site.post(alert(instance="node-9")) == ["waiting"]
    site.post(alert(instance="node-1"))
    assert [job for job, _ in site.reported()] == ["gpt"]


def test_alerts_that_come_together_are_one_record_for_each_job(site):
    site.post(alert(job_name="gpt"), alert("LinkDown", instance="node-2"))
    assert site.reported() == [
        ("bert", [("LinkDown", "firing")]),
        ("gpt", [("DiskFull", "firing"), ("LinkDown", "firing")]),
    ]


def test_an_alert_without_a_job_waits_and_is_reported_once_its_job_is_there(site):
    assert site.post(alert(job_name="late")) == ["waiting"]
    assert (site.reported(), site.rows()) == ([], [("", False)])
    change(site.engine, update(Job).where(Job.name == "old").values(name="late", state="running"))
    assert site.post(alert(job_name="late")) == ["begun"]
    assert (site.reported(), site.rows()) == ([("late", [("DiskFull", "firing")])], [("late", True)])


@pytest.mark.parametrize(
    ("labels", "job", "why"),
    [
        ({"job_name": "a", "x": "b"}, NO_JOB, "No running job that its sender may access is named a."),
        (
            {"job_name": "a", "host": "n"},
            NO_JOB,
            "No running job that its sender may access is named a. "
            "No agent of a running job that its sender may access has reported from n for an hour.",
        ),
        ({"team": "infra"}, NO_JOB, "No label names a job (job_name) or a host (host, hostname, "),
        ({"job_name": "gpt"}, "gpt", "Job gpt has 512 alerts or 64 names of alerts, which is the limit: "),
    ],
)
def test_an_alert_that_waits_says_why(labels, job, why):
    waiting = Alert.of({"alertname": "DiskFull", **labels}, {}, None, None, "", 0)
    assert why_it_waits(waiting, job, ["job_name"]).startswith(why)


def test_an_alert_that_is_not_repeated_expires_at_its_end(site):
    site.post(alert(job_name="gpt", lasts_s=400), alert("LinkDown", job_name="gpt"))
    site.clock.advance(LASTS_S - 1)
    assert site.expiry.run() == 0
    site.clock.advance(1)
    assert site.expiry.run() == 1
    assert site.reported()[1:] == [("gpt", [("LinkDown", "expired")])]
    site.clock.advance(100)
    assert site.expiry.run() == 1
    assert site.rows() == []


def test_nothing_expires_before_repeats_have_had_time_to_reach_a_service_that_has_just_begun(site):
    site.post(alert(job_name="gpt"))
    site.clock.advance(3_600)
    restarted = AlertExpiry(site.engine, site.controls, site.clock)
    assert restarted.run() == 0
    assert site.post(alert(job_name="gpt")) == ["repeated"]
    site.clock.advance(LASTS_S)
    assert restarted.run() == 1


def test_an_alert_of_a_job_that_has_ended_is_no_longer_its_alert(site):
    site.post(alert(job_name="gpt"))
    change(site.engine, update(Job).where(Job.name == "gpt").values(state="ended"))
    site.clock.advance(60)
    assert site.post(alert(job_name="gpt")) == ["waiting"]
    site.clock.advance(LASTS_S - 60)
    assert site.expiry.run() == 1
    assert site.reported()[1:] == [("gpt", [("DiskFull", "expired")])]
    assert site.rows() == [("", False)]


def test_beyond_the_limits_of_a_job_alerts_wait_for_room(site):
    names = [alert(f"A{number}", job_name="gpt") for number in range(NAMES_MAX + 1)]
    assert site.post(*names) == ["begun"] * NAMES_MAX + ["waiting"]
    assert site.post(alert("A0", 0, job_name="gpt")) == ["ended"]
    assert site.post(names[-1]) == ["begun"]
    many = [alert("A1", job_name="bert", number=str(number)) for number in range(ALERTS_PER_JOB_MAX + 1)]
    assert site.post(*many) == ["begun"] * ALERTS_PER_JOB_MAX + ["waiting"]


def test_when_too_many_fire_new_ones_are_refused_and_known_ones_go_on(site, monkeypatch):
    monkeypatch.setattr(alerts, "ALERTS_MAX", 2)
    first = [alert(number=str(number), job_name="gpt") for number in range(2)]
    assert site.post(*first, alert(number="3", job_name="gpt")) == ["begun", "begun", "refused"]
    assert site.post(*first) == ["repeated"] * 2


def test_whoever_sees_some_jobs_alone_reports_and_ends_alerts_of_these_alone(site):
    site.post(alert(instance="node-2"))
    assert site.post(alert(instance="node-2", lasts_s=0), may_see=lambda job: job == "bert") == ["ended"]
    assert site.reported()[2:] == [("bert", [("DiskFull", "resolved")])]
    assert site.post(alert("LinkDown", job_name="gpt"), may_see=lambda job: job == "bert") == ["waiting"]


def test_a_deleted_job_has_no_alerts(site):
    site.post(alert(job_name="gpt"))
    with write(site.engine) as connection:
        delete_job(connection, "gpt", site.clock.unix_ns())
    assert site.rows() == []
