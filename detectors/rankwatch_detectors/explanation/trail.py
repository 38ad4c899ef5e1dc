"""The statistics of a job row by row, as long as they speak for something, and which rows were left out.

Nothing here decides anything: it is kept to explain a finding when it is opened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import Change, Finding, Frame, Observation, StepKind
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

Points = dict[str, list[list[Any]]]
"""By statistic of a scope: step, stream time, value, threshold, rows, size, what is missing."""


class Trails(Stateful):
    """The trails of one job, and the frames of its attempt."""

    STATE: ClassVar[tuple[str, ...]] = ("counts", "_trails")

    def __init__(self) -> None:
        self.counts = FrameCounts()
        self._trails: dict[str, Points] = {}
        """By detector."""

    def count(self, observations: Sequence[Observation]) -> list[FrameCounts]:
        """Count the frames that detectors are given next; returns the counts as of each observation."""
        counts = []
        for one in observations:
            if isinstance(one, Frame):
                if one.attempt != self.counts.attempt:
                    self._trails = {}
                self.counts = self.counts.after(one)
            counts.append(self.counts)
        return counts

    def take(
        self, detector: ExplainedDetector, frame: Frame, findings: Sequence[Finding], counts: FrameCounts
    ) -> list[dict[str, Any]]:
        """Take a frame that a detector has just been given.

        Args:
            detector: the detector; it has not been given the next frame yet.
            frame: the frame.
            findings: what the detector found in it.
            counts: the frames as of this one.

        Returns:
            Explanations of what it opened.
        """
        opened = [finding for finding in findings if finding.change is Change.OPEN] if findings else ()
        told = [why for finding in opened if (why := self._why(detector, finding, counts)) is not None]
        if frame.kind is StepKind.TRAIN and not frame.late:
            suspects = detector.suspects(frame)
            if suspects:
                _follow(self._trails.setdefault(detector.name, {}), suspects, frame)
        return told

    def forget(self, detector: str) -> None:
        """Drop the trails of a detector."""
        self._trails.pop(detector, None)

    def _why(self, detector: ExplainedDetector, finding: Finding, counts: FrameCounts) -> dict[str, Any] | None:
        crossed = detector.crossed(finding)
        if crossed is None:
            return None
        known = self._trails.get(detector.name, {}).get(_key(crossed), [])
        at = (finding.detected_step or 0, finding.detected_time_s)
        before = known or [_point(one.suspect, one.step, one.time_s) for one in detector.before(crossed, *at)]
        points = [*before, _point(crossed, *at)]
        return explanation(finding, crossed, points, detector.rows(counts), detector.needed)


def _follow(trails: Points, suspects: Sequence[Suspect], frame: Frame) -> None:
    for suspect in suspects:
        key = _key(suspect)
        points = trails.pop(key, [])
        if points and frame.step - points[-1][0] > GAP_STEPS:
            points = []
        points.append(_point(suspect, frame.step, frame.time_s))
        if len(points) >= POINTS_MAX:
            del points[: POINTS_MAX // 2 : 2]
        trails[key] = points
    while len(trails) > TRAILS_MAX:
        del trails[next(iter(trails))]


def _key(suspect: Suspect) -> str:
    return f"{suspect.scope} {suspect.source} {suspect.statistic}"


def _point(suspect: Suspect, step: int, time_s: float) -> list[Any]:
    size = suspect.size if math.isfinite(suspect.size) else None
    return [step, time_s, suspect.value, suspect.threshold, suspect.rows, size, str(suspect.missing)]
