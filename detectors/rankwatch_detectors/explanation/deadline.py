"""Explains findings about time without progress, whose statistic is the time itself."""

from __future__ import annotations

from typing import Any

from rankwatch_detectors.base import Change, Finding, Kind
from rankwatch_detectors.explanation.record import explanation
from rankwatch_detectors.explanation.suspect import Statistic, Suspect


def has_deadline(finding: Finding) -> bool:
    """Whether a standstill has just been reported because of a deadline."""
    return finding.kind is Kind.HANG and finding.change is Change.OPEN and "deadline_s" in finding.evidence


def by_deadline(finding: Finding) -> dict[str, Any]:
    """The explanation of a finding that `has_deadline`."""
    told = finding.evidence
    age_s, deadline_s = float(told["age_s"]), float(told["deadline_s"])
    crossed = Suspect(finding.scope, Statistic.AGE, age_s, deadline_s, size=age_s)
    points = [
        [None, finding.onset_time_s, 0.0, deadline_s, 0, 0.0, ""],
        [None, finding.detected_time_s, age_s, deadline_s, 1, age_s, ""],
    ]
    return explanation(finding, crossed, points, {}, lambda _crossed, _rows: None)
