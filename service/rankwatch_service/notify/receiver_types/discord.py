"""Discord: an embed for the webhook of a channel."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

from rankwatch_service.notify.receiver_types.base import SendContext, WebRequest, WebType, read_status, without_secret
from rankwatch_service.notify.receiver_types.message import OutgoingMessage, cut, encoded, escaped

WEBHOOK_PATH: Final = "/api/webhooks/"
TITLE_CHARS_MAX: Final = 256
DESCRIPTION_CHARS_MAX: Final = 4_096
LINE_CHARS_MAX: Final = 1_000
"""Of each of three lines with its escapes: about a thousand characters are left for links."""

_COLOURS: Final = {"critical": 0xD32F2F, "warning": 0xF9A825, "info": 0x1976D2}
_RESOLVED_COLOUR: Final = 0x2E7D32


def check(url: str, secret: str) -> None:
    """Check that a URL is that of a channel's webhook.

    Raises:
        ValueError: it is not, or there is a secret.
    """
    without_secret(url, secret)
    if not urlsplit(url).path.startswith(WEBHOOK_PATH):
        raise ValueError(f"the URL of a channel's webhook is https://discord.com{WEBHOOK_PATH}ID/TOKEN")


def request(message: OutgoingMessage, context: SendContext) -> WebRequest:
    """The three lines as an embed, which mentions nobody, with links below them as far as there is room."""
    return WebRequest(context.url, encoded({"embeds": [embed(message)], "allowed_mentions": {"parse": []}}))


def embed(message: OutgoingMessage) -> dict[str, Any]:
    """The embed. Texts are escaped: a job's name cannot become a link or a mention."""
    state = "resolved" if message.is_resolved else message.severity
    description = "\n\n".join(_plain(line) for line in message.lines if line)
    for title, url in message.buttons():
        link = f"[{title}]({url.replace(')', '%29')})"
        if len(description) + len(link) + 2 <= DESCRIPTION_CHARS_MAX:
            description += f"\n\n{link}"
    return {
        "title": cut(f"{state}: {message.data.get('kind') or message.type}", TITLE_CHARS_MAX),
        "description": description,
        "color": _RESOLVED_COLOUR if message.is_resolved else _COLOURS[message.severity],
        "timestamp": message.timestamp,
    }


def _plain(text: str) -> str:
    # Discord takes a backslash before any other sign; one before a colon also ends what looks like a URL.
    return escaped(text, lambda char: char if char.isalnum() or char.isspace() else f"\\{char}", LINE_CHARS_MAX)


DISCORD = WebType(
    label="Discord", example="https://discord.com/api/webhooks/…", check=check, request=request, read=read_status
)
