"""Messages at the limits that PagerDuty, Slack and Teams publish: exactly at each one, and one over."""

import json

import pytest

from rankwatch_service.notify.receiver_types.base import ReceiverType, SendContext
from rankwatch_service.notify.receiver_types.message import OutgoingMessage, encoded
from rankwatch_service.notify.receiver_types.table import WEB_TYPES
from rankwatch_service.policy.notification import BODY_BYTES_MAX
from tests.support.values.incidents import NOON_UNIX_NS

CHARS = ["x", "é", "火", "\U0001f525"]
"""Of one to four bytes."""

KEY = "0123456789abcdef0123456789abcdef"
LINKS = {
    name: f"https://watch.example/{name}"
    for name in ("incident", "job", "runbook", "acknowledge", "silence", "service")
}


def message(text, **data):
    about = {"id": "inc_1", "job": "gpt", "kind": "hang", "severity": "critical", "text": text, "links": LINKS}
    content = {"type": "incident.opened", "timestamp": "2025-10-09T08:53:20.001Z", "data": about | data}
    return OutgoingMessage("msg_1", encoded(content))


def filling(char):
    """A message of exactly the largest body, nearly all of which is its text."""
    room = BODY_BYTES_MAX - len(message("").body)
    lines = char * (room // len(char.encode()))
    third = len(lines) // 3
    text = f"{lines[:third]}\n{lines[third : 2 * third]}\n{lines[2 * third : -4]}"
    rest = BODY_BYTES_MAX - len(message(text).body)
    found = message(text + "x" * rest)
    assert len(found.body) == BODY_BYTES_MAX
    return found


def sent(type_, of):
    context = SendContext("https://hooks.example/v2/enqueue", KEY, NOON_UNIX_NS, "https://watch.example", "")
    request = WEB_TYPES[type_].request(of, context)
    return request.body, json.loads(request.body)


@pytest.mark.parametrize("char", CHARS)
@pytest.mark.parametrize("over", [0, 1])
def test_a_summary_for_pagerduty_has_1024_characters_at_most(char, over):
    text = char * (1_024 + over)
    summary = sent(ReceiverType.PAGERDUTY, message(text))[1]["payload"]["summary"]
    assert summary == (text[:1_023] + "…" if over else text)


@pytest.mark.parametrize("char", CHARS)
def test_the_largest_body_is_an_event_of_less_than_512_kb(char):
    assert len(sent(ReceiverType.PAGERDUTY, filling(char))[0]) <= 512 * 1_024


@pytest.mark.parametrize("char", CHARS)
@pytest.mark.parametrize("over", [0, 1])
def test_a_header_for_slack_has_150_characters_at_most(char, over):
    whole = f"critical: hang in {char * (150 - len('critical: hang in ') + over)}"
    header = sent(ReceiverType.SLACK, message("what", job=whole.rpartition(" ")[2]))[1]["blocks"][0]["text"]["text"]
    assert header == (whole[:149] + "…" if over else whole)


@pytest.mark.parametrize("char", [*CHARS, "&", "<"])
def test_no_section_for_slack_has_more_than_3000_characters(char):
    for of in (filling(char), message("\n".join([char * 2_500] * 3)), message("\n".join([char * 2_501] * 3))):
        blocks = sent(ReceiverType.SLACK, of)[1]["blocks"]
        assert len(blocks) <= 50
        sections = [block["text"]["text"] for block in blocks if block["type"] == "section"]
        assert len(sections) == 2
        assert all(0 < len(text) <= 3_000 for text in sections)


@pytest.mark.parametrize(("chars", "is_shown"), [(3_000, True), (3_001, False)])
def test_a_link_that_is_too_long_for_a_button_of_slack_is_left_out(chars, is_shown):
    url = "https://watch.example/".ljust(chars, "x")
    actions = sent(ReceiverType.SLACK, message("what", links=LINKS | {"runbook": url}))[1]["blocks"][-1]["elements"]
    assert (url in [one["url"] for one in actions]) is is_shown
    assert len(actions) == len(LINKS) - (not is_shown)


def test_lines_that_a_message_lacks_are_no_empty_section_for_slack():
    blocks = sent(ReceiverType.SLACK, message("what alone"))[1]["blocks"]
    assert [block["text"]["text"] for block in blocks if block["type"] == "section"] == [":red_circle: what alone"]
    (_, rest) = [
        block["text"]["text"]
        for block in sent(ReceiverType.SLACK, message("what\n\nfirst"))[1]["blocks"]
        if block["type"] == "section"
    ]
    assert rest == "first"


@pytest.mark.parametrize("char", [*CHARS, '"', "\\"])
def test_the_largest_body_is_a_message_of_28_kb_at_most_for_teams(char):
    body, content = sent(ReceiverType.TEAMS, filling(char) if char in CHARS else message(char * 9_000))
    assert len(body) <= 28 * 1_024
    assert len(content["attachments"][0]["content"]["actions"]) == len(LINKS)


@pytest.mark.parametrize("char", CHARS)
def test_a_text_that_no_body_holds_is_cut_for_teams_between_characters(char):
    body, content = sent(ReceiverType.TEAMS, message("\n".join([char * 30_000] * 3)))
    assert len(body) <= 28 * 1_024
    lines = [block["inlines"][0]["text"] for block in content["attachments"][0]["content"]["body"]]
    assert all(set(line) == {char, "…"} for line in lines)
