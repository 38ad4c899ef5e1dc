"""What a receiver is sent: complete, bounded, the same whenever it is composed again."""

import json
import math

import pytest

from rankwatch_detectors.base import Kind
from rankwatch_service.incidents.model import Consequence
from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.policy.notification import (
    BODY_BYTES_MAX,
    LISTED_MAX,
    TEXT_CHARS_MAX,
    incident_data,
    message_body,
    message_id,
    page_links,
)
from tests.support.values.incidents import NOON_UNIX_NS, command_message, incident_message, transition

LINKS = {"incident": "http://127.0.0.1:8770/incidents/inc_1"}


def composed(what="opened", **incident):
    return json.loads(incident_message(transition(what, **incident), LINKS))


def test_a_message_says_what_where_since_when_and_where_to_read_on():
    message = composed()
    assert message["type"] == "incident.opened"
    assert message["timestamp"] == "2025-10-09T08:53:20.001Z"
    data = message["data"]
    assert data["summary"] == "Rank 3 runs at 0.62 of its peers since step 480"
    assert (data["kind"], data["severity"], data["ranks"], data["hosts"]) == ("straggler", "warning", [3], ["node-a"])
    assert (data["onset_step"], data["onset_time"]) == (480, "2025-10-09T08:53:17.000Z")
    assert data["evidence"]["rate"] == 0.62
    assert data["links"] == LINKS
    assert data["cut"] == []


def test_a_message_alone_says_what_to_do_and_how_sure_it_is():
    data = json.loads(incident_message(transition(), LINKS, world_size=64))["data"]
    assert len(data["text"].split("\n")) == 3
    assert (data["world_size"], data["confidence_words"]) == (64, "certain")
    assert data["command"] == "rankwatch incidents show 1"
    assert len(data["first_steps"]) == 3
    assert composed()["data"]["world_size"] is None


@pytest.mark.parametrize("what", ["opened", "updated", "resolved"])
def test_each_told_transition_has_its_type(what):
    assert composed(what)["type"] == f"incident.{what}"


def test_a_message_counts_what_was_held_back_before_it_in_its_second_line():
    data = incident_data(transition(), LINKS, world_size=64)
    reported, before = (json.loads(message_body("incident.opened", 0, data, held))["data"] for held in (2, 0))
    assert (reported["held_before"], before["held_before"]) == (2, 0)
    what, sure, first = before["text"].split("\n")
    assert reported["text"].split("\n") == [what, f"{sure}. 2 more like this were not sent before", first]


def test_numbers_that_are_not_finite_are_reported_as_strings():
    data = composed(score=math.inf, evidence={"loss": math.nan, "norms": [-math.inf, 1.0]})["data"]
    assert data["score"] == "Inf"
    assert data["evidence"] == {"loss": "NaN", "norms": ["-Inf", 1.0]}


def test_long_lists_are_cut_and_say_so():
    data = composed(ranks=list(range(512)))["data"]
    assert data["ranks"] == list(range(LISTED_MAX))
    assert data["rank_count"] == 512
    assert data["cut"] == ["ranks"]


def test_a_stack_dump_is_cut_and_says_so():
    data = composed(evidence={"stack": "x" * 50_000})["data"]
    assert len(data["evidence"]["stack"]) == TEXT_CHARS_MAX
    assert data["cut"] == ["evidence texts"]


@pytest.mark.parametrize("text", ["x" * 1_900, "ü€𝄞" * 600, '"\\\n' * 600])
def test_a_message_never_grows_past_its_bound(text):
    body = incident_message(
        transition(
            text=text,
            evidence={str(n): text for n in range(100)},
            consequences=(Consequence(Kind.SLOWDOWN, "job", (), text, None),) * 100,
            suggestion={"reason": text, "alternatives": [{"action": "wait", "reason": text}] * 20},
            summary=text,
        ),
        LINKS,
    )
    assert len(body) <= BODY_BYTES_MAX
    data = json.loads(body)["data"]
    assert data["evidence"] == {}
    assert "evidence" in data["cut"]
    assert data["job"] == "gpt-small"


def test_lone_surrogates_in_a_job_name_do_not_stop_the_message():
    assert composed(job="a\ud800b")["data"]["job"] == "a?b"


def test_a_message_about_a_command_says_who_wants_what_until_when_and_stays_in_its_bound():
    by = {"reason": "x" * 50_000, "requested_by": "policy", "requested_unix_ns": NOON_UNIX_NS}
    request = CommandRequest(
        id="cmd_1", job="gpt", attempt="l.0", action="relaunch", params={"culprits": list(range(131_072))},
        world_size=131_072, approval_required=True, **by,
    )  # fmt: skip
    body = command_message(request, page_links("http://127.0.0.1:8770", "gpt", "inc_1"))
    assert len(body) <= BODY_BYTES_MAX
    message = json.loads(body)
    assert (message["type"], message["timestamp"]) == ("command.approval_needed", "2025-10-09T08:53:20.000Z")
    data = message["data"]
    assert (data["requested_by"], data["action"], data["world_size"]) == ("policy", "relaunch", 131_072)
    assert data["params"] == {"culprits": list(range(LISTED_MAX))}
    assert data["expires_time"] == "2025-10-09T09:08:20.000Z"
    assert data["links"] == {
        "incident": "http://127.0.0.1:8770/incidents/inc_1",
        "job": "http://127.0.0.1:8770/jobs/gpt",
    }


def test_composing_again_gives_the_same_bytes_and_the_same_id():
    assert incident_message(transition(), LINKS) == incident_message(transition(), LINKS)
    assert message_id("inc_1", 1, "pager") == message_id("inc_1", 1, "pager")


def test_ids_differ_by_incident_transition_and_receiver_and_hold_no_dot():
    ids = {message_id(*key) for key in [("a", 1, "x"), ("b", 1, "x"), ("a", 2, "x"), ("a", 1, "y")]}
    assert len(ids) == 4
    assert not any("." in one for one in ids)
