"""An incident as it is after one of its transitions: a frozen value for receivers, the store and the pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankwatch_detectors.base import Kind, Severity
from rankwatch_detectors.scope import IncidentScope


@dataclass(frozen=True, slots=True)
class Consequence:
    """One consequence of the first mover, in short."""

    kind: Kind
    scope: IncidentScope
    ranks: tuple[int, ...]
    summary: str
    step: int | None
    """Its onset."""

    def fields(self) -> dict[str, Any]:
        """As JSON, for the list `consequences` and the fields of a transition."""
        return {
            "kind": str(self.kind),
            "scope": str(self.scope),
            "ranks": list(self.ranks),
            "summary": self.summary,
            "step": self.step,
        }


@dataclass(frozen=True, slots=True)
class IncidentVersion:
    """One incident after transition number `transitions`. Its mappings hold plain JSON types, without NaN."""

    id: str
    job: str
    attempt: str
    kind: Kind
    scope: IncidentScope
    episode: int
    severity: Severity
    state: str
    """open, acknowledged or resolved."""
    ranks: tuple[int, ...]
    """Culprits, first mover first; empty if it is about the whole job."""
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    onset_step: int | None
    detected_step: int | None
    resolved_step: int | None
    onset_unix_ns: int
    detected_unix_ns: int
    updated_unix_ns: int
    resolved_unix_ns: int | None
    score: float
    confidence: float
    cause: str
    summary: str
    evidence: Mapping[str, Any]
    consequences: tuple[Consequence, ...]
    changes_before: tuple[Mapping[str, Any], ...]
    """What changed shortly before the onset: {what, step, unix_ns}."""
    impact_gpu_hours_per_hour: float
    suggestion: Mapping[str, Any]
    checkpoint: str | None
    transitions: int
    acknowledged_by: str | None

    @property
    def kinds(self) -> frozenset[Kind]:
        """Its own kind and those of its consequences."""
        return frozenset({self.kind, *(consequence.kind for consequence in self.consequences)})
