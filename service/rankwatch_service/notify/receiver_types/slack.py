"""Slack: an incoming webhook, or with a bot's token `chat.postMessage`, whose messages form a thread for each group.

The channel of a bot is the fragment of its URL: https://slack.com/api/chat.postMessage#C024BE91L.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final
from urllib.parse import urldefrag, urlsplit

from rankwatch_service.notify.receiver_types import message as texts
from rankwatch_service.notify.receiver_types.base import (
    JSON_HEADERS,
    ReplyReading,
    SendContext,
    WebRequest,
    WebType,
    read_status,
)
from rankwatch_service.notify.receiver_types.message import OutgoingMessage, cut, encoded

BOT_PATH: Final = "/api/chat.postMessage"

HEADER_CHARS_MAX: Final = 150
SECTION_CHARS_MAX: Final = 3_000
FIELD_CHARS_MAX: Final = 2_000
BUTTON_TEXT_CHARS_MAX: Final = 75
BUTTON_URL_CHARS_MAX: Final = 3_000
TOTAL_CHARS_MAX: Final = 13_200
"""Of all blocks together; Slack refuses more with msg_blocks_too_long. Ours: 150 of the header, twice `LINE_CHARS_MAX`,
`FIELD_CHARS_MAX`, and five links."""

LINE_CHARS_MAX: Final = 2_500
"""Of a line with its escapes: `SECTION_CHARS_MAX` less what stands around it."""

_CHANNEL: Final = re.compile(r"[A-Za-z0-9._-]{1,80}", re.ASCII)
_ESCAPES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_EMOJI: Final = {"critical": ":red_circle:", "warning": ":large_orange_circle:", "info": ":large_blue_circle:"}
_PASSES: Final = frozenset(
    {"fatal_error", "internal_error", "ratelimited", "rate_limited", "request_timeout", "service_unavailable"}
)
"""Errors of the bot's API that another try may not meet."""


def check(url: str, secret: str) -> None:
    """Check that a bot has a channel and a token, and an incoming webhook neither.

    Raises:
        ValueError: one is missing, malformed or too much.
    """
    if not is_bot(url):
        if secret:
            raise ValueError(
                "an incoming webhook has no secret; a bot's token belongs to https://slack.com/api/chat.postMessage#CHANNEL"
            )
        return
    if not _CHANNEL.fullmatch(urldefrag(url).fragment):
        raise ValueError("add the channel to the URL: https://slack.com/api/chat.postMessage#C024BE91L")
    if not secret.startswith("xoxb-"):
        raise ValueError("the secret must be the token of a bot with the scope chat:write, which begins with xoxb-")


def is_bot(url: str) -> bool:
    """Whether a URL is that of the bot's API, in which messages form threads."""
    return urlsplit(url).path.endswith(BOT_PATH)


def request(message: OutgoingMessage, context: SendContext) -> WebRequest:
    """The message as blocks, and as text for the notification on a phone."""
    content: dict[str, Any] = {
        "text": escaped(message.lines[0], LINE_CHARS_MAX),
        "blocks": blocks(message),
        "unfurl_links": False,
        "unfurl_media": False,
    }
    url, channel = urldefrag(context.url)
    if not is_bot(context.url):
        return WebRequest(context.url, encoded(content))
    content["channel"] = channel
    if context.thread:
        # The end of an incident is also shown in the channel: who read only the first message learns of it.
        content |= {"thread_ts": context.thread, "reply_broadcast": message.is_resolved}
    headers = {"content-type": "application/json; charset=utf-8", "authorization": f"Bearer {context.secret}"}
    return WebRequest(url, encoded(content), {**JSON_HEADERS, **headers})


def blocks(message: OutgoingMessage) -> list[dict[str, Any]]:
    """Header, context, the second and third line, and buttons that are links."""
    what, normal, first = message.lines
    emoji = ":white_check_mark:" if message.is_resolved else _EMOJI[message.severity]
    found: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": cut(_headline(message), HEADER_CHARS_MAX)}},
        {"type": "section", "text": _mrkdwn(f"{emoji} {escaped(what, LINE_CHARS_MAX)}")},
    ]
    if rest := "\n".join(escaped(line, LINE_CHARS_MAX // 2) for line in (normal, first) if line):
        found.append({"type": "section", "text": _mrkdwn(rest)})
    if facts := _facts(message):
        found.append({"type": "context", "elements": [_mrkdwn(escaped(facts, FIELD_CHARS_MAX))]})
    if buttons := [_button(title, url) for title, url in message.buttons() if len(url) <= BUTTON_URL_CHARS_MAX]:
        found.append({"type": "actions", "elements": buttons})
    return found


def escaped(text: str, chars_max: int) -> str:
    """Text that Slack shows as it is: no mention, no link and no channel. An escape is not cut in two.

    >>> escaped("<!channel> & co", 40)
    '&lt;!channel&gt; &amp; co'
    """
    return texts.escaped(text, lambda char: _ESCAPES.get(char, char), chars_max)


def read(status: int, body: str) -> ReplyReading:
    """The bot's API answers 200 whatever happened: its body says whether the message was posted."""
    if not 200 <= status < 300 or not body.lstrip().startswith("{"):
        return read_status(status, body)
    try:
        answer = json.loads(body)
    except ValueError:
        return ReplyReading("answered 200 with a body that is not JSON")
    if answer.get("ok"):
        return ReplyReading(thread=str(answer.get("ts") or ""))
    error = str(answer.get("error") or "no reason")[:200]
    return ReplyReading(f"answered {status}: {error}", is_final=error not in _PASSES)


def _headline(message: OutgoingMessage) -> str:
    state = "resolved" if message.is_resolved else message.severity if message.is_about_incident else message.type
    what = message.data.get("kind") or message.data.get("action") or "message"
    return f"{state}: {what} in {message.job}" if message.job else f"{state}: {what}"


def _facts(message: OutgoingMessage) -> str:
    data = message.data
    facts = (("project", data.get("project")), ("owner", data.get("owner")), ("attempt", data.get("attempt")))
    return " · ".join(f"{name} {value}" for name, value in (*facts, ("since", data.get("onset_time"))) if value)


def _mrkdwn(text: str) -> dict[str, Any]:
    # verbatim: Slack makes no links and mentions of what looks like one.
    return {"type": "mrkdwn", "text": text, "verbatim": True}


def _button(title: str, url: str) -> dict[str, Any]:
    text = {"type": "plain_text", "text": cut(title, BUTTON_TEXT_CHARS_MAX)}
    return {"type": "button", "text": text, "url": url, "action_id": title.lower().replace(" ", "_")}


SLACK = WebType(
    label="Slack",
    example="https://hooks.slack.com/services/…",
    key_help="token of a bot, for chat.postMessage",
    check=check,
    request=request,
    read=read,
)
