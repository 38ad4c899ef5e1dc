"""Microsoft Teams: an adaptive card for the webhook of a Power Automate workflow."""

from __future__ import annotations

from typing import Any, Final

from rankwatch_service.notify.receiver_types.base import SendContext, WebRequest, WebType, read_status, without_secret
from rankwatch_service.notify.receiver_types.message import OutgoingMessage, cut, encoded

CARD_BYTES_MAX: Final = 28 * 1024
"""Largest message. Ours: three lines of together 1,920 characters of at most four bytes, and six links of 2,048."""

LINE_CHARS_MAX: Final = 1_000
"""Longest line; lines that rankwatch composes are shorter."""

ACTIONS_MAX: Final = 6
"""Buttons that a card shows."""

CONTENT_TYPE: Final = "application/vnd.microsoft.card.adaptive"
SCHEMA: Final = "http://adaptivecards.io/schemas/adaptive-card.json"

_COLOUR: Final = {"critical": "Attention", "warning": "Warning", "info": "Accent"}


def request(message: OutgoingMessage, context: SendContext) -> WebRequest:
    """The three lines as a card, with buttons that are links."""
    return WebRequest(
        context.url,
        encoded(
            {
                "type": "message",
                "attachments": [{"contentType": CONTENT_TYPE, "contentUrl": None, "content": card(message)}],
            }
        ),
    )


def card(message: OutgoingMessage) -> dict[str, Any]:
    """The adaptive card. Texts are runs, which know no markdown: a job's name cannot become a link or a mention."""
    what, normal, first = message.lines
    colour = "Good" if message.is_resolved else _COLOUR[message.severity]
    return {
        "$schema": SCHEMA,
        "type": "AdaptiveCard",
        "version": "1.4",
        "msteams": {"width": "Full"},
        "body": [_text(what, color=colour, weight="Bolder"), *(_text(line) for line in (normal, first) if line)],
        "actions": [
            {"type": "Action.OpenUrl", "title": title, "url": url} for title, url in message.buttons()[:ACTIONS_MAX]
        ],
    }


def _text(line: str, **style: str) -> dict[str, Any]:
    return {"type": "RichTextBlock", "inlines": [{"type": "TextRun", "text": cut(line, LINE_CHARS_MAX), **style}]}


TEAMS = WebType(
    label="Microsoft Teams",
    example="https://….webhook.office.com/…",
    check=without_secret,
    request=request,
    read=read_status,
)
