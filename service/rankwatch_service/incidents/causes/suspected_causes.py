"""Conditions of hardware as suspected causes of a hang. Pure.

A job that stands still is what people must act on, so a condition such as a port that goes down never titles a hang: it
stays an incident of its own, and the evidence of the hang names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rankwatch_detectors.base import Kind
from rankwatch_service.incidents.causes.causation import may_be_suspected
from rankwatch_service.incidents.model import Incident
from rankwatch_service.incidents.placement import Placement
from rankwatch_service.incidents.transition import TransitionKind, Update
from rankwatch_service.short_ids import short

SUSPECTED: Final = "suspected_causes"
"""Field of the evidence of a hang: incident, kind and summary of each."""

NOT_THE_NETWORK: Final = "not_the_network"
"""Field of the evidence of a hang: why no condition of the network is its cause."""


def suspect(incidents: Sequence[Incident], placement: Placement) -> list[Update]:
    """Set the suspected causes of the open hangs, and report each that is new to its hang. Notifies nobody.

    Args:
        incidents: the open ones.
        placement: of the ranks.
    """
    updates = []
    for hang in (incident for incident in incidents if incident.kind is Kind.HANG and incident.first.is_open):
        known = {cause["incident"] for cause in hang.evidence.get(SUSPECTED, ())}
        for other in incidents:
            part = next((part for part in other.parts if may_be_suspected(part, hang.first, placement)), None)
            if part is None or short(other.id) in known or _ruled_out(part.kind, hang.evidence):
                continue
            cause = {"kind": str(part.kind), "incident": short(other.id), "summary": part.summary}
            hang.evidence = {**hang.evidence, SUSPECTED: [*hang.evidence.get(SUSPECTED, ()), cause]}
            updates.append(Update(hang, TransitionKind.EVIDENCE, f"suspected cause: {part.summary}"))
    return updates


def without_ruled_out(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """The evidence of a hang without the suspected causes that the rest of it rules out."""
    causes = [cause for cause in evidence.get(SUSPECTED, ()) if not _ruled_out(cause["kind"], evidence)]
    rest = {name: value for name, value in evidence.items() if name != SUSPECTED}
    return {**rest, SUSPECTED: causes} if causes else rest


def _ruled_out(kind: str, evidence: Iterable[str]) -> bool:
    return kind == Kind.NETWORK_DEGRADED and NOT_THE_NETWORK in evidence
