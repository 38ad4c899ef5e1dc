"""Alertmanager: its API v2, which takes alerts, and its webhook of version 4, which other tools take from it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final
from urllib.parse import urlsplit

from rankwatch_service.incidents.kinds import KINDS
from rankwatch_service.notify.receiver_types.base import SendContext, WebRequest, WebType, read_status, without_secret
from rankwatch_service.notify.receiver_types.message import SEVERITIES, OutgoingMessage, encoded
from rankwatch_service.policy.notification import TRIAL

ALERTS_PATH: Final = "/api/v2/alerts"

FIRING_S: Final = 7 * 86_400
"""How long an alert that we do not end fires: Alertmanager ends what is not sent again, and we send changes only."""

TRIAL_S: Final = 300
"""The same for a message that tries the receiver."""

_ANNOTATIONS: Final = ("command", "project", "owner", "attempt", "scope")
"""Fields of a message that may change while an incident lasts, so that they are no labels."""

NEVER: Final = "0001-01-01T00:00:00Z"
"""`endsAt` of an alert that fires, as Alertmanager writes it."""


def check_api(url: str, secret: str) -> None:
    """Check the URL of an Alertmanager.

    Raises:
        ValueError: it is not that of its API v2, or there is a secret.
    """
    without_secret(url, secret)
    if not urlsplit(url).path.endswith(ALERTS_PATH):
        raise ValueError("the URL of an Alertmanager ends with /api/v2/alerts")


def alerts_request(message: OutgoingMessage, context: SendContext) -> WebRequest:
    """The alert for the API v2: firing for `FIRING_S`, or ended. What it was before it became graver has ended too."""
    now = _iso(context.unix_ns)
    lasting_s = TRIAL_S if message.type == TRIAL else FIRING_S
    ends = now if message.is_resolved else _iso(context.unix_ns + lasting_s * 10**9)
    current = alert(message, ends)
    former = [current | {"labels": labels, "endsAt": now} for labels in _labels_before(message, current["labels"])]
    return WebRequest(context.url, encoded([current, *former]))


def webhook_request(message: OutgoingMessage, context: SendContext) -> WebRequest:
    """The webhook of version 4, with the one alert of the incident."""
    status = "resolved" if message.is_resolved else "firing"
    one = alert(message, message.data.get("resolved_time") or NEVER)
    labels = one["labels"]
    content = {
        "version": "4",
        "groupKey": message.group_key,
        "truncatedAlerts": 0,
        "status": status,
        "receiver": "rankwatch",
        "groupLabels": {name: labels[name] for name in ("alertname", "job") if name in labels},
        "commonLabels": labels,
        "commonAnnotations": one["annotations"],
        "externalURL": context.public_url,
        "notification_reason": _reason(message),
        "alerts": [one | {"status": status, "fingerprint": fingerprint(message)}],
    }
    return WebRequest(context.url, encoded(content))


def alert(message: OutgoingMessage, ends_at: str) -> dict[str, Any]:
    """One alert: labels identify it and are what people route by, annotations describe it.

    Args:
        message: about the incident, or about a command.
        ends_at: ISO 8601.
    """
    data = message.data
    what, normal, first = message.lines
    page = next((message.links[name] for name in ("incident", "job", "service") if name in message.links), "")
    annotations = {
        "summary": what,
        "description": "\n".join(line for line in (normal, first) if line),
        "dashboard_url": page,
        "runbook_url": message.links.get("runbook"),
        **{name: data.get(name) for name in _ANNOTATIONS},
    }
    return {
        "labels": _labels(message, str(data.get("kind") or message.type), message.severity),
        "annotations": {name: str(text) for name, text in annotations.items() if text},
        "startsAt": data.get("onset_time") or message.timestamp,
        "endsAt": ends_at,
        "generatorURL": page,
    }


def _labels(message: OutgoingMessage, kind: str, severity: str) -> dict[str, str]:
    labels = {"alertname": alert_name(kind), "kind": kind, "severity": severity, "job": message.job}
    return {name: text for name, text in labels.items() if text} | {"incident": message.group_key}


def _labels_before(message: OutgoingMessage, current: Mapping[str, str]) -> list[dict[str, str]]:
    """Labels under which an earlier message may have sent the same incident: another severity, or a kind that it had.

    A kind that it had is one that turns into the present one, or a consequence since its cause is known.
    """
    if message.type not in ("incident.updated", "incident.resolved"):
        return []
    kinds = {current["kind"], *(str(one["kind"]) for one in message.data.get("consequences") or ())}
    kinds |= {str(kind) for kind, traits in KINDS.items() if current["kind"] in traits.becomes}
    every = [_labels(message, kind, severity) for kind in sorted(kinds) for severity in SEVERITIES]
    return [labels for labels in every if labels != current]


def alert_name(kind: str) -> str:
    """The kind in the form of an alert's name.

    >>> alert_name("loss_spike")
    'LossSpike'
    """
    return "".join(word.capitalize() for word in kind.replace(".", "_").split("_"))


def fingerprint(message: OutgoingMessage) -> str:
    """16 hexadecimal digits that identify what the message is about, also when it becomes graver."""
    return sha256(message.group_key.encode(errors="replace")).hexdigest()[:16]


def _reason(message: OutgoingMessage) -> str:
    """Why it is sent, in Alertmanager's words."""
    if message.is_resolved:
        return "all alerts resolved"
    return "new alerts in group" if message.type == "incident.updated" else "first notification"


def _iso(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


ALERTMANAGER = WebType(
    label="Alertmanager",
    example="https://alertmanager:9093/api/v2/alerts",
    check=check_api,
    request=alerts_request,
    read=read_status,
)
ALERTMANAGER_WEBHOOK = WebType(
    label="Webhook as Alertmanager sends it",
    example="https://example.com/hook",
    check=without_secret,
    request=webhook_request,
    read=read_status,
)
