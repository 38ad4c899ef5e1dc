"""The base of detectors that can say why they reported something, and why not earlier."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final

from rankwatch_detectors.base import Finding, Frame, StepKind
from rankwatch_detectors.dispatch import DispatchingDetector, typical
from rankwatch_detectors.explanation.suspect import Suspect, Suspicion
from rankwatch_detectors.state import Stateful


class LeftOut(StrEnum):
    """Why a row was not judged."""

    OWN_PACE = "ranks go at their own pace"
    ALONE = "no other rank to compare with"
    LATE = "arrived after its step had closed"
    NOT_TRAINING = "evaluation or checkpoint"
    NOT_MEASURED = "not measured"
    NOT_FINITE = "not finite"
    FIRST_ROWS = "first rows of an attempt"
    WARM_UP = "what is usual was not known yet"


JUDGED: Final = "judged"
TRAIN, EVAL, CHECKPOINT, LATE = *(kind.value for kind in StepKind), "late"
CURVES: Final = ("loss", "grad_norm")
NOT_FINITE: Final = {metric: f"{metric} not finite" for metric in CURVES}
DETECTABLE_ROWS: Final = (6, 16, 64, 256, 1024)
"""Rows since the onset for which the smallest fault is computed."""


@dataclass(frozen=True, slots=True)
class Detectable:
    """The smallest fault of one sort that would be reported today."""

    fault: str
    """Such as "a slow rank"."""
    unit: str
    """ratio: to what is usual; value: of the curve."""
    noise: float
    """Standard deviation of one row, or of the mean over the rows that `fault` names: as a share of what is usual, or
    of the curve's value."""
    sizes: tuple[tuple[int, float | None], ...]
    """By rows since the onset: the smallest size; None: none is reported so early."""


class FrameCounts(Stateful):
    """Frames of one attempt by what can be said of them without a detector."""

    STATE: ClassVar[tuple[str, ...]] = ("attempt", "_counts")

    def __init__(self) -> None:
        self.attempt = ""
        self._counts: dict[str, int] = {}

    def after(self, frame: Frame) -> FrameCounts:
        """The counts with one more frame; these stay as they are."""
        counted = FrameCounts()
        counted.attempt = frame.attempt
        counted._counts = counts = dict(self._counts) if frame.attempt == self.attempt else {}
        if frame.awaits_times:
            return counted
        what = LATE if frame.late else frame.kind.value
        if frame.family != "values":
            counts[what] = counts.get(what, 0) + 1
        if what == TRAIN:
            for metric in CURVES:
                if metric in frame.values:
                    key = metric if typical(frame, metric) is not None else NOT_FINITE[metric]
                    counts[key] = counts.get(key, 0) + 1
        return counted

    def __getitem__(self, what: str) -> int:
        return self._counts.get(what, 0)


class ExplainedDetector(DispatchingDetector):
    """Call `suspects` after `observe`, with the same frame."""

    def rows(self, counts: FrameCounts) -> dict[str, int]:
        """Rows of the attempt by what became of them: judged, or the reason why not."""
        rows: dict[str, int] = self._rows_of_steps(counts)
        if self.COMPARES_RANKS and not self.lockstep:
            rows = {LeftOut.OWN_PACE: sum(rows.values())}
        others: dict[str, int] = {LeftOut.NOT_TRAINING: counts[EVAL] + counts[CHECKPOINT], LeftOut.LATE: counts[LATE]}
        return {str(reason): count for reason, count in {**rows, **others}.items() if count}

    @abstractmethod
    def _rows_of_steps(self, counts: FrameCounts) -> dict[str, int]:
        """The same for rows of training steps that came in time."""

    @abstractmethod
    def suspects(self, frame: Frame) -> Sequence[Suspect]:
        """What the row speaks for: statistics from half of their threshold on."""

    @abstractmethod
    def crossed(self, finding: Finding) -> Suspect | None:
        """The statistic of a finding that has just been opened; None if no threshold decided."""

    def before(self, crossed: Suspect, step: int, time_s: float) -> list[Suspicion]:  # noqa: ARG002
        """What is known of rows before a finding that no row announced.

        Args:
            crossed: the statistic of the finding.
            step: of its detection.
            time_s: of its detection.
        """
        return []

    @abstractmethod
    def needed(self, crossed: Suspect, rows: int) -> float | None:
        """The size that would have been reported this many rows after the onset; None: none, however large."""

    @abstractmethod
    def detectable(self) -> Sequence[Detectable]:
        """The smallest faults that would be reported today."""


def split(taken: int, first: int, warm: int) -> dict[str, int]:
    """Rows that a detector took, by what became of them.

    Args:
        taken: their number.
        first: how many are skipped at first.
        warm: how many of the others are needed to know what is usual.
    """
    first = min(taken, first)
    warm = min(taken - first, warm)
    return {JUDGED: taken - first - warm, LeftOut.FIRST_ROWS: first, LeftOut.WARM_UP: warm}
