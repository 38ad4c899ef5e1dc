"""Alerts of a Prometheus, one episode for each name; refusals of the service, one incident for each flood."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rankwatch_detectors.alerts import LISTED_MAX, AlertDetector, is_same_host
from rankwatch_detectors.base import AttemptStart, Change, Finding, Kind, Occurrence, Severity, Tick
from rankwatch_detectors.pace.step_parts import shifted
from rankwatch_detectors.refusals import RefusalConfig, RefusalDetector
from rankwatch_detectors.statistics.shift import Crossing
from rankwatch_detectors.words import duration, more_than, slower_than
from tests.support.values.presences import topology

HOSTS = ("node-0", "node-0", "node-1", "node-1")


def start(attempt: str = "run.0", now_s: float = 0.0) -> AttemptStart:
    return AttemptStart(attempt, replace(topology(4), host=HOSTS), now_s)


def begun() -> AlertDetector:
    detector = AlertDetector()
    detector.observe(start())
    return detector


def alert(fingerprint: str = "a", state: str = "firing", name: str = "DiskFull", **fields: Any) -> dict[str, Any]:
    blank = {
        "severity": "warning",
        "summary": "The disk is full.",
        "hosts": (),
        "rank": None,
        "starts_s": 40.0,
        "labels": {"alertname": name, "mountpoint": "/data"},
        "url": "http://prometheus/graph?g0.expr=1",
        "runbook_url": "",
    }
    return blank | {"fingerprint": fingerprint, "state": state, "name": name} | fields


def receive(detector: AlertDetector, *alerts: dict[str, Any], now_s: float = 100.0) -> list[Finding]:
    return list(detector.observe(Occurrence("alert", "run.0", "", now_s, None, None, {"alerts": list(alerts)})))


def accept(detector: AlertDetector, scope: str) -> list[Finding]:
    fields = {"kinds": ["alert"], "scopes": [scope]}
    return list(detector.observe(Occurrence("accepted", "run.0", "", 110.0, None, None, fields)))


def test_an_alert_opens_under_its_name_as_of_its_own_beginning() -> None:
    (finding,) = receive(begun(), alert(severity="critical"))
    assert (finding.kind, finding.change, finding.severity) == (Kind.ALERT, Change.OPEN, Severity.CRITICAL)
    assert (str(finding.scope), finding.ranks) == ("alert:DiskFull", ())
    assert (finding.onset_time_s, finding.detected_time_s, finding.onset_step) == (40.0, 100.0, None)
    assert finding.summary == "Alert DiskFull: The disk is full."
    firing = [{"summary": "The disk is full.", "labels": 'mountpoint="/data"'}]
    where = {"url": "http://prometheus/graph?g0.expr=1", "runbook_url": ""}
    assert finding.evidence == {"alert": "DiskFull", "alerts_firing": 1, **where, "alerts": firing}
    (future,) = receive(begun(), alert(starts_s=1e12))
    assert future.onset_time_s == 100.0, "what claims to begin in the future begins now"


@pytest.mark.parametrize(
    ("fields", "ranks"),
    [
        ({"hosts": ("node-1:9100",)}, (2, 3)),
        ({"hosts": ("exporter-7", "node-0.cluster.local")}, (0, 1)),
        ({"hosts": ("node-1",), "rank": 0}, (0,)),
        ({"hosts": ("node-1",), "rank": 99}, (2, 3)),
        ({"hosts": ("node-9",)}, ()),
    ],
)
def test_it_names_the_ranks_of_the_host_or_the_rank_that_its_labels_name(fields, ranks) -> None:
    (finding,) = receive(begun(), alert(**fields))
    assert finding.ranks == ranks
    (finding,) = receive(begun(), alert("a", **fields), alert("b"))
    assert finding.ranks == (), "one alert about the whole job makes the episode about it"


def test_alerts_of_one_name_are_one_episode_that_ends_with_the_last_of_them() -> None:
    detector = begun()
    graver = {"severity": "critical", "summary": "The disk is about to be full."}
    (opened,) = receive(detector, alert("a", hosts=("node-0",)), alert("b", hosts=("node-1",), **graver))
    assert (opened.severity, opened.ranks) == (Severity.CRITICAL, (2, 3, 0, 1))
    assert opened.summary == "2 alerts DiskFull, the gravest: The disk is about to be full."
    (fewer,) = receive(detector, alert("b", "resolved"))
    assert (fewer.change, fewer.severity, fewer.ranks) == (Change.UPDATE, Severity.WARNING, (0, 1))
    (end,) = receive(detector, alert("a", "expired"))
    assert (end.change, end.summary) == (Change.CLOSE, "Alert DiskFull was not repeated in time.")


def test_the_evidence_lists_some_and_counts_all_and_a_repeat_says_nothing() -> None:
    detector = begun()
    (finding,) = receive(detector, *(alert(str(number)) for number in range(100)))
    assert finding.evidence["alerts_firing"] == 100
    assert len(finding.evidence["alerts"]) == LISTED_MAX
    assert receive(detector, alert("7", summary="The disk is 99 % full.")) == []


def test_a_rollback_says_nothing_and_a_new_launch_that_it_still_fires() -> None:
    detector = begun()
    receive(detector, alert(hosts=("node-1",)))
    assert detector.observe(start("run.1", 150.0)) == []
    (still,) = detector.observe(start("again.0", 200.0))
    assert (still.change, still.attempt, still.ranks) == (Change.UPDATE, "again.0", (2, 3))


def test_what_a_person_accepts_is_reported_no_more_but_what_comes_later_is() -> None:
    detector = begun()
    receive(detector, alert(), alert(name="LinkDown"))
    (end,) = accept(detector, "alert:DiskFull")
    assert (end.change, str(end.scope)) == (Change.CLOSE, "alert:DiskFull")
    (still,) = detector.observe(start("again.0", 200.0))
    assert str(still.scope) == "alert:LinkDown"
    (later,) = receive(detector, alert("b"))
    assert (later.change, later.evidence["alerts_firing"]) == (Change.OPEN, 1)


def test_alerts_outlast_the_rest_of_a_job_and_a_lost_state() -> None:
    before = begun()
    receive(before, alert())
    rested = AlertDetector()
    rested.inherit(before)
    (end,) = receive(rested, alert(state="resolved"))
    assert (end.change, end.onset_time_s) == (Change.CLOSE, 40.0)
    (end,) = receive(begun(), alert(state="resolved"))
    assert (end.change, str(end.scope)) == (Change.CLOSE, "alert:DiskFull")
    assert end.summary == "Alert DiskFull is over, says who sent it."


@pytest.mark.parametrize(
    ("name", "host", "same"),
    [
        ("node-1", "node-1", True),
        ("node-1:9100", "node-1", True),
        ("node-1.a.example:9100", "node-1", True),
        ("node-1", "node-1.a.example", True),
        ("node-1.a.example", "node-1.b.example", False),
        ("node-10", "node-1", False),
        ("10.0.0.1:9100", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("[::1]:9100", "", False),
        ("", "node-1", False),
    ],
)
def test_a_label_names_a_host_with_or_without_port_and_domain(name: str, host: str, same: bool) -> None:
    assert is_same_host(name, host) is same


CONFIG = RefusalConfig()


def forgeries() -> RefusalDetector:
    return RefusalDetector(Kind.FORGED_TELEMETRY, CONFIG)


def refuse(detector: RefusalDetector, kind: str = "forged", now_s: float = 0.0, **fields: Any) -> list[Finding]:
    return list(detector.observe(Occurrence(kind, "run.0", "", now_s, None, None, fields)))


@pytest.mark.parametrize("what", ["rank", "attempt", "event", "view", "signature", "unsigned"])
def test_the_first_forgery_of_any_part_is_critical_and_names_its_sender(what: str) -> None:
    (finding,) = refuse(forgeries(), what=what, agent="agt_1", host="node-7", count=3)
    assert (finding.kind, finding.severity) == (Kind.FORGED_TELEMETRY, Severity.CRITICAL)
    assert finding.summary == (
        f"Forged telemetry: 3 messages refused ({what} 3), the last from agent agt_1, host node-7."
    )
    refused = {"what": what, "refused": 3, "refused_by_what": {what: 3}}
    assert finding.evidence == {**refused, "agent": "agt_1", "host": "node-7"}


def test_a_limit_is_a_warning_with_its_figures() -> None:
    detector = RefusalDetector(Kind.LIMIT_REACHED, CONFIG)
    (finding,) = refuse(detector, "limit", what="new jobs within a minute", limit=60, figure=61, token="training")
    assert (finding.kind, finding.severity) == (Kind.LIMIT_REACHED, Severity.WARNING)
    assert finding.summary == "More than 60 new jobs within a minute: 1 message refused, the last from token training."
    assert (finding.evidence["limit"], finding.evidence["figure"]) == (60, 61)


def test_each_kind_is_about_its_own_occurrences_alone() -> None:
    assert refuse(forgeries(), "limit", what="cells") == []
    assert refuse(RefusalDetector(Kind.LIMIT_REACHED, CONFIG), "forged", what="rank") == []


def test_a_flood_is_reported_again_when_it_has_doubled_and_no_oftener() -> None:
    detector = forgeries()
    reported = [finding for _ in range(1_000) for finding in refuse(detector, what="rank")]
    assert [finding.evidence["refused"] for finding in reported] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_it_ends_a_quiet_time_after_the_last_refusal_and_begins_anew_with_the_next() -> None:
    detector = forgeries()
    refuse(detector, what="rank", now_s=0.0)
    refuse(detector, what="view", now_s=100.0)
    assert detector.observe(Tick(100.0 + CONFIG.quiet_s - 1, None)) == ()
    (end,) = detector.observe(Tick(100.0 + CONFIG.quiet_s, None))
    assert (end.change, end.evidence["refused_by_what"]) == (Change.CLOSE, {"rank": 1, "view": 1})
    (again,) = refuse(detector, what="rank", now_s=500.0)
    assert (again.change, again.evidence["refused"]) == (Change.OPEN, 1)


def test_a_new_attempt_does_not_end_it() -> None:
    detector = forgeries()
    detector.observe(AttemptStart("run.0", topology(4), 0.0))
    refuse(detector, what="attempt")
    assert detector.observe(AttemptStart("other.0", topology(8), 1.0)) == []
    (update,) = refuse(detector, what="attempt", now_s=2.0)
    assert (update.change, update.attempt) == (Change.UPDATE, "run.0")


def test_what_a_forger_makes_up_does_not_grow_the_evidence() -> None:
    detector = forgeries()
    for number in range(1_000):
        refuse(detector, what=f"part {number}")
    state = detector.snapshot()["_refused"]
    assert len(state) == CONFIG.listed_max + 1
    assert sum(state.values()) == 1_000


UNIT_S = {"ms": 1e-3, "s": 1.0}


def times_of(sentence: str) -> list[float]:
    return [float(number) * UNIT_S[unit] for number, unit in re.findall(r"([\d.]+) (ms|s)\b", sentence)]


def ratio_of(sentence: str) -> tuple[float, float]:
    """The ratio in a sentence, and by how much it may be rounded."""
    if found := re.search(r"([\d.]+) % (slower|more)", sentence):
        reported = found[1]
        return 1 + float(reported) / 100, 0.5 * 10.0 ** -(2 + len(reported.partition(".")[2]))
    found = re.search(r"([\d.]+) times as (slow|much)", sentence)
    assert found, sentence
    return float(found[1]), 0.05


@pytest.mark.parametrize("shared", [False, True])
def test_per_cent_and_seconds_agree(shared: bool) -> None:
    random = np.random.default_rng(1)
    for ratio, seconds in zip(
        np.exp(random.uniform(0.01, 3.0, 5000)), np.exp(random.uniform(-7, 7, 5000)), strict=True
    ):
        crossing = Crossing(0, math.log(ratio), 120, 20, 30.0)
        reported = shifted(crossing, float(seconds), 0.02, 8, shared=shared, grown_s={}, cause="")
        now_s, usual_s = times_of(reported["summary"].partition("(")[2])
        said, rounded = ratio_of(reported["summary"])
        assert said > 1.0
        assert now_s / usual_s == pytest.approx(said, abs=1.01 * rounded + 0.011 * said), reported["summary"]
        assert reported["evidence"]["cost_gpu_hours_per_hour"] > 0.0


def test_no_number_is_one_that_nobody_reads() -> None:
    for ratio in np.exp(np.random.default_rng(2).uniform(0.01, 5.0, 5000)):
        for sentence in (slower_than(ratio, "its peers"), more_than(ratio, "CPU time", "before")):
            assert not re.search(r"\de[+-]|-|\b0 %|\b1\.\d times", sentence), sentence
    for seconds in np.exp(np.random.default_rng(3).uniform(-12, 9, 5000)):
        assert "e+" not in duration(seconds)
