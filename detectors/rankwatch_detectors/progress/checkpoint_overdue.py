"""Reports a job that trains on but has stopped saving checkpoints: what it would lose grows with every step.

How often a job saves is learned from its own saves to disk; captures in memory do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rankwatch_detectors.base import AttemptStart, Finding, Frame, Kind, Occurrence, Severity
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.scope import WHOLE_JOB


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


FULL_SHARE = 0.001
"""A file system with less free space counts as full, whatever a save takes."""


SIZES = ("free_bytes", "total_bytes", "save_bytes")
PATH_CHARS_MAX = 512


class CheckpointOverdueDetector(DispatchingDetector):
    """Scope "job". Memory: constant."""

    kind: Kind = Kind.CHECKPOINT_OVERDUE
    LEARNED_FOR_GOOD: ClassVar[tuple[str, ...]] = ("_gaps",)
    STATE: ClassVar[tuple[str, ...]] = (*DispatchingDetector.STATE, "_gaps", "_last", "_saved", "_disk")

    def __init__(self, config: CheckpointOverdueConfig) -> None:
        super().__init__()
        self.name = "checkpoint_overdue"
        self.version = 1
        self._config = config
        self._gaps: list[list[float]] = []
        """Steps and seconds between saves that followed each other within an attempt."""
        self._last: list[float] | None = None
        """Step and time of the newest save; before the first one, of the attempt's first step."""
        self._saved = False
        """The attempt has saved."""
        self._disk: dict[str, Any] = {}
        """The file system of a host's newest save, as it last reported it: of a full one, else of any."""

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
            self._take_disk(occurrence)
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
        disk, is_full = self._told_of_disk()
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
            summary=f"No checkpoint was saved {since}, for {steps:.0f} steps ({seconds / 60:.0f} min); "
            f"usually the job saves within {usual_steps:.0f} steps ({usual_s / 60:.1f} min).{disk}",
            evidence={
                "last_step": int(self._last[0]),
                "steps_since": int(steps),
                "since_s": seconds,
                "usual_steps": usual_steps,
                "usual_s": usual_s,
                **({"disk": self._disk} if self._disk else {}),
            },
            cause="disk" if is_full else "",
        )

    def _take_disk(self, occurrence: Occurrence) -> None:
        """Keep a host's report; that of a full file system until the same host reports another."""
        sizes = {name: occurrence.fields.get(name) for name in SIZES}
        if not all(isinstance(size, int) and size >= 0 for size in sizes.values()):
            return
        told = {"host": occurrence.host, "path": str(occurrence.fields.get("path", ""))[:PATH_CHARS_MAX], **sizes}
        if _is_full(told) or not _is_full(self._disk) or self._disk["host"] == occurrence.host:
            self._disk = told

    def _told_of_disk(self) -> tuple[str, bool]:
        """A sentence about the file system of the saves, and whether another save does not fit on it."""
        disk = self._disk
        if not disk:
            return "", False
        state = "is full" if _is_full(disk) else "has room"
        free, total = (disk[name] / 1e9 for name in ("free_bytes", "total_bytes"))
        where = f"{disk['path']} on {disk['host']}"
        return f" The file system of {where} {state}: {free:.1f} of {total:.1f} GB are free.", _is_full(disk)


def _is_full(disk: Mapping[str, Any]) -> bool:
    return bool(disk) and disk["free_bytes"] < max(disk["save_bytes"], FULL_SHARE * disk["total_bytes"])
