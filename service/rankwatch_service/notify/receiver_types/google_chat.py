"""Google Chat: a card for the webhook of a space, in a thread for each group."""

from __future__ import annotations

from hashlib import sha256
from html import escape
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from rankwatch_service.notify.receiver_types.base import SendContext, WebRequest, WebType, read_status, without_secret
from rankwatch_service.notify.receiver_types.message import OutgoingMessage, cut, encoded, escaped

TITLE_CHARS_MAX: Final = 200
LINE_CHARS_MAX: Final = 1_300
"""Of each of three lines with its escapes: 15,600 bytes; a message may have 32,000, of which six links take 12,300."""

REPLY: Final = "&messageReplyOption=REPLY_MESSAGE_FALLBACK_TO_NEW_THREAD"


def check(url: str, secret: str) -> None:
    """Check that a URL is that of a space's webhook.

    Raises:
        ValueError: it is not, or there is a secret.
    """
    without_secret(url, secret)
    parts = urlsplit(url)
    if not parts.path.endswith("/messages") or not {"key", "token"} <= parse_qs(parts.query).keys():
        raise ValueError(
            "the URL of a space's webhook is https://chat.googleapis.com/v1/spaces/…/messages?key=…&token=…"
        )


def request(message: OutgoingMessage, context: SendContext) -> WebRequest:
    """The three lines as a card, with buttons that are links."""
    thread = sha256(message.group_key.encode(errors="replace")).hexdigest()
    content = {
        "fallbackText": cut(message.lines[0], TITLE_CHARS_MAX),
        "cardsV2": [{"cardId": message.id, "card": card(message)}],
        "thread": {"threadKey": thread},
    }
    return WebRequest(context.url + REPLY, encoded(content))


def card(message: OutgoingMessage) -> dict[str, Any]:
    """The card. Texts are escaped: a job's name cannot become a link."""
    state = "resolved" if message.is_resolved else message.severity
    title = cut(f"{state}: {message.data.get('kind') or message.type}", TITLE_CHARS_MAX)
    widgets: list[dict[str, Any]] = [
        {"textParagraph": {"text": escaped(line, escape, LINE_CHARS_MAX)}} for line in message.lines if line
    ]
    if buttons := [_button(name, url) for name, url in message.buttons()]:
        widgets.append({"buttonList": {"buttons": buttons}})
    return {
        "header": {"title": title, "subtitle": cut(message.job, TITLE_CHARS_MAX)},
        "sections": [{"widgets": widgets}],
    }


def _button(title: str, url: str) -> dict[str, Any]:
    return {"text": title, "onClick": {"openLink": {"url": url}}}


GOOGLE_CHAT = WebType(
    label="Google Chat",
    example="https://chat.googleapis.com/v1/spaces/…",
    check=check,
    request=request,
    read=read_status,
)
