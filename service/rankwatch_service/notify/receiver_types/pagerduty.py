"""PagerDuty, Events API v2: an incident triggers and resolves an alert under the key of its group."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import sha256
from typing import Any, Final

from rankwatch_service.notify.receiver_types.base import SendContext, WebRequest, WebType, read_status
from rankwatch_service.notify.receiver_types.message import OutgoingMessage, cut, encoded

EVENTS_PATH: Final = "/v2/enqueue"

SUMMARY_CHARS_MAX: Final = 1_024
DEDUP_KEY_CHARS_MAX: Final = 255
EVENT_BYTES_MAX: Final = 512 * 1024
"""Largest event. A message of `BODY_BYTES_MAX` bytes, with the links and the text again, stays far below it."""

_ROUTING_KEY: Final = re.compile(r"[A-Za-z0-9]{32}", re.ASCII)


def check(url: str, secret: str) -> None:
    """Check the address of the events API and the integration key.

    Raises:
        ValueError: either cannot work.
    """
    if not url.endswith(EVENTS_PATH):
        raise ValueError(
            "the URL of PagerDuty's events API is https://events.pagerduty.com/v2/enqueue, or "
            "https://events.eu.pagerduty.com/v2/enqueue in Europe"
        )
    if not _ROUTING_KEY.fullmatch(secret):
        raise ValueError(
            "the secret must be the integration key of an Events API v2 integration: 32 letters and digits"
        )


def request(message: OutgoingMessage, context: SendContext) -> WebRequest:
    """Trigger or resolve an alert."""
    event: dict[str, Any] = {
        "routing_key": context.secret,
        "event_action": "resolve" if message.is_resolved else "trigger",
        "dedup_key": dedup_key(message.group_key),
    }
    if not message.is_resolved:
        event |= {
            "payload": {
                **_payload(message),
                "severity": message.severity,
                "component": message.data.get("scope") or "job",
                "group": message.job,
                "class": message.data.get("kind") or message.type,
            },
            "client": "rankwatch",
            "client_url": message.links.get("incident") or context.public_url,
            "links": _links(message),
        }
    return WebRequest(context.url, encoded(event))


def dedup_key(group_key: str) -> str:
    """The group's key, or its hash where it is longer than PagerDuty accepts."""
    return (
        group_key if len(group_key) <= DEDUP_KEY_CHARS_MAX else sha256(group_key.encode(errors="replace")).hexdigest()
    )


def _payload(message: OutgoingMessage) -> Mapping[str, Any]:
    hosts = message.data.get("hosts") or []
    return {
        "summary": cut(message.lines[0], SUMMARY_CHARS_MAX),
        "source": hosts[0] if hosts else message.job or "rankwatch",
        "timestamp": message.timestamp,
        "custom_details": message.data,
    }


def _links(message: OutgoingMessage) -> list[dict[str, str]]:
    return [{"href": url, "text": title} for title, url in message.buttons()]


PAGERDUTY = WebType(
    label="PagerDuty",
    example="https://events.pagerduty.com/v2/enqueue",
    key_help="integration key",
    check=check,
    request=request,
    read=read_status,
)
