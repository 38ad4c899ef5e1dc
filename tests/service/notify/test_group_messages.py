"""A message about a group of incidents, as each type of receiver gets it."""

import json

import pytest

from rankwatch_service.labels.incident_labels import incident_labels
from rankwatch_service.notify.receiver_types.base import ReceiverType, SendContext
from rankwatch_service.notify.receiver_types.message import OutgoingMessage
from rankwatch_service.notify.receiver_types.table import WEB_TYPES
from rankwatch_service.policy.control_records import JobProject
from rankwatch_service.policy.notification import incident_message
from rankwatch_service.routing.group import GroupMember, GroupMessage, MessageReason
from rankwatch_service.routing.group_body import group_body
from rankwatch_service.routing.member_summary import brief
from tests.support.values.incidents import NOON_UNIX_NS, transition

LINKS = {"incident": "https://watch.example/incidents/inc", "job": "https://watch.example/jobs/gpt"}
URLS = {
    ReceiverType.PAGERDUTY: ("https://events.pagerduty.com/v2/enqueue", "0123456789abcdef0123456789ABCDEF"),
    ReceiverType.SLACK: ("https://slack.com/api/chat.postMessage#C024BE91L", "xoxb-1"),
    ReceiverType.ALERTMANAGER: ("https://alerts.example/api/v2/alerts", ""),
}


def member(number, severity, *, is_open=True):
    incident = {"id": f"inc_{number}", "severity": severity, "summary": f"summary {number}", "ranks": (number,)}
    body = incident_message(transition("opened", **incident), LINKS, JobProject("gpt", "nlp", "sam"), 64)
    data = json.loads(body)["data"]
    return GroupMember(data["id"], incident_labels(data), brief(data), is_open=is_open)


def group(open_=(), resolved=()):
    key = '{}:{job="gpt"}'
    message = GroupMessage(
        "msg_1", "on-call", key, 1, MessageReason.FIRST, {"job": "gpt"}, tuple(open_), tuple(resolved), NOON_UNIX_NS
    )
    return OutgoingMessage(message.id, group_body(message))


def sent(type_, message):
    url, secret = URLS.get(type_, ("https://hooks.example/x", ""))
    return json.loads(
        WEB_TYPES[type_].request(message, SendContext(url, secret, NOON_UNIX_NS, "https://w.example")).body
    )


BOTH = [member(1, "warning"), member(2, "critical")]


def test_the_gravest_open_incident_is_what_the_message_says_and_how_many_there_are_beside_it():
    message = group(BOTH, [member(3, "critical", is_open=False)])
    assert message.lines[0].startswith("3 incidents, 2 of them unresolved. ")
    assert "summary 2" in message.lines[0]
    assert all(message.lines)
    assert (message.severity, message.is_resolved) == ("critical", False)
    assert dict(message.buttons())["Open incident"] == LINKS["incident"]


def test_a_group_of_one_reads_as_its_incident():
    alone = json.loads(incident_message(transition("opened"), LINKS, JobProject("gpt"), 64))["data"]
    found = group([GroupMember(alone["id"], incident_labels(alone), brief(alone))])
    assert "\n".join(found.lines) == alone["text"]


@pytest.mark.parametrize("type_", WEB_TYPES, ids=str)
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "resolved"])
def test_every_type_can_be_sent_a_group(type_, is_open):
    members = [member(1, "warning", is_open=is_open), member(2, "critical", is_open=is_open)]
    assert sent(type_, group(members) if is_open else group((), members))


def test_pagerduty_has_one_alert_for_the_group_which_ends_with_it():
    opened, ended = sent(ReceiverType.PAGERDUTY, group(BOTH)), sent(ReceiverType.PAGERDUTY, group((), BOTH))
    assert (opened["event_action"], ended["event_action"]) == ("trigger", "resolve")
    assert opened["dedup_key"] == ended["dedup_key"] == '{}:{job="gpt"}'


def test_alertmanager_gets_an_alert_for_each_incident():
    alerts = sent(ReceiverType.ALERTMANAGER, group([member(1, "warning")], [member(2, "critical", is_open=False)]))
    current = {one["labels"]["incident"]: one for one in alerts if one["labels"]["severity"] in ("warning", "critical")}
    assert set(current) == {"inc_1", "inc_2"}
    assert current["inc_2"]["endsAt"] <= current["inc_1"]["endsAt"]


def test_the_webhook_of_alertmanager_names_the_group_and_what_its_alerts_have_in_common():
    found = sent(ReceiverType.ALERTMANAGER_WEBHOOK, group(BOTH))
    assert (found["receiver"], found["groupLabels"], len(found["alerts"])) == ("on-call", {"job": "gpt"}, 2)
    assert found["commonLabels"]["job"] == "gpt-small"
    assert "severity" not in found["commonLabels"]
    assert found["truncatedAlerts"] == 0
    assert len({one["fingerprint"] for one in found["alerts"]}) == 2
