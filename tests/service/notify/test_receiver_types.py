"""What each type of receiver is sent: the fields and limits that its maker publishes, at their edges."""

import asyncio
import json
import re

import pytest
from sqlalchemy import insert, select

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.access.secret_key import SecretKey, SecretKeyError, load_secret_key
from rankwatch_service.clock import SystemClock
from rankwatch_service.incidents.model import Consequence
from rankwatch_service.notify.receiver_types import alertmanager, slack
from rankwatch_service.notify.receiver_types.base import ReceiverType, SendContext, Target
from rankwatch_service.notify.receiver_types.message import OutgoingMessage, encoded
from rankwatch_service.notify.receiver_types.table import RECEIVER_TYPES, check_receiver
from rankwatch_service.notify.receivers import forget_secret_key
from rankwatch_service.notify.sender import SenderTable, TryOutcome
from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.policy.control_records import JobOwnership
from rankwatch_service.policy.notification import BODY_BYTES_MAX
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Agent, IdempotentReply, Receiver
from tests.support.values.incidents import (
    NOON_UNIX_NS,
    SECRET,
    command_message,
    incident_message,
    receiver_row,
    transition,
)

KEY = "0123456789abcdef0123456789ABCDEF"
LINKS = {"incident": "https://watch.example/incidents/inc_1", "job": "https://watch.example/jobs/gpt"}
LONGEST = {"job": "j" * 200, "summary": "<&>" * 2_000, "hosts": tuple(f"host-{n}" * 20 for n in range(100))}
EVENTS_URL = "https://events.pagerduty.com/v2/enqueue"
BOT_URL = "https://slack.com/api/chat.postMessage#C024BE91L"


def message(what="opened", **incident):
    ownership = JobOwnership("gpt-small", "nlp", "sam")
    return OutgoingMessage("msg_1", incident_message(transition(what, **incident), LINKS, ownership, 64))


def command():
    asked = {"reason": "NaN", "requested_by": "sam", "requested_unix_ns": NOON_UNIX_NS, "approval_required": True}
    request = CommandRequest(id="cmd_1", job="gpt", attempt="l.0", action="rollback", params={}, world_size=64, **asked)
    return OutgoingMessage("msg_2", command_message(request, LINKS))


def sent(type_, of, url="https://hooks.example/x", secret="", thread=""):
    context = SendContext(url, secret, NOON_UNIX_NS, "https://watch.example", thread)
    request = RECEIVER_TYPES[type_].request(of, context)
    return request, json.loads(request.body)


def event(of):
    return sent(ReceiverType.PAGERDUTY, of, EVENTS_URL, KEY)[1]


# ---- PagerDuty -------------------------------------------------------------------------------------------------------


def test_pagerduty_gets_a_trigger_under_the_key_of_the_group():
    found = event(message())
    assert {"routing_key", "event_action", "dedup_key", "payload", "client", "client_url", "links"} == set(found)
    assert (found["routing_key"], found["event_action"], found["dedup_key"]) == (KEY, "trigger", "inc_1")
    payload = found["payload"]
    assert payload["summary"].startswith("WARNING in job gpt-small: Rank 3")
    assert (payload["source"], payload["severity"], payload["component"]) == ("node-a", "warning", "rank:3")
    assert (payload["group"], payload["class"]) == ("gpt-small", "straggler")
    assert payload["timestamp"] == "2025-10-09T08:53:20.001Z"
    assert payload["custom_details"]["evidence"]["rate"] == 0.62
    assert found["links"][0] == {"href": LINKS["incident"], "text": "Open incident"}


def test_pagerduty_is_told_of_the_end_with_the_same_keys():
    found = event(message("resolved", state="resolved", resolved_unix_ns=NOON_UNIX_NS))
    assert found == {"routing_key": KEY, "event_action": "resolve", "dedup_key": "inc_1"}


@pytest.mark.parametrize("severity", list(Severity))
def test_pagerduty_knows_our_severities(severity):
    assert event(message(severity=severity))["payload"]["severity"] in {"critical", "error", "warning", "info"}


@pytest.mark.parametrize(("chars", "is_hashed"), [(255, False), (256, True)])
def test_a_key_that_is_too_long_for_pagerduty_is_hashed(chars, is_hashed):
    key = event(message(id="i" * chars))["dedup_key"]
    assert (len(key) <= 255, key != "i" * chars) == (True, is_hashed)
    assert key == event(message("resolved", id="i" * chars))["dedup_key"]


@pytest.mark.parametrize(
    ("status", "delivered", "is_final"),
    [(202, True, False), (400, False, True), (429, False, False), (500, False, False), (403, False, True)],
)
def test_pagerduty_is_asked_again_unless_the_event_itself_is_wrong(status, delivered, is_final):
    reading = RECEIVER_TYPES[ReceiverType.PAGERDUTY].read(status, '{"message":"Event object is invalid"}')
    assert (not reading.error, reading.is_final) == (delivered, is_final)
    assert delivered or "invalid" in reading.error


# ---- Slack -----------------------------------------------------------------------------------------------------------


def check_blocks(blocks):
    """The published limits of Block Kit."""
    assert 1 <= len(blocks) <= 50
    texts = []
    for block in blocks:
        match block["type"]:
            case "header":
                assert block["text"]["type"] == "plain_text"
                assert 1 <= len(block["text"]["text"]) <= 150
                texts.append(block["text"]["text"])
            case "section":
                assert 1 <= len(block["text"]["text"]) <= 3_000
                texts.append(block["text"]["text"])
            case "context":
                assert 1 <= len(block["elements"]) <= 10
                texts += [one["text"] for one in block["elements"]]
            case "actions":
                assert 1 <= len(block["elements"]) <= 25
                assert len({one["action_id"] for one in block["elements"]}) == len(block["elements"])
                for one in block["elements"]:
                    assert len(one["text"]["text"]) <= 75
                    assert len(one["url"]) <= 3_000
                    texts.append(one["text"]["text"] + one["url"])
            case other:
                raise AssertionError(other)
    assert sum(map(len, texts)) <= slack.TOTAL_CHARS_MAX


def test_slack_gets_a_text_and_blocks_with_buttons_that_link():
    request, found = sent(ReceiverType.SLACK, message())
    assert request.headers == {"content-type": "application/json"}
    assert set(found) == {"text", "blocks", "unfurl_links", "unfurl_media"}
    assert found["text"].startswith("WARNING in job gpt-small: ")
    check_blocks(found["blocks"])
    header, what, rest, facts, actions = found["blocks"]
    assert header["text"]["text"] == "warning: straggler in gpt-small"
    assert "Rank 3 runs" in what["text"]["text"]
    assert "Likely cause: " in rest["text"]["text"]
    assert " You: " in rest["text"]["text"]
    assert "owner sam" in facts["elements"][0]["text"]
    assert [one["url"] for one in actions["elements"]] == [LINKS["incident"], LINKS["job"]]


@pytest.mark.parametrize("of", [message(**LONGEST), message("resolved", **LONGEST), command()], ids=["o", "r", "c"])
def test_the_largest_message_is_within_the_limits_of_slack(of):
    check_blocks(sent(ReceiverType.SLACK, of)[1]["blocks"])


def test_a_job_cannot_mention_anybody_in_slack():
    _, found = sent(ReceiverType.SLACK, message(job="<!channel>", summary="<@U1> & <http://x|y>"))
    header, *sections = [block for block in found["blocks"] if "text" in block]
    assert all(section["text"]["verbatim"] for section in sections)
    assert not any(re.search("<[!@#h]", text) for text in [found["text"], *(one["text"]["text"] for one in sections)])
    assert "&lt;!channel&gt;" in found["text"]
    # A header is plain text, in which Slack reads no mention.
    assert header["text"]["type"] == "plain_text"


def test_an_escape_is_not_cut_in_two():
    assert slack.escaped("&" * 4, 20) == "&amp;" * 4
    assert slack.escaped("&" * 5, 20) == "&amp;" * 3 + "…"
    assert slack.escaped("é" * 21, 20) == "é" * 19 + "…"


def test_a_bot_posts_to_its_channel_and_answers_in_the_thread():
    request, first = sent(ReceiverType.SLACK, message(), BOT_URL, "xoxb-1")
    assert request.url == "https://slack.com/api/chat.postMessage"
    assert request.headers["authorization"] == "Bearer xoxb-1"
    assert (first["channel"], "thread_ts" in first) == ("C024BE91L", False)
    _, update = sent(ReceiverType.SLACK, message("updated"), BOT_URL, "xoxb-1", thread="1.2")
    assert (update["thread_ts"], update["reply_broadcast"]) == ("1.2", False)
    _, end = sent(ReceiverType.SLACK, message("resolved"), BOT_URL, "xoxb-1", thread="1.2")
    assert (end["thread_ts"], end["reply_broadcast"]) == ("1.2", True)


@pytest.mark.parametrize(
    ("status", "body", "delivered", "is_final"),
    [
        (200, "ok", True, False),
        (200, '{"ok":true,"ts":"1.2"}', True, False),
        (200, '{"ok":false,"error":"channel_not_found"}', False, True),
        (200, '{"ok":false,"error":"service_unavailable"}', False, False),
        (200, '{"ok":', False, False),
        (400, "invalid_payload", False, True),
        (429, "", False, False),
        (500, "rollup_error", False, False),
    ],
)
def test_slacks_answers_are_read(status, body, delivered, is_final):
    reading = slack.read(status, body)
    assert (not reading.error, reading.is_final) == (delivered, is_final)


def test_slack_names_the_thread_that_a_message_begins():
    assert slack.read(200, '{"ok":true,"ts":"1503435956.000247"}').thread == "1503435956.000247"


# ---- Microsoft Teams -------------------------------------------------------------------------------------------------


def check_card(card):
    """What the schema of adaptive cards 1.4 and Teams ask of the elements that we use."""
    assert (card["type"], card["version"]) == ("AdaptiveCard", "1.4")
    for block in card["body"]:
        assert block["type"] == "RichTextBlock"
        for run in block["inlines"]:
            assert run["type"] == "TextRun"
            assert isinstance(run["text"], str)
            assert run.get("color", "Default") in {"Default", "Accent", "Good", "Warning", "Attention"}
            assert run.get("weight", "Default") in {"Default", "Lighter", "Bolder"}
    assert len(card["actions"]) <= 6
    assert all((one["type"], bool(one["title"])) == ("Action.OpenUrl", True) for one in card["actions"])


def test_teams_gets_a_card_with_three_lines_and_buttons():
    _, found = sent(ReceiverType.TEAMS, message())
    (attachment,) = found["attachments"]
    assert (found["type"], attachment["contentType"]) == ("message", "application/vnd.microsoft.card.adaptive")
    check_card(attachment["content"])
    assert len(attachment["content"]["body"]) == 3
    assert [one["url"] for one in attachment["content"]["actions"]] == [LINKS["incident"], LINKS["job"]]


def test_markdown_and_mentions_of_a_job_stay_text_in_teams():
    name = "[x](http://evil) <at>all</at> **b**"
    card = sent(ReceiverType.TEAMS, message(job=name))[1]["attachments"][0]["content"]
    # Runs know no markdown, and a mention needs an entity of the card.
    assert name in card["body"][0]["inlines"][0]["text"]
    assert "entities" not in card["msteams"]


# ---- Discord and Google Chat -----------------------------------------------------------------------------------------

HOOK = "https://discord.com/api/webhooks/1/x"
SPACE = "https://chat.googleapis.com/v1/spaces/A/messages?key=k&token=t"


def test_discord_gets_an_embed_with_three_lines_and_links_and_mentions_nobody():
    _, found = sent(ReceiverType.DISCORD, message(), HOOK)
    (embed,) = found["embeds"]
    assert found["allowed_mentions"] == {"parse": []}
    assert (embed["title"], embed["color"]) == ("warning: straggler", 0xF9A825)
    *lines, incident, job = embed["description"].split("\n\n")
    assert len(lines) == 3
    assert (incident, job) == (f"[Open incident]({LINKS['incident']})", f"[Open job]({LINKS['job']})")
    assert sent(ReceiverType.DISCORD, message("resolved"), HOOK)[1]["embeds"][0]["title"] == "resolved: straggler"


def test_markdown_links_and_mentions_of_a_job_stay_text_in_discord():
    text = sent(ReceiverType.DISCORD, telling("[x](https://evil) @everyone **b** `c`"), HOOK)[1]["embeds"][0][
        "description"
    ]
    assert text.startswith(r"\[x\]\(https\:\/\/evil\) \@everyone \*\*b\*\* \`c\`")


def test_google_chat_gets_a_card_in_the_thread_of_its_incident():
    request, found = sent(ReceiverType.GOOGLE_CHAT, message(), SPACE)
    card = found["cardsV2"][0]["card"]
    assert request.url == f"{SPACE}&messageReplyOption=REPLY_MESSAGE_FALLBACK_TO_NEW_THREAD"
    assert card["header"] == {"title": "warning: straggler", "subtitle": "gpt-small"}
    *texts, buttons = card["sections"][0]["widgets"]
    assert len(texts) == 3
    links = [one["onClick"]["openLink"]["url"] for one in buttons["buttonList"]["buttons"]]
    assert links == [LINKS["incident"], LINKS["job"]]
    later = sent(ReceiverType.GOOGLE_CHAT, message("resolved"), SPACE)[1]
    assert later["thread"] == found["thread"]


def test_tags_of_a_job_stay_text_in_google_chat():
    card = sent(ReceiverType.GOOGLE_CHAT, telling('<a href="https://evil">x</a>'), SPACE)[1]["cardsV2"][0]["card"]
    text = card["sections"][0]["widgets"][0]["textParagraph"]["text"]
    assert text == "&lt;a href=&quot;https://evil&quot;&gt;x&lt;/a&gt;"


# ---- Alertmanager ----------------------------------------------------------------------------------------------------

V4_KEYS = {
    *("version", "groupKey", "truncatedAlerts", "status", "receiver", "groupLabels", "commonLabels"),
    *("commonAnnotations", "externalURL", "notification_reason", "alerts"),
}
V4_ALERT_KEYS = {"status", "labels", "annotations", "startsAt", "endsAt", "generatorURL", "fingerprint"}


def test_the_webhook_of_alertmanager_has_its_keys():
    _, found = sent(ReceiverType.ALERTMANAGER_WEBHOOK, message())
    assert set(found) == V4_KEYS
    (alert,) = found["alerts"]
    assert set(alert) == V4_ALERT_KEYS
    assert (found["version"], found["status"], found["truncatedAlerts"]) == ("4", "firing", 0)
    assert alert["labels"]["alertname"] == "Straggler"
    assert alert["endsAt"] == alertmanager.NEVER
    assert found["notification_reason"] == "first notification"


def test_its_end_has_the_same_fingerprint_and_group():
    opened = sent(ReceiverType.ALERTMANAGER_WEBHOOK, message())[1]
    ended = sent(
        ReceiverType.ALERTMANAGER_WEBHOOK,
        message("resolved", state="resolved", severity=Severity.CRITICAL, resolved_unix_ns=NOON_UNIX_NS),
    )[1]
    assert (ended["status"], ended["notification_reason"]) == ("resolved", "all alerts resolved")
    assert ended["groupKey"] == opened["groupKey"]
    assert ended["alerts"][0]["fingerprint"] == opened["alerts"][0]["fingerprint"]
    assert ended["alerts"][0]["endsAt"] == "2025-10-09T08:53:20.000Z"


def open_alerts(*messages):
    """Label sets that fire in an Alertmanager after these messages."""
    ends = {}
    for one in messages:
        for alert in sent(ReceiverType.ALERTMANAGER, one)[1]:
            ends[json.dumps(alert["labels"], sort_keys=True)] = alert["endsAt"]
    now = "2025-10-09T08:53:20Z"
    return [json.loads(labels) for labels, at in ends.items() if at > now]


def test_an_alertmanager_has_one_alert_of_an_incident_also_when_it_becomes_graver_and_changes_its_kind():
    spike = {"kind": Kind.LOSS_SPIKE, "severity": Severity.INFO}
    opened, graver = message(**spike), message("updated", **spike | {"severity": Severity.WARNING})
    turned = message("updated", kind=Kind.LOSS_DIVERGENCE, severity=Severity.CRITICAL)
    (labels,) = open_alerts(opened, graver)
    assert (labels["alertname"], labels["severity"]) == ("LossSpike", "warning")
    (labels,) = open_alerts(opened, graver, turned)
    assert (labels["alertname"], labels["severity"]) == ("LossDivergence", "critical")
    assert open_alerts(opened, graver, turned, message("resolved", kind=Kind.LOSS_DIVERGENCE)) == []


def test_an_alertmanager_has_one_alert_when_the_cause_is_found():
    scope = message().data["scope"]
    hang = Consequence(Kind.HANG, scope, (), "hangs", 1)
    caused = message("updated", kind=Kind.DEVICE_FAULT, consequences=(hang,))
    (labels,) = open_alerts(message(kind=Kind.HANG), caused)
    assert labels["alertname"] == "DeviceFault"


# ---- All types -------------------------------------------------------------------------------------------------------

GOOD = {
    "webhook": ("https://hooks.example/x", SECRET),
    "alertmanager": ("http://alertmanager.example:9093/api/v2/alerts", ""),
    "alertmanager-webhook": ("https://oncall.example/x", ""),
    "pagerduty": (EVENTS_URL, KEY),
    "slack": (BOT_URL, "xoxb-1"),
    "teams": ("https://prod.example.com/workflows/x?sig=1", ""),
    "discord": (HOOK, ""),
    "google-chat": (SPACE, ""),
    "email": ("mailto:oncall@example.com", ""),
}


@pytest.mark.parametrize("type_", sorted(ReceiverType))
def test_every_type_accepts_what_it_needs_and_its_target_is_stored_with_it(type_):
    url, secret = GOOD[type_]
    target = Target(ReceiverType(type_), url)
    check_receiver(target, secret)
    assert Target.read(target.stored()) == target


def test_what_an_earlier_version_stored_is_a_webhook():
    for url in ("https://hooks.example/a+b", "kafka:"):
        assert Target.read(url) == Target(ReceiverType.WEBHOOK, url)
        assert Target.read(url).stored() == url


@pytest.mark.parametrize(
    ("type_", "url", "secret", "says"),
    [
        ("webhook", "https://hooks.example", "x", "whsec_"),
        ("pagerduty", EVENTS_URL, "short", "integration key"),
        ("pagerduty", EVENTS_URL, KEY + "0", "integration key"),
        ("pagerduty", "https://events.pagerduty.com/", KEY, "v2/enqueue"),
        ("slack", "https://hooks.slack.com/services/T/B/x", "xoxb-1", "incoming webhook"),
        ("slack", "https://slack.com/api/chat.postMessage", "xoxb-1", "channel"),
        ("slack", BOT_URL, "", "xoxb-"),
        ("teams", "https://prod.example.com/x", "y", "no secret"),
        ("discord", HOOK, "y", "no secret"),
        ("discord", "https://discord.com/channels/1/2", "", "/api/webhooks/"),
        ("google-chat", SPACE, "y", "no secret"),
        ("google-chat", "https://chat.google.com/room/A", "", "/messages?key="),
        ("alertmanager", "https://am.example/", "", "/api/v2/alerts"),
        ("email", "https://example.com", "", "mailto:"),
        ("email", "mailto:a@example.com,b@example.com", "", "one address"),
        ("email", "mailto:a@example.com%0d%0aBcc: b@example.com", "", "one address"),
        ("email", "mailto:a@example.com", "secret", "RANKWATCH_SMTP_PASSWORD"),
    ],
)
def test_what_can_never_work_is_refused_with_what_it_should_be(type_, url, secret, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        check_receiver(Target(ReceiverType(type_), url), secret)


@pytest.mark.parametrize("type_", [one for one in ReceiverType if one is not ReceiverType.EMAIL])
def test_every_type_can_send_what_an_earlier_version_has_composed(type_):
    body = json.loads(message().body)
    for name in ("text", "world_size", "confidence_words", "first_steps", "command"):
        del body["data"][name]
    url, secret = GOOD[type_]
    assert sent(type_, OutgoingMessage("msg_1", json.dumps(body).encode()), url, secret)[0].body


# ---- Exactly at each published limit, and one over -------------------------------------------------------------------

CHARS = ["x", "é", "火", "\U0001f525"]
"""Of one to four bytes."""

SIX_LINKS = {
    name: f"https://watch.example/{name}"
    for name in ("incident", "job", "runbook", "acknowledge", "silence", "service")
}


def telling(text, **data):
    about = {"id": "inc_1", "job": "gpt", "kind": "hang", "severity": "critical", "text": text, "links": SIX_LINKS}
    content = {"type": "incident.opened", "timestamp": "2025-10-09T08:53:20.001Z", "data": about | data}
    return OutgoingMessage("msg_1", encoded(content))


def filling(char):
    """A message of exactly the largest body, nearly all of which is its text."""
    room = BODY_BYTES_MAX - len(telling("").body)
    lines = char * (room // len(char.encode()))
    third = len(lines) // 3
    text = f"{lines[:third]}\n{lines[third : 2 * third]}\n{lines[2 * third : -4]}"
    rest = BODY_BYTES_MAX - len(telling(text).body)
    found = telling(text + "x" * rest)
    assert len(found.body) == BODY_BYTES_MAX
    return found


@pytest.mark.parametrize("char", CHARS)
@pytest.mark.parametrize("over", [0, 1])
def test_a_summary_for_pagerduty_has_1024_characters_at_most(char, over):
    text = char * (1_024 + over)
    summary = event(telling(text))["payload"]["summary"]
    assert summary == (text[:1_023] + "…" if over else text)


@pytest.mark.parametrize("char", CHARS)
def test_the_largest_body_is_an_event_of_less_than_512_kb(char):
    assert len(sent(ReceiverType.PAGERDUTY, filling(char), EVENTS_URL, KEY)[0].body) <= 512 * 1_024


@pytest.mark.parametrize("char", CHARS)
@pytest.mark.parametrize("over", [0, 1])
def test_a_header_for_slack_has_150_characters_at_most(char, over):
    whole = f"critical: hang in {char * (150 - len('critical: hang in ') + over)}"
    header = sent(ReceiverType.SLACK, telling("what", job=whole.rpartition(" ")[2]))[1]["blocks"][0]["text"]["text"]
    assert header == (whole[:149] + "…" if over else whole)


@pytest.mark.parametrize("char", [*CHARS, "&", "<"])
def test_no_section_for_slack_has_more_than_3000_characters(char):
    for of in (filling(char), telling("\n".join([char * 2_500] * 3)), telling("\n".join([char * 2_501] * 3))):
        blocks = sent(ReceiverType.SLACK, of)[1]["blocks"]
        assert len(blocks) <= 50
        sections = [block["text"]["text"] for block in blocks if block["type"] == "section"]
        assert len(sections) == 2
        assert all(0 < len(text) <= 3_000 for text in sections)


@pytest.mark.parametrize(("chars", "is_shown"), [(3_000, True), (3_001, False)])
def test_a_link_that_is_too_long_for_a_button_of_slack_is_left_out(chars, is_shown):
    url = "https://watch.example/".ljust(chars, "x")
    actions = sent(ReceiverType.SLACK, telling("what", links=SIX_LINKS | {"runbook": url}))[1]["blocks"][-1]["elements"]
    assert (url in [one["url"] for one in actions]) is is_shown
    assert len(actions) == len(SIX_LINKS) - (not is_shown)


def test_lines_that_a_message_lacks_are_no_empty_section_for_slack():
    for text, sections in (
        ("what alone", [":red_circle: what alone"]),
        ("what\n\nfirst", [":red_circle: what", "first"]),
    ):
        blocks = sent(ReceiverType.SLACK, telling(text))[1]["blocks"]
        assert [block["text"]["text"] for block in blocks if block["type"] == "section"] == sections


@pytest.mark.parametrize("char", [*CHARS, '"', "\\"])
def test_the_largest_body_is_a_message_of_28_kb_at_most_for_teams(char):
    request, content = sent(ReceiverType.TEAMS, filling(char) if char in CHARS else telling(char * 9_000))
    assert len(request.body) <= 28 * 1_024
    assert len(content["attachments"][0]["content"]["actions"]) == len(SIX_LINKS)


@pytest.mark.parametrize("char", CHARS)
def test_a_text_that_no_body_holds_is_cut_for_teams_between_characters(char):
    request, content = sent(ReceiverType.TEAMS, telling("\n".join([char * 30_000] * 3)))
    assert len(request.body) <= 28 * 1_024
    lines = [block["inlines"][0]["text"] for block in content["attachments"][0]["content"]["body"]]
    assert all(set(line) == {char, "…"} for line in lines)


@pytest.mark.parametrize("char", [*CHARS, "*", "\\"])
def test_the_largest_body_fits_into_an_embed(char):
    for of in (filling(char) if char in CHARS else telling(char * 9_000), telling("\n".join([char * 30_000] * 3))):
        (embed,) = sent(ReceiverType.DISCORD, of, HOOK)[1]["embeds"]
        assert len(embed["description"]) <= 4_096
        assert len(embed["title"]) <= 256
        assert not re.search(r"(?<!\\)(\\\\)*\\…", embed["description"]), "an escape was cut in two"


@pytest.mark.parametrize("char", [*CHARS, "<", "\\"])
def test_the_largest_body_is_a_message_of_32_kb_at_most_for_google_chat(char):
    for of in (filling(char) if char in CHARS else telling(char * 9_000), telling("\n".join([char * 30_000] * 3))):
        assert len(sent(ReceiverType.GOOGLE_CHAT, of, SPACE)[0].body) <= 32_000


SECRET_KEY = SecretKey(b"k" * 32)
URL = "https://hooks.example/T00/" + "path" * 20


def stored(engine):
    with read(engine) as connection:
        return {row.name: row for row in connection.execute(select(Receiver.__table__))}


def add_plain(engine, name="pager"):
    reply = {"token_id": "t", "key": "k", "request_sha256": "", "status": 201, "at_unix_ns": 1}
    with write(engine) as connection:
        connection.execute(insert(Receiver).values(**receiver_row(name, url=URL)))
        connection.execute(insert(IdempotentReply).values(body=SECRET.encode(), **reply))


class Sender:
    def __init__(self):
        self.sent = []

    async def send(self, *message):
        self.sent.append(message)
        return TryOutcome(204, "", 0.0)


def test_the_notifier_decrypts_what_it_sends():
    behind = Sender()
    sender = SenderTable(SECRET_KEY, {"https": behind})
    asyncio.run(sender.send(SECRET_KEY.encrypt(URL), SECRET_KEY.encrypt(SECRET), "msg_1", b"{}"))
    assert behind.sent == [(URL, SECRET, "msg_1", b"{}")]


def test_what_another_key_encrypted_is_a_failure_that_says_so_and_reaches_nobody():
    behind, other = Sender(), SecretKey(b"l" * 32)
    sender = SenderTable(SECRET_KEY, {"https": behind})
    outcome = asyncio.run(sender.send(other.encrypt(URL), SECRET_KEY.encrypt(SECRET), "msg_1", b"{}"))
    assert (outcome.delivered, behind.sent) == (False, [])
    assert outcome.error == "cannot be sent: it cannot be decrypted with the secret key of this service"


@pytest.mark.parametrize(
    ("url", "chosen"),
    [(URL, "https"), (f"slack+{URL}", "https"), ("email+mailto:ann@example.com", "mailto"), ("kafka:", "kafka")],
)
def test_the_url_of_a_receiver_chooses_its_sender(url, chosen):
    senders = {scheme: Sender() for scheme in ("http", "https", "mailto", "kafka")}
    asyncio.run(SenderTable(SECRET_KEY, senders).send(SECRET_KEY.encrypt(url), SECRET_KEY.encrypt(""), "msg_1", b"{}"))
    assert {scheme: [url for url, *_ in sender.sent] for scheme, sender in senders.items() if sender.sent} == {
        chosen: [url]
    }


def test_the_topic_without_kafka_is_a_failure_that_says_so():
    outcome = asyncio.run(
        SenderTable(SECRET_KEY, {}).send(SECRET_KEY.encrypt("kafka:"), SECRET_KEY.encrypt(""), "msg_1", b"{}")
    )
    assert (outcome.delivered, outcome.is_final) == (False, False)
    assert outcome.error == "cannot be sent: this service does not deliver to kafka:"


def test_after_a_lost_key_the_service_starts_with_a_new_one_and_without_receivers(engine, tmp_path):
    clock = SystemClock()
    add_plain(engine)
    agent = {"id": "a", "job": "j", "host": "h", "token_id": "t", "enrolled_unix_ns": 1}
    with write(engine) as connection:
        connection.execute(insert(Agent).values(**agent))
    lost, found = Settings(data_dir=tmp_path / "lost"), Settings(data_dir=tmp_path / "new")
    load_secret_key(lost, engine, clock)
    with pytest.raises(SecretKeyError, match="forget-key"):
        load_secret_key(found, engine, clock)
    with write(engine) as connection:
        assert forget_secret_key(connection) == ["pager"]
    assert stored(engine) == {}
    with read(engine) as connection:
        assert connection.scalar(select(Agent.id)) is None, "it has to enrol again, for a secret of the new key"
    load_secret_key(found, engine, clock)
