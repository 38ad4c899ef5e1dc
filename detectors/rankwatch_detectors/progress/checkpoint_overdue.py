"""Reports a job that trains on but has stopped saving checkpoints: what it would lose grows with every step.

How often a job saves is learned from its own saves to disk; captures in memory do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rankwatch_detectors.base import AttemptStart, Finding, Frame, Kind, Occurrence, Severity
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.progress.checkpoint_reports import DiskReport
from rankwatch_detectors.scope import WHOLE_JOB
from rankwatch_detectors.words import lasting


@dataclass(frozen=True, slots=True)
class CheckpointOverdueConfig:
    """Settings of the checkpoint_overdue detector."""

    gaps_min: int = 3
    """Gaps between saves from which it is known how often the job saves."""
    gaps_kept: int = 8
    """Newest gaps, of which the longest counts: jobs save by steps, by time, or both."""
    factor: float = 3.0
    """A save is overdue after so many of the longest gaps, in steps and in seconds: two saves have then been missed."""
    seconds_min: float = 600.0
    """What is lost in less is not worth a message."""


class CheckpointOverdueDetector(DispatchingDetector):
    """Scope "job". Memory: constant."""

    kind: Kind = Kind.CHECKPOINT_OVERDUE
    LEARNED_FOR_GOOD: ClassVar[tuple[str, ...]] = ("_gaps",)
    STATE: ClassVar[str] = "_gaps _last _saved _disk"

    def __init__(self, config: CheckpointOverdueConfig) -> None:
        super().__init__()
        self.name = "checkpoint_overdue"
        self.version = 3
        self._config = config
        self._gaps: list[list[float]] = []
        """Steps and seconds between saves that followed each other within an attempt."""
        self._last: list[float] | None = None
        """Step and time of the newest save; before the first one, of the attempt's first step."""
        self._saved = False
        """The attempt has saved."""
        self._disk = DiskReport()

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:
        del start, new_launch
        if new_attempt:
            self._last, self._saved = None, False
        return ()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.kind == "accepted" and self.kind in occurrence.fields.get("kinds", ()):
            self._gaps = []
            return self._end(None, "The pace of saves was accepted.")
        if occurrence.kind == "checkpoint_disk":
            self._disk.add(occurrence)
            return ()
        of_disk = occurrence.kind == "checkpoint_saved" and occurrence.fields.get("tier") != "memory"
        if not of_disk or occurrence.step is None or occurrence.attempt != self.attempt:
            return ()
        step = float(occurrence.step)
        if self._last is not None and step <= self._last[0]:
            return ()  # another rank's part of the same save
        if self._last is not None and self._saved:
            self._gaps = [*self._gaps, [step - self._last[0], self.now_s - self._last[1]]][-self._config.gaps_kept :]
        self._last, self._saved = [step, self.now_s], True
        return self._end(occurrence.step, f"A checkpoint of step {step:.0f} was saved.")

    def _end(self, step: int | None, why: str) -> Sequence[Finding]:
        return self.episodes.close(WHOLE_JOB, step, self.now_s, why) if WHOLE_JOB in self.episodes else ()

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        if frame.family != "steps":
            return ()
        if self._last is None:
            self._last = [float(frame.step), self.now_s]
        if len(self._gaps) < self._config.gaps_min or WHOLE_JOB in self.episodes:
            return ()
        steps, seconds = frame.step - self._last[0], self.now_s - self._last[1]
        usual_steps, usual_s = (max(gap[axis] for gap in self._gaps) for axis in (0, 1))
        config = self._config
        if steps < config.factor * usual_steps or seconds < max(config.factor * usual_s, config.seconds_min):
            return ()
        since = f"since step {self._last[0]:.0f}" if self._saved else "in this attempt"
        return self.episodes.open(
            WHOLE_JOB,
            attempt=self.attempt,
            severity=Severity.WARNING,
            onset_step=int(self._last[0] + usual_steps),
            detected_step=frame.step,
            onset_time_s=self._last[1] + usual_s,
            detected_time_s=self.now_s,
            score=steps / usual_steps,
            confidence=0.9,
            summary=f"No checkpoint was saved {since}, for {steps:.0f} steps ({lasting(seconds)}); "
            f"usually the job saves within {usual_steps:.0f} steps ({lasting(usual_s)}).{self._disk.sentence}",
            evidence={
                "last_step": int(self._last[0]),
                "steps_since": int(steps),
                "since_s": seconds,
                "usual_steps": usual_steps,
                "usual_s": usual_s,
                **({"disk": self._disk.evidence} if self._disk.evidence else {}),
            },
            cause="disk" if self._disk.is_full else "",
        )
