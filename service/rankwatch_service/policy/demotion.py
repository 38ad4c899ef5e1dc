"""What is proposed for a kind of incident that is mostly noise. Pure: people decide about it."""

from __future__ import annotations

from rankwatch_service.policy.policy import Mode, Policy
from rankwatch_service.policy.precision import Precision


def demotion(kind: str, precision: Precision, policy: Policy) -> str:
    """What to do about a kind of low precision, for people; empty if its precision is not low."""
    if not precision.is_low:
        return ""
    acting = [rule for rule in policy.rules if rule.mode is Mode.ACT and rule.kind in ("", kind)]
    if not acting:
        return "no rule acts on it: leave it out of the receivers that page people"
    ids = ", ".join(rule.id for rule in acting)
    if all(rule.kind for rule in acting):
        return f"set the mode of {ids} to suggest"
    return f"put a rule for {kind} with mode suggest before {ids}"
