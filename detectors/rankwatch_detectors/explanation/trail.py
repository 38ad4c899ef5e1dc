"""The statistics of a job row by row, as long as they speak for something, and which rows were left out.

Nothing here decides anything: it is kept to explain a finding when it is opened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import Change, Finding, Frame, StepKind
from rankwatch_detectors.explanation.explained import ExplainedDetector, FrameCounts
from rankwatch_detectors.explanation.record import explanation
from rankwatch_detectors.explanation.suspect import Suspect
from rankwatch_detectors.state import Stateful

POINTS_MAX: Final = 240
"""Points of a trail. When it is full, every second one of its older half is dropped."""

TRAILS_MAX: Final = 32
"""Trails kept of a detector, the newest: those of 16 ranks by two witnesses. Five detectors have 38,400 points at most,
which take 2 MB; usually there are a hundred."""

GAP_STEPS: Final = 1_024
"""A trail without a point for more steps than this begins anew."""

CALM_POINTS: Final = 32
"""Points that are kept of a curve that speaks for nothing."""

Points = dict[str, list[list[Any]]]
"""By statistic of a scope: step, stream time, value, threshold, rows, size, what is missing."""


class Trails(Stateful):
    """The trails of one job, and the frames of its attempt."""

    STATE: ClassVar[tuple[str, ...]] = ("counts", "_trails")

    def __init__(self) -> None:
        self.counts = FrameCounts()
        self._trails: dict[str, Points] = {}
        """By detector."""

    def take(
        self, detectors: Sequence[ExplainedDetector], frame: Frame, findings: Sequence[Finding]
    ) -> list[dict[str, Any]]:
        """Take a frame that the detectors have just been given; returns explanations of what they opened."""
        if frame.attempt != self.counts.attempt:
            self._trails = {}
        self.counts.push(frame)
        told = [
            self._why(detector, finding)
            for finding in findings
            for detector in detectors
            if finding.change is Change.OPEN and detector.kind is finding.kind
        ]
        if frame.kind is StepKind.TRAIN and not frame.late:
            for detector in detectors:
                suspects = detector.suspects(frame)
                if suspects:
                    _follow(self._trails.setdefault(detector.name, {}), suspects, frame)
        return [explained for explained in told if explained is not None]

    def _why(self, detector: ExplainedDetector, finding: Finding) -> dict[str, Any] | None:
        crossed = detector.crossed(finding)
        if crossed is None:
            return None
        known = self._trails.get(detector.name, {}).get(_key(crossed), [])
        points = [*known, _point(crossed, finding.detected_step or 0, finding.detected_time_s)]
        return explanation(finding, crossed, points, detector.rows(self.counts), detector.needed)


def _follow(trails: Points, suspects: Sequence[Suspect], frame: Frame) -> None:
    for suspect in suspects:
        key = _key(suspect)
        points = trails.pop(key, [])
        if points and frame.step - points[-1][0] > GAP_STEPS:
            points = []
        points.append(_point(suspect, frame.step, frame.time_s))
        if not suspect.rows:
            del points[:-CALM_POINTS]
        elif len(points) >= POINTS_MAX:
            del points[: POINTS_MAX // 2 : 2]
        trails[key] = points
    while len(trails) > TRAILS_MAX:
        del trails[next(iter(trails))]


def _key(suspect: Suspect) -> str:
    return f"{suspect.scope} {suspect.source} {suspect.statistic}"


def _point(suspect: Suspect, step: int, time_s: float) -> list[Any]:
    size = suspect.size if math.isfinite(suspect.size) else None
    return [step, time_s, suspect.value, suspect.threshold, suspect.rows, size, str(suspect.missing)]
