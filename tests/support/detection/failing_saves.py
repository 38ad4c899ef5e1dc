"""A small job whose saves and restores fail, and a detector that is told of it."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

from rankwatch_detectors.base import AttemptStart, Change, Finding, Observation, Occurrence, Tick
from rankwatch_detectors.dispatch import DispatchingDetector
from tests.support.values.presences import ATTEMPT, frame, topology

NO_ROOM = {"type": "OSError", "message": "[Errno 28] No space left on device", "errno": errno.ENOSPC}
BROKEN = {"type": "RuntimeError", "message": "Connection closed by peer [::1]:4242"}
UNREADABLE = {"type": "RuntimeError", "message": "PytorchStreamReader failed reading zip archive"}


class SavingJob:
    """A job of four ranks at a step a second, whose detector is asked after each event and each second."""

    def __init__(self, detector: DispatchingDetector) -> None:
        self.detector = detector
        self.attempt = ATTEMPT
        self.now_s = 0.0
        self.step = 0
        self.said: list[Finding] = []
        self.begin(ATTEMPT)

    def begin(self, attempt: str, ranks: int = 4, *, lockstep: bool = True) -> None:
        self.attempt = attempt
        self.observe(AttemptStart(attempt, replace(topology(ranks), lockstep=lockstep), self.now_s))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.observe(frame(self.step, {"step_time_s": [1.0] * 4}, attempt=self.attempt, time_s=self.now_s))
            self.step += 1
            self.stand(1)

    def stand(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self.observe(Tick(self.now_s, None))

    def row(self, rank: int, step: int) -> None:
        """A row of one rank alone, after the frame of its step has closed."""
        row = frame(step, {"step_time_s": [1.0] * 4}, attempt=self.attempt, time_s=self.now_s)
        row.present["step_time_s"][:] = [number == rank for number in range(4)]
        self.observe(replace(row, late=True))

    def hear(self, kind: str, rank: int | None = None, step: int | None = None, **fields: Any) -> None:
        step = self.step if step is None else step
        self.observe(Occurrence(kind, self.attempt, "node-1", self.now_s, rank, step, fields))

    def fail(self, rank: int = 0, what: str = "save", **fields: Any) -> None:
        error = {} if "type" in fields else NO_ROOM if what == "save" else UNREADABLE
        # A step saves within itself; what is loaded, is loaded between two steps.
        step = fields.pop("step", self.step - (what == "restore"))
        self.hear("checkpoint_failed", rank, step, what=what, **error, **fields)

    def save(self, *ranks: int, step: int | None = None, **fields: Any) -> None:
        for rank in ranks or (0,):
            self.hear("checkpoint_saved", rank, step, **{"tier": "local", "shards": 0, **fields})

    def observe(self, observation: Observation) -> None:
        self.said += self.detector.observe(observation)

    @property
    def changes(self) -> list[Change]:
        return [finding.change for finding in self.said]
