"""Whom an incident with given labels would go to: an answer for people, before it happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankwatch_service.labels.incident_labels import ALERT_NAME, alert_name
from rankwatch_service.routing.route import Route, Routing


def tried_routes(routing: Routing, labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """The routes that take an incident, with its group and the timing of its messages, in JSON types.

    An `alertname` that is not given is that of the kind, as incidents have it.
    """
    if "kind" in labels:
        labels = {ALERT_NAME: alert_name(labels["kind"]), **labels}
    return [delivery_of(route) | {"group": route.group_key(labels)} for route in routing.root.matching(labels)]


def delivery_of(route: Route) -> dict[str, Any]:
    """Whom a route notifies and when, in JSON types."""
    return {
        "receiver": route.receiver,
        "route": route.key,
        "group_wait_s": route.group_wait_s,
        "group_interval_s": route.group_interval_s,
        "repeat_interval_s": route.repeat_interval_s,
        "escalations": [{"after_s": one.after_s, "receiver": one.receiver} for one in route.escalations],
        "mute_time_intervals": list(route.mute_time_intervals),
        "active_time_intervals": list(route.active_time_intervals),
    }
