"""The stages that decide who is notified: receivers' lists, silences, and what the outbox gets."""

import pytest

from rankwatch_detectors.base import Kind
from rankwatch_detectors.scope import WHOLE_JOB, IncidentScope
from rankwatch_service.incidents.model import Consequence
from rankwatch_service.labels import incident_labels
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.notify.pipeline import mutes, why_sent
from rankwatch_service.notify.router import outbox_row
from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.policy.announcement import command_announcement, incident_announcement, labels_of
from rankwatch_service.policy.control_records import JobOwnership
from rankwatch_service.policy.notification import message_id
from tests.support.values.incidents import (
    NOON_UNIX_NS,
    announced,
    incident_version,
    notified,
    receiver_route,
    routed,
    silence,
    transition,
)


def sent(receivers, silences=(), **incident):
    found = routed(announced(**incident), receivers, silences)
    return [(one.receiver.name, one.state == "silenced") for one in found]


def test_an_empty_list_matches_everything_and_names_come_in_order():
    assert sent([receiver_route("b"), receiver_route("a")]) == [("a", False), ("b", False)]


@pytest.mark.parametrize(
    ("wants", "notified"),
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
def test_a_receiver_is_reported_only_what_it_wants(wants, notified):
    ownership = JobOwnership("gpt-small", "nlp")
    assert bool(routed(announced(ownership=ownership), [receiver_route(**wants)])) is notified


def test_who_is_told_of_one_project_is_not_told_of_jobs_without():
    assert sent([receiver_route(projects=["nlp"]), receiver_route("all")]) == [("all", False)]
    ownership = JobOwnership("gpt-small", "nlp", "ann")
    announcement = announced(ownership=ownership)
    assert [one.receiver.name for one in routed(announcement, [receiver_route(projects=["nlp"])])] == ["pager"]
    assert (announcement.data["project"], announcement.data["owner"]) == ("nlp", "ann")
    routes = [receiver_route("nlp", projects=["nlp"]), receiver_route("vision", projects=["vision"])]
    asked = command_announcement(requested(), {}, ownership=ownership)
    assert [one.receiver.name for one in routed(asked, routes)] == ["nlp"]
    assert asked.data["owner"] == "ann"


def test_who_wants_to_hear_of_hangs_hears_of_one_that_a_slow_rank_has_brought():
    brought = [Consequence(kind, "job", (), "", None) for kind in (Kind.SLOWDOWN, Kind.HANG)]
    assert sent([receiver_route(kinds=["hang"])], consequences=brought) == [("pager", False)]
    assert sent([receiver_route(kinds=["nonfinite"])], consequences=brought) == []


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
    ownership = JobOwnership("gpt-small", "nlp", "ann")
    labels = labels_of(incident_version(**incident), ownership)
    assert mutes(silence(**fields), labels, NOON_UNIX_NS) is muted
    announcement = announced(ownership=ownership, **incident)
    assert announcement.labels == incident_labels(announcement.data) == labels


def test_a_muted_receiver_is_still_named_with_the_silence():
    assert sent([receiver_route()], [silence(), silence()]) == [("pager", True)]


def test_the_outbox_gets_one_due_row_for_each_receiver():
    rows = notified("opened", 1, ("a", "b"), now_unix_ns=NOON_UNIX_NS)
    assert [row["id"] for row in rows] == [message_id("inc_1", 1, "a"), message_id("inc_1", 1, "b")]
    assert [row["state"] for row in rows] == ["waiting"] * 2
    assert [row["next_try_unix_ns"] for row in rows] == [NOON_UNIX_NS] * 2


@pytest.mark.parametrize("what", ["acknowledged", "commented", "evidence"])
def test_transitions_for_the_pages_only_are_not_announced(what):
    assert incident_announcement(transition(what), {}) is None


def requested(**changes):
    fields = {"id": "cmd_1", "job": "gpt-small", "attempt": "l.0", "action": "rollback", "params": {}, "reason": "NaN"}
    fields |= {"requested_by": "policy", "requested_unix_ns": NOON_UNIX_NS, "approval_required": True}
    return CommandRequest(**fields | changes)


def test_a_command_that_needs_an_approval_is_told_to_the_receivers_of_its_incident():
    receivers = [receiver_route("b"), receiver_route("a"), receiver_route("hangs", kinds=["hang"])]
    asked = command_announcement(requested(incident_id="inc_1"), {}, incident_version())
    assert types(asked, receivers) == {"a": "command.approval_needed", "b": "command.approval_needed"}
    rows = [outbox_row(asked, one) for one in routed(asked, receivers)]
    assert [(row["receiver"], row["incident_id"], row["command_id"]) for row in rows] == [
        ("a", "inc_1", "cmd_1"),
        ("b", "inc_1", "cmd_1"),
    ]
    assert [row["id"] for row in rows] == [message_id("cmd_1", 0, "a"), message_id("cmd_1", 0, "b")]


def test_no_silence_mutes_a_command():
    asked = command_announcement(requested(incident_id="inc_1"), {}, incident_version())
    assert [one.state for one in routed(asked, [receiver_route()], [silence()])] == ["waiting"]


def test_a_command_without_an_incident_is_told_to_all_receivers_of_its_job():
    receivers = [
        receiver_route("hangs", kinds=["hang"], severities=["critical"], matchers=["severity=critical"]),
        receiver_route("other", jobs=["other"]),
        receiver_route("off", enabled=False),
    ]
    asked = command_announcement(requested(), {})
    assert types(asked, receivers) == {"hangs": "command.approval_needed"}
    assert asked.incident_id == ""


def test_what_weakens_approvals_is_told_to_all_receivers_that_are_not_disabled():
    receivers = [receiver_route("other", jobs=["other"], kinds=["hang"]), receiver_route("off", enabled=False)]
    done = command_announcement(requested(job=ALL_JOBS, approval_required=False), {})
    assert types(done, receivers) == {"other": "command.not_approved"}


def test_a_command_that_needs_nobody_is_not_announced():
    assert command_announcement(requested(approval_required=False), {}) is None


def types(announcement, receivers, notified=()):
    return {one.receiver.name: one.type for one in routed(announcement, receivers, notified=notified)}


def test_to_a_receiver_that_hears_of_it_for_the_first_time_an_incident_opens_whatever_the_transition_is():
    receivers = [receiver_route("all"), receiver_route("pager", severities=["warning", "critical"])]
    assert types(announced("opened", severity="info"), receivers) == {"all": "incident.opened"}
    updated = announced("updated", 2)
    assert types(updated, receivers, ["all"]) == {"all": "incident.updated", "pager": "incident.opened"}
    assert types(updated, receivers, ["all", "pager"]) == {"all": "incident.updated", "pager": "incident.updated"}


def test_an_incident_does_not_end_for_who_never_heard_of_it():
    receivers = [receiver_route("all"), receiver_route("pager")]
    assert types(announced("resolved", 2), receivers, ["all"]) == {"all": "incident.resolved"}


def test_what_goes_to_a_receiver_that_waits_is_due_when_the_incident_is_as_old():
    opened_unix_ns = NOON_UNIX_NS - 60 * 10**9
    receivers = [receiver_route("lead", after_s=900), receiver_route("pager"), receiver_route("soon", after_s=30)]
    found = routed(announced(detected_unix_ns=opened_unix_ns), receivers, [silence()])
    # A silence of now says nothing of when it is due.
    assert [(one.receiver.name, one.due_unix_ns, one.state == "silenced") for one in found] == [
        ("lead", opened_unix_ns + 900 * 10**9, False),
        ("pager", NOON_UNIX_NS, True),
        ("soon", NOON_UNIX_NS, True),
    ]
    assert "if nobody acknowledges the incident before" in why_sent("waiting", "", 0, NOON_UNIX_NS + 1, NOON_UNIX_NS)
