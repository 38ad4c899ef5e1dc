"""The labels of an incident, by which it is routed and silenced."""

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


def incident_labels(data: Mapping[str, Any]) -> dict[str, str]:
    """The labels of an incident.

    `host` and `rank` are there if it is about exactly one. `alertname` is the kind, see `alert_name`.

    Args:
        data: the field `data` of its message (`policy.notification.incident_message`), or the same fields of what is
            known of it: kind, severity, job, project, owner, attempt, scope, hosts, ranks.
    """
    hosts, ranks = data["hosts"], data["ranks"]
    labels = {
        ALERT_NAME: alert_name(data["kind"]),
        **{name: str(data[name]) for name in ("kind", "severity", "job", "project", "owner", "attempt", "scope")},
        "host": hosts[0] if len(hosts) == 1 else "",
        "rank": str(ranks[0]) if len(ranks) == 1 else "",
    }
    return {name: value for name, value in labels.items() if value}


def alert_name(kind: str) -> str:
    """A kind in the usual form of alerts: `rank_lost` is `RankLost`."""
    return kind.title().replace("_", "")


def check_label_name(name: str) -> None:
    """Refuse a label that incidents never have.

    Raises:
        ValueError: it is none of `LABEL_NAMES`.
    """
    if name not in LABEL_NAMES:
        raise ValueError(f"incidents have no label {name!r}; they have {', '.join(LABEL_NAMES)}")
