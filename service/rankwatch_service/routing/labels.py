"""The labels of an incident, by which it is routed, and what a message says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

ALERT_NAME: Final = "alertname"

LABEL_NAMES: Final = (
    ALERT_NAME,
    "kind",
    "severity",
    "job",
    "project",
    "owner",
    "attempt",
    "scope",
    "host",
    "rank",
)
"""Labels that incidents have. One that would be empty is missing."""

_BRIEF: Final = (
    "id",
    "short_id",
    "job",
    "project",
    "owner",
    "attempt",
    "kind",
    "severity",
    "scope",
    "summary",
    "text",
    "rank_count",
    "onset_step",
    "onset_time",
    "resolved_time",
    "links",
)


def incident_labels(data: Mapping[str, Any]) -> dict[str, str]:
    """The labels of an incident.

    `host` and `rank` are there if it is about exactly one. `alertname` is the kind in the usual form of alerts:
    `rank_lost` is `RankLost`.

    Args:
        data: the field `data` of its message (`policy.notification.incident_message`).
    """
    hosts, ranks = data["hosts"], data["ranks"]
    labels = {
        ALERT_NAME: data["kind"].title().replace("_", ""),
        **{name: data[name] for name in ("kind", "severity", "job", "project", "owner", "attempt", "scope")},
        "host": hosts[0] if len(hosts) == 1 else "",
        "rank": str(ranks[0]) if len(ranks) == 1 else "",
    }
    return {name: value for name, value in labels.items() if value}


def brief(data: Mapping[str, Any]) -> dict[str, Any]:
    """What the message of a group says of one incident, from the field `data` of its own message."""
    return {name: data[name] for name in _BRIEF}
