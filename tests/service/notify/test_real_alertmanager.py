"""A real Alertmanager takes what we send to one, and its webhook has the same form as ours."""

import json
import time
from functools import partial

import httpx2
import pytest

from rankwatch_service.notify.receiver_types.base import ReceiverType, SendContext
from rankwatch_service.notify.receiver_types.message import OutgoingMessage
from rankwatch_service.notify.receiver_types.table import RECEIVER_TYPES
from rankwatch_service.policy.control_records import JobOwnership
from tests.support.service.monitoring import amtool, needs_alertmanager, running_alertmanager
from tests.support.service.process import until
from tests.support.service.webhook_receiver import webhook_receiver
from tests.support.values.incidents import incident_message, transition

pytestmark = [pytest.mark.integration, needs_alertmanager]

ROUTES = {"route": {"receiver": "hook", "group_by": ["job"], "group_wait": "0s", "group_interval": "1s"}}
LINKS = {"incident": "https://watch.example/incidents/inc_1", "runbook": "https://wiki.example/straggler"}
NEWER = {"notification_reason"}
"""Keys that Alertmanager has since 0.32; Debian's is older."""


def message(what="opened", number=1, **incident):
    body = incident_message(transition(what, number, **incident), LINKS, JobOwnership("gpt-small", "nlp", "ann"), 64)
    return OutgoingMessage(f"msg_{number}", body)


def request(type_, reported, url):
    return RECEIVER_TYPES[type_].request(reported, SendContext(url, "", time.time_ns(), "https://watch.example"))


def test_it_takes_an_incident_that_opens_becomes_graver_and_ends(tmp_path):
    with webhook_receiver() as hooks, running_alertmanager(tmp_path, ROUTES, ["hook"], hooks.url) as url:
        for reported, firing in (
            (message(), {("Straggler", "warning")}),
            (message("updated", 2, severity="critical"), {("Straggler", "critical")}),
            (message("resolved", 3, severity="critical", state="resolved"), set()),
        ):
            sent = request(ReceiverType.ALERTMANAGER, reported, f"{url}/api/v2/alerts")
            answer = httpx2.post(sent.url, content=sent.body, headers=dict(sent.headers))
            assert answer.status_code == 200, answer.text
            until(f"it fires {firing}", partial(fires, url, firing))
        until("the end is told", lambda: json.loads(hooks.calls[-1].body)["status"] == "resolved")
        compare(json.loads(hooks.calls[0].body))


def fires(url, expected):
    alerts = json.loads(amtool(url, "alert", "query", "-o", "json"))
    return {(one["labels"]["alertname"], one["labels"]["severity"]) for one in alerts} == expected


def compare(theirs):
    """Compare the webhook of Alertmanager about our alert with the one that we send ourselves."""
    ours = json.loads(request(ReceiverType.ALERTMANAGER_WEBHOOK, message(), "https://hooks.example/x").body)
    assert ours.keys() - NEWER == theirs.keys() - NEWER
    (our_alert,), (their_alert,) = ours["alerts"], theirs["alerts"]
    assert our_alert.keys() == their_alert.keys()
    for name in ("version", "status", "truncatedAlerts", "commonLabels", "commonAnnotations"):
        assert ours[name] == theirs[name], name
    for name in ("status", "labels", "annotations", "generatorURL"):
        assert our_alert[name] == their_alert[name], name
    assert {name: type(value) for name, value in ours.items() if name not in NEWER} == {
        name: type(value) for name, value in theirs.items() if name not in NEWER
    }
    assert [type(value) for _, value in sorted(our_alert.items())] == [
        type(value) for _, value in sorted(their_alert.items())
    ]
    assert len(our_alert["fingerprint"]) == len(their_alert["fingerprint"])
