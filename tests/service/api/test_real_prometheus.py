"""A real Prometheus and a real amtool take the service for an Alertmanager."""

import json
import time

import pytest

from rankwatch_service.access.grants import Scope
from rankwatch_service.policy.control_records import decode_control
from rankwatch_service.store.models import Job
from tests.support.service.api import served_api
from tests.support.service.monitoring import amtool, needs_amtool, needs_prometheus, running_prometheus
from tests.support.service.process import until
from tests.support.store.database import add, job_row

pytestmark = pytest.mark.integration

FULL = 'label_replace(vector(97), "instance", "node-1:9100", "", "")'
FIRING = {
    "alert": "DiskFull",
    "expr": FULL,
    "labels": {"severity": "critical", "job_name": "gpt"},
    "annotations": {"summary": "The disk of {{ $labels.instance }} is {{ $value }} % full"},
}
WATCHDOG = {"alert": "Watchdog", "expr": "vector(1)", "labels": {"severity": "none"}}


@pytest.fixture
def service(tmp_path):
    with served_api(tmp_path) as (api, url):
        seen = dict.fromkeys(("first_seen_unix_ns", "last_seen_unix_ns"), api.clock.unix_ns())
        add(api.engine, Job, job_row("gpt", **seen))
        yield api, url


def reported(api):
    return [one for entry in api.controls.read(0, 100) for one in decode_control(entry.value).alerts]


def received(api, result):
    counter = api.app.state.context.counters.alerts.labels(result)
    return counter._value.get()


@pytest.mark.ci
@needs_prometheus
def test_what_a_prometheus_repeats_is_reported_once_and_ends_when_its_rule_holds_no_more(service, tmp_path):
    api, url = service
    with running_prometheus(tmp_path, url, api.token(Scope.ALERT), [FIRING, WATCHDOG]) as change_rules:
        until("it has repeated its alert", lambda: received(api, "repeated") >= 2)
        (begun,) = reported(api)
        assert (begun.name, begun.state, begun.severity) == ("DiskFull", "firing", "critical")
        assert (begun.summary, begun.hosts) == ("The disk of node-1:9100 is 97 % full", ("node-1:9100",))
        assert 0 <= time.time() - begun.starts_s < 60
        assert "/graph?g0.expr=" in begun.url
        assert received(api, "own") >= 2
        change_rules([FIRING | {"expr": f"{FULL} > 98"}])
        until("its end is told", lambda: len(reported(api)) == 2)
    assert [one.state for one in reported(api)] == ["firing", "resolved"]


@needs_amtool
def test_amtool_adds_an_alert_shows_it_and_ends_it(service, tmp_path):
    api, url = service
    config = tmp_path / "http.yml"
    config.write_text(json.dumps({"authorization": {"credentials": api.token(Scope.ALERT, Scope.READ)}}))
    alert = ("alert", "add", "LinkDown", "job_name=gpt", "severity=info")
    by_token = f"--http.config.file={config}"
    amtool(url, by_token, *alert, "--annotation=summary=The link is down")
    (begun,) = reported(api)
    assert (begun.name, begun.severity, begun.summary) == ("LinkDown", "info", "The link is down")
    (shown,) = json.loads(amtool(url, by_token, "-o", "json", "alert", "query", "severity=info"))
    assert (shown["labels"]["alertname"], shown["status"]["state"]) == ("LinkDown", "active")
    assert json.loads(amtool(url, by_token, "-o", "json", "alert", "query", "severity=critical")) == []
    amtool(url, by_token, *alert, "--start=2026-01-01T00:00:00Z", "--end=2026-01-01T00:01:00Z")
    assert [one.state for one in reported(api)] == ["firing", "resolved"]
