"""Which incidents a silence mutes, by their labels."""

from __future__ import annotations

from rankwatch_service.policy.control_records import SilenceSet
from rankwatch_service.routing.matcher import Labels


def is_muted_by(silence: SilenceSet, labels: Labels, now_unix_ns: int) -> bool:
    """Whether a silence mutes an incident now, by the rules of `policy.routing.mutes`."""
    scopes = ("", labels["scope"], f"host:{labels.get('host')}", f"rank:{labels.get('rank')}")
    return (
        silence.starts_unix_ns <= now_unix_ns < silence.ends_unix_ns
        and silence.job in ("", labels["job"])
        and silence.kind in ("", labels["kind"])
        and silence.scope in scopes
    )
