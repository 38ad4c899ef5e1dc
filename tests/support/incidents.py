"""Rows of incidents, transitions, receivers and silences, as the tables have them."""

from typing import Any

NOON_UNIX_NS = 1_760_000_000_000_000_000
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8GKYo="


def incident_row(**changes: Any) -> dict[str, Any]:
    row = {
        "id": "inc_1",
        "number": 7,
        "job": "gpt-small",
        "attempt": "launch.0",
        "kind": "straggler",
        "scope": "rank:3",
        "episode": 1,
        "severity": "warning",
        "state": "open",
        "ranks": [3],
        "hosts": ["node-a"],
        "devices": ["GPU-3"],
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
        "consequences": [],
        "changes_before": [],
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
    return row | changes


def transition_row(what: str = "opened", number: int = 1, **changes: Any) -> dict[str, Any]:
    row = {
        "incident_id": "inc_1",
        "number": number,
        "what": what,
        "actor": "stream",
        "text": "",
        "fields": {},
        "at_unix_ns": NOON_UNIX_NS + number * 1_000_000,
    }
    return row | changes


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


def silence_row(**changes: Any) -> dict[str, Any]:
    row = {
        "id": "sil_1",
        "job": "",
        "kind": "",
        "scope": "",
        "starts_unix_ns": NOON_UNIX_NS - 1,
        "ends_unix_ns": NOON_UNIX_NS + 60_000_000_000,
        "created_by": "sam",
        "comment": "known",
    }
    return row | changes
