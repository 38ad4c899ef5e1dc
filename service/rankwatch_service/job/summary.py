"""The rows by which people see a job and its attempts. Pure; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from rankwatch_detectors.base import AttemptStart, Frame
from rankwatch_service.incidents.model import unix_ns
from rankwatch_service.job.assembler import Assembler
from rankwatch_service.job.topology_state import Roster
from rankwatch_service.numbers import as_json

REPORTING_S: Final = 10.0
"""A rank whose progress was heard within this is reporting; agents send it once a second."""

LOST_S: Final = 30.0
"""A job that nothing was heard of for so long is shown as lost."""

STALLED_S: Final = 60.0
STALLED_STEPS: Final = 20
"""A job that finishes no step for the longer of both is shown as stalled, also where no hang is open: a person may
have resolved it, or its ranks wait for one that was lost."""

LONG_PHASES: Final = frozenset({"compile", "eval", "checkpoint_save", "checkpoint_load"})
"""Phases in which a rank says that no step is to be expected."""


class Portrait:
    """What one job looks like from outside."""

    def __init__(self, job: str) -> None:
        self.attempt = ""
        self._job = job
        self._row: dict[str, Any] | None = None
        self._attempts = 0
        self._first_seen_ns: int | None = None
        self._paused = False
        self._loss: float | str | None = None
        self._progress_ns: int | None = None
        self._ordered_ns = 0
        self._steps: dict[str, list[int]] = {}

    @property
    def is_new(self) -> bool:
        """Whether no row of this job was made yet."""
        return self._row is None

    def order(self, action: str, phase: str, now_s: float) -> None:
        """An order entered a phase."""
        self._ordered_ns = unix_ns(now_s)
        if action == "pause":
            self._paused = phase == "do"

    def frame(self, frame: Frame, now_s: float) -> None:
        """A frame closed."""
        if frame.family == "steps":
            self._progress_ns = unix_ns(now_s)
            first = self._steps.get(frame.attempt, [frame.step])[0]
            self._steps[frame.attempt] = [first, frame.step]
        if "loss" in frame.values:
            told = frame.values["loss"][frame.present["loss"]]
            self._loss = as_json(float(np.mean(told))) if len(told) else None

    def attempt_row(self, start: AttemptStart, roster: Roster, now_s: float) -> dict[str, Any]:
        """Columns of the attempt that starts, or whose topology became better known."""
        columns: dict[str, Any] = {
            "world_size": roster.world_size,
            "topology": {
                "ranks": [
                    {
                        name: value
                        for name, value in msgspec.structs.asdict(info).items()
                        if name not in ("world_size", "parameters", "replicated", "can", "watched")
                    }
                    for info in roster.infos
                ],
                "can": sorted(roster.can),
                "replicated": start.topology.replicated,
                "watched": next((info.watched for info in roster.infos if info.watched), ""),
            },
        }
        if start.attempt != self.attempt:
            self.attempt, self._paused = start.attempt, False
            self._attempts += 1
            columns |= {"number": self._attempts, "started_unix_ns": unix_ns(now_s), "ended_unix_ns": None}
        return columns

    def attempt_steps(self, ended_unix_ns: int | None) -> dict[str, dict[str, Any]]:
        """Columns of attempts that have finished steps since the last call; earlier attempts are over."""
        rows: dict[str, dict[str, Any]] = {}
        for attempt, (first, last) in self._steps.items():
            rows[attempt] = {"first_step": first, "last_step": last}
        if ended_unix_ns is not None and self.attempt:
            rows.setdefault(self.attempt, {})["ended_unix_ns"] = ended_unix_ns
        self._steps = {attempt: steps for attempt, steps in self._steps.items() if attempt == self.attempt}
        return rows

    def begin_cold(self, first_seen_unix_ns: int | None, attempt: str, attempts: int) -> None:
        """Take over what the tables say and telemetry does not: the newest attempt, and how many there were."""
        self._first_seen_ns, self.attempt, self._attempts = first_seen_unix_ns, attempt, attempts

    def job_row(self, assembler: Assembler, heard_s: float, now_s: float, hung: bool) -> dict[str, Any] | None:
        """Columns of the job, or None if none of them changed. `hung`: a hang is open."""
        if self._first_seen_ns is None:
            self._first_seen_ns = unix_ns(now_s)
        board = assembler.board
        row = {
            "name": self._job,
            "state": self._state(assembler, heard_s, now_s, hung),
            "attempt": assembler.attempt or self.attempt,
            "world_size": assembler.roster.world_size,
            "ranks_reporting": 0 if board is None else board.reporting(now_s, REPORTING_S),
            "step": assembler.last_step,
            "step_time_s": assembler.step_time_s,
            "loss": self._loss,
            "first_seen_unix_ns": self._first_seen_ns,
            "last_seen_unix_ns": unix_ns(heard_s),
            "last_progress_unix_ns": self._progress_ns,
            "dropped": assembler.dropped,
        }
        if row == self._row:
            return None
        self._row = row
        return row

    def _state(self, assembler: Assembler, heard_s: float, now_s: float, hung: bool) -> str:
        if assembler.ended:
            return "ended"
        if now_s - heard_s > LOST_S:
            return "lost"
        if self._paused:
            return "paused"
        return "stalled" if hung or self._stands_still(assembler, now_s) else "running"

    def _stands_still(self, assembler: Assembler, now_s: float) -> bool:
        if self._progress_ns is None or assembler.last_step < 0 or assembler.board is None:
            return False
        allowed_s = max(STALLED_S, STALLED_STEPS * (assembler.step_time_s or 0.0))
        since_ns = max(self._progress_ns, self._ordered_ns)
        return unix_ns(now_s) - since_ns > allowed_s * 1e9 and not assembler.board.any_in(LONG_PHASES)

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            "attempt": self.attempt,
            "row": self._row,
            "attempts": self._attempts,
            "first_seen_ns": self._first_seen_ns,
            "paused": self._paused,
            "loss": self._loss,
            "progress_ns": self._progress_ns,
            "ordered_ns": self._ordered_ns,
            "steps": self._steps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave."""
        self.attempt, self._row, self._attempts = state["attempt"], state["row"], state["attempts"]
        self._first_seen_ns, self._paused = state["first_seen_ns"], state["paused"]
        self._loss, self._steps = state["loss"], dict(state["steps"])
        self._progress_ns, self._ordered_ns = state.get("progress_ns"), state.get("ordered_ns", 0)
