"""Reports a job that is restarted again and again without progress.

Progress is a step beyond the furthest so far, or a checkpoint beyond the newest one. Launches whose ranks left their
loops, were stopped by an order, or were asked to end, ended intentionally and do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rankwatch_detectors.base import AttemptStart, Finding, Frame, Kind, Occurrence, Severity
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.ends.teardown import ENDS, end_of, is_request
from rankwatch_detectors.scope import WHOLE_JOB


@dataclass(frozen=True, slots=True)
class RestartLoopConfig:
    """Settings of the restart_loop detector."""

    launches: int = 3
    """Launches in a row without progress: two may be bad luck, the third has a cause."""


class RestartLoopDetector(DispatchingDetector):
    """Scope "job". Memory: constant."""

    kind: Kind = Kind.RESTART_LOOP
    STATE: ClassVar[str] = "_furthest _saved _idle _progressed _intended _ended _started_s"

    def __init__(self, config: RestartLoopConfig) -> None:
        super().__init__()
        self.name = "restart_loop"
        self.version = 2
        self._config = config
        self._furthest = -1
        self._saved = -1
        self._idle = 0
        """Launches in a row that ended without progress and not intentionally."""
        self._progressed = False
        self._intended = False
        self._ended = False
        """A rank of this launch has ended."""
        self._started_s: list[float] = []

    def _begin(self, start: AttemptStart) -> list[Finding]:
        # A new attempt must not close this kind's episode, as it does for other kinds: only progress does.
        new_launch = start.launch != self._launch
        first = not self.attempt
        self.attempt = start.attempt
        self.world_size = start.topology.world_size
        if not new_launch:
            return []
        self._idle = 0 if first or self._progressed or self._intended else self._idle + 1
        self._progressed = self._intended = self._ended = False
        self._started_s = [*self._started_s, start.time_s][-self._config.launches - 1 :]
        if self._idle < self._config.launches or WHOLE_JOB in self.episodes:
            return []
        return self.episodes.open(
            WHOLE_JOB,
            attempt=self.attempt,
            severity=Severity.CRITICAL,
            onset_step=self._furthest,
            detected_step=self._furthest,
            onset_time_s=self._started_s[0],
            detected_time_s=self.now_s,
            score=float("inf"),
            confidence=0.9,
            summary=f"{self._idle} launches in a row ended without getting beyond step {self._furthest}.",
            evidence={"launches": self._idle, "furthest_step": self._furthest, "started_s": self._started_s},
        )

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        if frame.step <= self._furthest:
            return ()
        self._furthest = frame.step
        return self._progress(frame.step)

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.kind == "rank_left" or occurrence.fields.get("action") == "stop":
            self._intended = True
        if occurrence.kind in ENDS and not self._ended and occurrence.attempt.rpartition(".")[0] == self._launch:
            self._ended = True
            self._intended |= is_request(end_of(occurrence, self.now_s))
        if occurrence.kind == "checkpoint_saved" and occurrence.step is not None and occurrence.step > self._saved:
            self._saved = occurrence.step
            return self._progress(occurrence.step)
        return ()

    @property
    def _launch(self) -> str:
        return self.attempt.rpartition(".")[0]

    def _progress(self, step: int) -> list[Finding]:
        self._progressed = True
        self._idle = 0
        if WHOLE_JOB not in self.episodes:
            return []
        return self.episodes.close(WHOLE_JOB, step, self.now_s, f"The job makes progress again: step {step}.")
