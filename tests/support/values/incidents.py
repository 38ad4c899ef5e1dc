"""Incidents, transitions, receivers and silences: as values, and as rows of their tables."""

from typing import Any

from rankwatch_detectors.base import Kind, Severity
from rankwatch_detectors.scope import IncidentScope
from rankwatch_service.incidents.model import IncidentVersion, Transition, TransitionKind
from rankwatch_service.policy.control_records import ReceiverRoute, SilenceSet
from rankwatch_service.policy.routing import Notification, notifications
from rankwatch_service.store.rows import incident_row as row_of

NOON_UNIX_NS = 1_760_000_000_000_000_000
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="


def incident_version(**changes: Any) -> IncidentVersion:
    values: dict[str, Any] = {
        "id": "inc_1",
        "job": "gpt-small",
        "attempt": "launch.0",
        "kind": Kind.STRAGGLER,
        "scope": IncidentScope.of_rank(3),
        "episode": 1,
        "severity": Severity.WARNING,
        "state": "open",
        "ranks": (3,),
        "hosts": ("node-a",),
        "devices": ("GPU-3",),
        "onset_step": 480,
        "detected_step": 500,
        "resolved_step": None,
        "onset_unix_ns": NOON_UNIX_NS - 3_000_000_000,
        "detected_unix_ns": NOON_UNIX_NS,
        "updated_unix_ns": NOON_UNIX_NS,
        "resolved_unix_ns": None,
        "score": 12.5,
        "confidence": 0.99,
        "cause": "worker",
        "summary": "Rank 3 runs at 0.62 of its peers since step 480",
        "evidence": {"busy_s": 0.161, "peers_busy_s": 0.1, "rate": 0.62},
        "consequences": (),
        "changes_before": (),
        "impact_gpu_hours_per_hour": 1.5,
        "suggestion": {
            "action": "pause",
            "reason": "the rank is slow on its own",
            "cost_gpu_hours": 0.1,
            "alternatives": [],
        },
        "checkpoint": "memory:launch.0:450",
        "transitions": 1,
        "acknowledged_by": None,
    }
    return IncidentVersion(**values | changes)


def incident_row(**changes: Any) -> dict[str, Any]:
    return row_of(incident_version()) | changes


def transition(what: str = "opened", number: int = 1, text: str = "", **incident: Any) -> Transition:
    """A transition of an incident with these fields."""
    time_s = NOON_UNIX_NS / 1e9 + number * 1e-3
    return Transition(number, TransitionKind(what), "stream", text, {}, time_s, incident_version(**incident))


def notified(
    what: str, number: int, to: tuple[str, ...] = ("pager",), *, now_unix_ns: int, **incident: Any
) -> list[Notification]:
    """What these receivers are sent."""
    routes = [receiver_route(name) for name in to]
    told_to = () if what == "opened" else to
    return notifications(transition(what, number, **incident), routes, [], {}, now_unix_ns, told_to)


def receiver_route(name: str = "pager", **changes: Any) -> ReceiverRoute:
    return ReceiverRoute(name, **changes)


def silence(**changes: Any) -> SilenceSet:
    values = {"id": "sil_1", "job": "", "kind": "", "scope": "", "starts_unix_ns": NOON_UNIX_NS - 1}
    return SilenceSet(**values | {"ends_unix_ns": NOON_UNIX_NS + 60_000_000_000} | changes)


def receiver_row(name: str = "pager", **changes: Any) -> dict[str, Any]:
    row = {
        "name": name,
        "url": "http://127.0.0.1:9/hook",
        "secret": SECRET,
        "kinds": [],
        "severities": [],
        "jobs": [],
        "enabled": True,
        "disabled_reason": "",
        "created_unix_ns": NOON_UNIX_NS,
    }
    return row | changes
