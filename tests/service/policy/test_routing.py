"""Who is told: receivers' lists, silences, and what the outbox gets."""

import json

import pytest

from rankwatch_detectors.base import Kind
from rankwatch_detectors.scope import WHOLE_JOB, IncidentScope
from rankwatch_service.incidents.model import Consequence
from rankwatch_service.labels import incident_labels
from rankwatch_service.policy.command import CommandRequest
from rankwatch_service.policy.control_records import JobProject
from rankwatch_service.policy.notification import message_id
from rankwatch_service.policy.routing import command_notifications, labels_of, mutes, notifications, why_sent
from rankwatch_service.store.rows import outbox_row
from tests.support.values.incidents import NOON_UNIX_NS, incident_version, receiver_route, silence, transition


def routed(receivers, silences=(), **incident):
    sent = notifications(transition(**incident), receivers, silences, {}, NOON_UNIX_NS)
    return [(one.receiver, one.state == "silenced") for one in sent]


def test_an_empty_list_matches_everything_and_names_come_in_order():
    assert routed([receiver_route("b"), receiver_route("a")]) == [("a", False), ("b", False)]


@pytest.mark.parametrize(
    ("wants", "told"),
    [
        ({"kinds": ["straggler", "hang"]}, True),
        ({"kinds": ["hang"]}, False),
        ({"severities": ["critical"]}, False),
        ({"severities": ["warning"], "jobs": ["gpt-small"]}, True),
        ({"severities": ["warning"], "jobs": ["other"]}, False),
        ({"projects": ["vision", "nlp"]}, True),
        ({"projects": ["vision"]}, False),
        ({"projects": ["nlp"], "jobs": ["other"]}, False),
        ({"matchers": ('host="node-a"', 'project=~"nlp|vision"')}, True),
        ({"matchers": ('host="node-b"',)}, False),
        ({"matchers": ("kind!=straggler",)}, False),
        ({"enabled": False}, False),
    ],
)
def test_a_receiver_is_told_only_what_it_wants(wants, told):
    whose = JobProject("gpt-small", "nlp")
    assert bool(notifications(transition(), [receiver_route(**wants)], [], {}, NOON_UNIX_NS, whose=whose)) is told


def test_who_is_told_of_one_project_is_not_told_of_jobs_without():
    assert routed([receiver_route(projects=["nlp"]), receiver_route("all")]) == [("all", False)]
    whose = JobProject("gpt-small", "nlp", "ann")
    (one,) = notifications(transition(), [receiver_route(projects=["nlp"])], [], {}, NOON_UNIX_NS, whose=whose)
    data = json.loads(one.body)["data"]
    assert (data["project"], data["owner"]) == ("nlp", "ann")
    routes = [receiver_route("nlp", projects=["nlp"]), receiver_route("vision", projects=["vision"])]
    (asked,) = command_notifications(requested(), routes, {}, whose=whose)
    assert asked.receiver == "nlp"
    assert json.loads(asked.body)["data"]["owner"] == "ann"


def test_who_wants_to_hear_of_hangs_hears_of_one_that_a_slow_rank_has_brought():
    brought = [Consequence(kind, "job", (), "", None) for kind in (Kind.SLOWDOWN, Kind.HANG)]
    assert routed([receiver_route(kinds=["hang"])], consequences=brought) == [("pager", False)]
    assert routed([receiver_route(kinds=["nonfinite"])], consequences=brought) == []


@pytest.mark.parametrize(
    ("fields", "incident", "muted"),
    [
        ({}, {}, True),
        ({"job": "gpt-small", "kind": "straggler", "scope": "rank:3"}, {}, True),
        ({"job": "other"}, {}, False),
        ({"kind": "hang"}, {}, False),
        ({"scope": "rank:4"}, {}, False),
        ({"scope": "host:node-a"}, {}, True),
        ({"scope": "host:node-a"}, {"hosts": ["node-a", "node-b"], "scope": WHOLE_JOB}, False),
        ({"scope": "rank:3"}, {"kind": "rank_lost", "scope": IncidentScope.of_host("node-a")}, True),
        ({"scope": "rank:3"}, {"ranks": [3, 4], "scope": WHOLE_JOB}, False),
        ({"matchers": ('host="node-a"',)}, {}, True),
        ({"matchers": ('host=~"node-.*"', 'severity!="critical"')}, {}, True),
        ({"matchers": ('host=~"node-.*"', 'severity="critical"')}, {}, False),
        ({"matchers": ('owner!~"bob|eve", project="nlp"',)}, {}, True),
        ({"matchers": ('owner=~"bob|eve"',)}, {}, False),
        ({"job": "other", "matchers": ('host="node-a"',)}, {}, False),
        ({"starts_unix_ns": NOON_UNIX_NS + 1}, {}, False),
        ({"ends_unix_ns": NOON_UNIX_NS}, {}, False),
        ({"starts_unix_ns": NOON_UNIX_NS, "ends_unix_ns": NOON_UNIX_NS + 1}, {}, True),
    ],
)
def test_a_silence_mutes_what_lies_inside_it_while_it_lasts(fields, incident, muted):
    whose = JobProject("gpt-small", "nlp", "ann")
    labels = labels_of(incident_version(**incident), whose)
    assert mutes(silence(**fields), labels, NOON_UNIX_NS) is muted
    (message,) = notifications(transition(**incident), [receiver_route()], [], {}, NOON_UNIX_NS, whose=whose)
    assert incident_labels(json.loads(message.body)["data"]) == labels


def test_a_muted_receiver_is_still_named_with_the_silence():
    assert routed([receiver_route()], [silence(id="z"), silence(id="m")]) == [("pager", True)]


def test_the_outbox_gets_one_due_row_for_each_receiver():
    sent = notifications(transition(), [receiver_route("a"), receiver_route("b")], [], {}, NOON_UNIX_NS)
    assert [one.id for one in sent] == [message_id("inc_1", 1, "a"), message_id("inc_1", 1, "b")]
    assert [outbox_row(one)["state"] for one in sent] == ["waiting"] * 2
    assert [outbox_row(one)["next_try_unix_ns"] for one in sent] == [NOON_UNIX_NS] * 2


def test_a_silenced_notification_is_kept_and_says_so():
    (one,) = notifications(transition(), [receiver_route()], [silence()], {}, NOON_UNIX_NS)
    assert one.state == "silenced"
    assert outbox_row(one)["state"] == "silenced"


@pytest.mark.parametrize("what", ["acknowledged", "commented", "evidence"])
def test_transitions_for_the_pages_only_notify_nobody(what):
    assert notifications(transition(what), [receiver_route()], [], {}, NOON_UNIX_NS) == []


def requested(**changes):
    fields = {"id": "cmd_1", "job": "gpt-small", "attempt": "l.0", "action": "rollback", "params": {}, "reason": "NaN"}
    fields |= {"requested_by": "policy", "requested_unix_ns": NOON_UNIX_NS, "approval_required": True}
    return CommandRequest(**fields | changes)


def test_a_command_that_needs_an_approval_is_told_to_the_receivers_of_its_incident():
    receivers = [receiver_route("b"), receiver_route("a"), receiver_route("hangs", kinds=["hang"])]
    incident = incident_version()
    sent = command_notifications(requested(incident_id="inc_1"), receivers, {}, incident)
    assert [(one.receiver, one.incident_id, one.command_id) for one in sent] == [
        ("a", "inc_1", "cmd_1"),
        ("b", "inc_1", "cmd_1"),
    ]
    assert [one.id for one in sent] == [message_id("cmd_1", 0, "a"), message_id("cmd_1", 0, "b")]
    assert types(sent) == {"a": "command.approval_needed", "b": "command.approval_needed"}


def test_a_command_without_an_incident_is_told_to_all_receivers_of_its_job():
    receivers = [
        receiver_route("hangs", kinds=["hang"], severities=["critical"]),
        receiver_route("other", jobs=["other"]),
        receiver_route("off", enabled=False),
    ]
    sent = command_notifications(requested(), receivers, {})
    assert types(sent) == {"hangs": "command.approval_needed"}
    assert outbox_row(sent[0])["incident_id"] == ""


def test_a_command_that_needs_nobody_is_told_to_nobody():
    assert command_notifications(requested(approval_required=False), [receiver_route()], {}) == []


def types(sent):
    return {one.receiver: json.loads(one.body)["type"] for one in sent}


def test_to_a_receiver_that_hears_of_it_for_the_first_time_an_incident_opens_whatever_the_transition_is():
    receivers = [receiver_route("all"), receiver_route("pager", severities=["warning", "critical"])]

    def sent(what, told_to, **incident):
        return notifications(transition(what, 2, **incident), receivers, [], {}, NOON_UNIX_NS, told_to)

    assert types(sent("opened", [], severity="info")) == {"all": "incident.opened"}
    assert types(sent("updated", ["all"])) == {"all": "incident.updated", "pager": "incident.opened"}
    assert types(sent("updated", ["all", "pager"])) == {"all": "incident.updated", "pager": "incident.updated"}


def test_an_incident_does_not_end_for_who_never_heard_of_it():
    receivers = [receiver_route("all"), receiver_route("pager")]
    sent = notifications(transition("resolved", 2), receivers, [], {}, NOON_UNIX_NS, ["all"])
    assert types(sent) == {"all": "incident.resolved"}


def test_what_goes_to_a_receiver_that_waits_is_due_when_the_incident_is_as_old():
    opened_unix_ns = NOON_UNIX_NS - 60 * 10**9
    receivers = [receiver_route("lead", after_s=900), receiver_route("pager"), receiver_route("soon", after_s=30)]
    sent = notifications(transition(detected_unix_ns=opened_unix_ns), receivers, [silence()], {}, NOON_UNIX_NS)
    # A silence of now says nothing of when it is due.
    assert [(one.receiver, one.created_unix_ns, one.state == "silenced") for one in sent] == [
        ("lead", opened_unix_ns + 900 * 10**9, False),
        ("pager", NOON_UNIX_NS, True),
        ("soon", NOON_UNIX_NS, True),
    ]
    assert "if nobody acknowledges the incident before" in why_sent("waiting", "", 0, NOON_UNIX_NS + 1, NOON_UNIX_NS)
