"""Transitions of incidents: what the correlator reports, and what becomes of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from rankwatch_service.incidents.model import Incident, unix_ns
from rankwatch_service.incidents.version import IncidentVersion


class TransitionKind(StrEnum):
    """What a transition is. Receivers are notified of opened, updated and resolved."""

    OPENED = "opened"
    UPDATED = "updated"
    EVIDENCE = "evidence"
    ACKNOWLEDGED = "acknowledged"
    UNACKNOWLEDGED = "unacknowledged"
    COMMENTED = "commented"
    RESOLVED = "resolved"


MATTERS: Final = (TransitionKind.OPENED, TransitionKind.UPDATED, TransitionKind.EVIDENCE)
"""Transitions after which cost, suggestion and the policy's action are decided again."""


@dataclass(slots=True)
class Update:
    """A change of an incident before it has a number and becomes a transition."""

    incident: Incident
    what: TransitionKind
    text: str
    actor: str = "stream"
    fields: dict[str, Any] = field(default_factory=dict)


def reported_once(updates: list[Update]) -> list[Update]:
    """Of several updates of one incident at once, only the first notifies: it shows the incident after all of them."""
    seen: set[str] = set()
    for update in updates:
        if update.what is TransitionKind.UPDATED and update.incident.id in seen:
            update.what = TransitionKind.EVIDENCE
        if update.what in (TransitionKind.OPENED, TransitionKind.UPDATED):
            seen.add(update.incident.id)
    return updates


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of one incident, with the incident as it is after it."""

    number: int
    what: TransitionKind
    actor: str
    text: str
    fields: Mapping[str, Any]
    time_s: float
    incident: IncidentVersion

    @property
    def at_unix_ns(self) -> int:
        """When it happened."""
        return unix_ns(self.time_s)
