"""The signed webhook, as Standard Webhooks describes it: the message itself, with an id and a signature."""

from __future__ import annotations

from rankwatch_service.notify.receiver_types.base import (
    JSON_HEADERS,
    ReplyReading,
    SendContext,
    WebRequest,
    WebType,
    signed_headers,
    signing_key,
)
from rankwatch_service.notify.receiver_types.message import OutgoingMessage


def check(url: str, secret: str) -> None:
    """Check the signing secret.

    Raises:
        ValueError: it is malformed.
    """
    del url
    signing_key(secret)


def request(message: OutgoingMessage, context: SendContext) -> WebRequest:
    """The message, signed for this try.

    Raises:
        ValueError: the secret is malformed.
    """
    signed = signed_headers(context.secret, message.id, context.unix_ns // 1_000_000_000, message.body)
    return WebRequest(context.url, message.body, {**JSON_HEADERS, **signed})


def read(status: int, body: str) -> ReplyReading:
    """Any 2xx is a delivery. All else is tried again but 410, which disables the receiver: it is people's own code."""
    del body
    return ReplyReading() if 200 <= status < 300 else ReplyReading(f"answered {status}")


WEBHOOK = WebType(
    label="Webhook, signed",
    example="https://example.com/hook",
    key_help="whsec_…, or empty for a new one",
    check=check,
    request=request,
    read=read,
    reads_body=False,
)
