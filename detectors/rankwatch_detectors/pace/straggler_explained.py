"""Explains what the straggler detector judges, and what it does not: ranks, and hosts and switches as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from rankwatch_detectors.base import Finding, Frame
from rankwatch_detectors.explanation.explained import Detectable
from rankwatch_detectors.explanation.suspect import Suspect
from rankwatch_detectors.pace.slow_places import SlowPlaces
from rankwatch_detectors.pace.witnessed import WitnessedDetector
from rankwatch_detectors.scope import ScopeLevel


class ExplainedStraggler(WitnessedDetector):
    """Base of the straggler detector."""

    _places: SlowPlaces

    def suspects(self, frame: Frame) -> Sequence[Suspect]:
        """Ranks, hosts and switches with half of the evidence that is reported, or more."""
        places = self._places.suspects() if frame.family != "values" else ()
        return [*super().suspects(frame), *places] if places else super().suspects(frame)

    def crossed(self, finding: Finding) -> Suspect | None:
        """The evidence of the run; None for differences that are reported without one."""
        return self._places.crossed(finding) if finding.scope in self._places.episodes else super().crossed(finding)

    def needed(self, crossed: Suspect, rows: int) -> float | None:
        """The mean ratio that would have been reported."""
        if crossed.scope.level is not ScopeLevel.RANK:
            return self._places.needed(crossed.scope, rows)
        return super().needed(crossed, rows)

    def detectable(self) -> Sequence[Detectable]:
        """By each witness for ranks, and for hosts and switches as a whole."""
        return [*super().detectable(), *self._places.detectable()]
