"""What an alert says: by which labels it is known, and what they mean here."""

from pathlib import Path

import pytest
import yaml

from rankwatch_service.alerts import LASTS_S, Alert

RULES = Path(__file__).parents[3] / "deploy" / "prometheus" / "rankwatch.rules.yml"
NOW = 1_700_000_000_000_000_000
S = 10**9


def alert(starts=None, ends=None, url="", annotations=None, **labels):
    return Alert.of({"alertname": "DiskFull"} | labels, annotations or {}, starts, ends, url, NOW)


def test_it_has_the_fingerprint_that_an_alertmanager_gives_it():
    """Taken from `amtool alert query -o json` of Alertmanager 0.25."""
    assert alert(severity="warning", instance="a:1").fingerprint == "13d21d7b245ea7b0"
    assert alert(severity="warning", instance="a:1", empty="").fingerprint == "13d21d7b245ea7b0"
    assert alert(severity="warning", instance="ä").fingerprint == "e8a4684b0d47a5b5"


def test_times_that_are_missing_are_those_of_an_alertmanager():
    firing = alert()
    assert (firing.starts_unix_ns, firing.ends_unix_ns) == (NOW, NOW + LASTS_S * S)
    over = alert(ends=NOW - S)
    assert (over.starts_unix_ns, over.is_over(NOW)) == (NOW - S, True)
    assert alert(starts=NOW + S, ends=NOW + 2 * S).starts_unix_ns == NOW
    with pytest.raises(ValueError, match="endsAt is before startsAt"):
        alert(starts=NOW, ends=NOW - S)


@pytest.mark.parametrize(
    ("label", "severity"),
    [
        ("critical", "critical"),
        ("page", "critical"),
        ("Warning", "warning"),
        ("info", "info"),
        ("none", "info"),
        ("p3", "warning"),
        ("", "warning"),
    ],
)
def test_its_severity_is_that_of_its_label(label, severity):
    assert alert(severity=label).severity == severity


def test_what_it_says_reaches_stream():
    text = {"description": "Disk of\n node-1 is full", "runbook_url": "https://wiki.example/disk"}
    reported = alert(NOW - 300 * S, annotations=text, url="http://prometheus/graph", instance="node-1:9100", rank="3")
    reports = reported.reported()
    assert (reports.name, reports.state, reports.summary) == ("DiskFull", "firing", "Disk of node-1 is full")
    assert (reports.hosts, reports.rank, reports.starts_s) == (("node-1:9100",), 3, NOW / S - 300)
    assert (reports.url, reports.runbook_url) == ("http://prometheus/graph", "https://wiki.example/disk")
    assert alert(rank="x").reported().rank is None
    assert alert(url="javascript:alert(1)", annotations={"runbook_url": "file:///etc"}).reported().url == ""


def test_long_annotations_are_cut():
    many = alert(annotations={f"note{number}": "x" * 2_000 for number in range(40)})
    assert (len(many.annotations), len(many.annotations["note0"])) == (32, 1_000)
    assert len(alert(annotations={"summary": "x" * 2_000}).reported().summary) == 300


@pytest.mark.parametrize(
    "labels",
    [
        {"alertname": ""},
        {"alertname": "x" * 201},
        {"alertname": "a\nb"},
        {"much": "x" * 8_192},
        {f"l{number}": "1" for number in range(64)},
    ],
)
def test_labels_beyond_a_limit_are_refused(labels):
    with pytest.raises(ValueError):
        alert(**labels)


def test_what_is_about_rankwatch_itself_or_came_from_it_is_its_own():
    names = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert len(names) > 5
    assert all(alert(alertname=name).is_own for name in names)
    assert alert(alertname="Hang", incident="inc_1").is_own
    assert not alert(incident="42").is_own
