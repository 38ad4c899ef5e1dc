"""Who is told: receivers' lists, silences, and what the outbox gets."""

import json

import pytest

from rankwatch_service.policy.notification import message_id
from rankwatch_service.policy.routing import Routed, mutes, outbox_rows, receivers_for
from tests.support.incidents import NOON_UNIX_NS, incident_row, receiver_row, silence_row, transition_row


def routed(receivers, silences=(), **incident):
    return receivers_for(incident_row(**incident), receivers, silences, NOON_UNIX_NS)


def test_an_empty_list_matches_everything_and_names_come_in_order():
    assert routed([receiver_row("b"), receiver_row("a")]) == [Routed("a", None), Routed("b", None)]


@pytest.mark.parametrize(
    ("wants", "told"),
    [
        ({"kinds": ["straggler", "hang"]}, True),
        ({"kinds": ["hang"]}, False),
        ({"severities": ["critical"]}, False),
        ({"severities": ["warning"], "jobs": ["gpt-small"]}, True),
        ({"severities": ["warning"], "jobs": ["other"]}, False),
        ({"enabled": False}, False),
    ],
)
def test_a_receiver_is_told_only_what_it_wants(wants, told):
    assert bool(routed([receiver_row(**wants)])) is told


def test_who_wants_to_hear_of_hangs_hears_of_one_that_a_slow_rank_has_brought():
    brought = [{"kind": "slowdown"}, {"kind": "hang"}]
    assert routed([receiver_row(kinds=["hang"])], consequences=brought) == [Routed("pager", None)]
    assert routed([receiver_row(kinds=["nonfinite"])], consequences=brought) == []


@pytest.mark.parametrize(
    ("silence", "incident", "muted"),
    [
        ({}, {}, True),
        ({"job": "gpt-small", "kind": "straggler", "scope": "rank:3"}, {}, True),
        ({"job": "other"}, {}, False),
        ({"kind": "hang"}, {}, False),
        ({"scope": "rank:4"}, {}, False),
        ({"scope": "host:node-a"}, {}, True),
        ({"scope": "host:node-a"}, {"hosts": ["node-a", "node-b"], "scope": "job"}, False),
        ({"scope": "rank:3"}, {"kind": "rank_lost", "scope": "host:node-a"}, True),
        ({"scope": "rank:3"}, {"ranks": [3, 4], "scope": "job"}, False),
        ({"starts_unix_ns": NOON_UNIX_NS + 1}, {}, False),
        ({"ends_unix_ns": NOON_UNIX_NS}, {}, False),
        ({"starts_unix_ns": NOON_UNIX_NS, "ends_unix_ns": NOON_UNIX_NS + 1}, {}, True),
    ],
)
def test_a_silence_mutes_what_lies_inside_it_while_it_lasts(silence, incident, muted):
    assert mutes(silence_row(**silence), incident_row(**incident), NOON_UNIX_NS) is muted


def test_a_muted_receiver_is_still_named_with_the_silence():
    assert routed([receiver_row()], [silence_row(id="z"), silence_row(id="m")]) == [Routed("pager", "m")]


def test_the_outbox_gets_one_due_row_for_each_receiver():
    rows = outbox_rows(incident_row(), transition_row(), [receiver_row("a"), receiver_row("b")], [], {}, NOON_UNIX_NS)
    assert [row["id"] for row in rows] == [message_id("inc_1", 1, "a"), message_id("inc_1", 1, "b")]
    assert {row["state"] for row in rows} == {"waiting"}
    assert {row["next_try_unix_ns"] for row in rows} == {NOON_UNIX_NS}


def test_a_silenced_notification_is_kept_and_says_so():
    (row,) = outbox_rows(incident_row(), transition_row(), [receiver_row()], [silence_row()], {}, NOON_UNIX_NS)
    assert row["state"] == "silenced"


@pytest.mark.parametrize("what", ["acknowledged", "commented", "evidence"])
def test_transitions_for_the_pages_only_notify_nobody(what):
    assert outbox_rows(incident_row(), transition_row(what), [receiver_row()], [], {}, NOON_UNIX_NS) == []


def types(rows):
    return {row["receiver"]: json.loads(row["body"])["type"] for row in rows}


def test_to_a_receiver_that_hears_of_it_for_the_first_time_an_incident_opens_whatever_the_transition_is():
    receivers = [receiver_row("all"), receiver_row("pager", severities=["warning", "critical"])]

    def rows(what, told_to, **incident):
        promoted = transition_row(what, 2)
        return outbox_rows(incident_row(**incident), promoted, receivers, [], {}, NOON_UNIX_NS, told_to)

    assert types(rows("opened", [], severity="info")) == {"all": "incident.opened"}
    assert types(rows("updated", ["all"])) == {"all": "incident.updated", "pager": "incident.opened"}
    assert types(rows("updated", ["all", "pager"])) == {"all": "incident.updated", "pager": "incident.updated"}
    assert types(rows("updated", None)) == {"all": "incident.updated", "pager": "incident.updated"}


def test_an_incident_does_not_end_for_who_never_heard_of_it():
    receivers = [receiver_row("all"), receiver_row("pager")]
    rows = outbox_rows(incident_row(), transition_row("resolved", 2), receivers, [], {}, NOON_UNIX_NS, ["all"])
    assert types(rows) == {"all": "incident.resolved"}
