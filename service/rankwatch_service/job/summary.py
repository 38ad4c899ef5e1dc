"""Summaries of a job and of its attempts, for people. Pure; no decision depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import AttemptStart, Frame
from rankwatch_service.incidents.model import unix_ns
from rankwatch_service.job.assembler import Assembler
from rankwatch_service.job.topology_state import TopologyState
from rankwatch_service.numbers import as_json

REPORTING_S: Final = 10.0
"""A rank counts as reporting if its progress arrived within this time; agents send it once a second."""

LOST_S: Final = 30.0
"""A job without telemetry for this long is shown as lost."""

STALLED_S: Final = 60.0
STALLED_STEPS: Final = 20
"""A job that finishes no step for the longer of both is shown as stalled, even if no hang is open: a person may have
resolved it, or the ranks wait for one that was lost."""

LONG_PHASES: Final = frozenset({"compile", "eval", "checkpoint_save", "checkpoint_load"})
"""Phases in which no step is expected to finish."""

LOG_NOT_UNDERSTOOD: Final = "log_not_understood"
"""The phase of a followed log of which no line was read as a step, and the state of its job."""

SHOWN: Final = (
    "state",
    "attempt",
    "world_size",
    "ranks_reporting",
    "step",
    "step_time_s",
    "loss",
    "last_seen_unix_ns",
    "last_progress_unix_ns",
)
"""Fields of the summary that the feed carries: all that lists of jobs show of it."""


@dataclass(frozen=True, slots=True)
class JobSummary:
    """Summary of a job, as pages and the REST API show it."""

    name: str
    state: str
    """running, paused, stalled, lost or ended."""
    attempt: str
    world_size: int
    ranks_reporting: int
    step: int
    """The newest step that all ranks have finished; -1 before the first."""
    step_time_s: float | None
    """None: not known, also where the lines of a log have no times."""
    loss: float | str | None
    """Mean over the ranks that report it; NaN, Inf and -Inf as words, which JSON numbers cannot express."""
    first_seen_unix_ns: int
    last_seen_unix_ns: int
    last_progress_unix_ns: int | None
    dropped: Mapping[str, int]
    """Counts of what did not reach the detectors or the charts, by reason."""
    configuration: tuple[Mapping[str, Any], ...] = ()
    """The newest changes of the configuration, oldest first: {what, step, unix_ns}."""
    accelerated: bool = True
    """As `TopologyState.accelerated` says."""

    def shown(self) -> dict[str, Any]:
        """The fields that the feed carries."""
        return {name: getattr(self, name) for name in SHOWN}


@dataclass(frozen=True, slots=True)
class AttemptTopology:
    """The ranks of an attempt, as far as they have reported."""

    world_size: int
    ranks: tuple[wire.RankInfo, ...]
    """By rank, without parameter names."""
    can: frozenset[str]
    """The actions that every rank can carry out."""
    replicated: bool
    shared_slices: tuple[tuple[int, ...], ...]
    """Groups of ranks that must hold the same bits of a sharded model."""
    watched: str
    """One line on what is watched in the training loop, from the rank that reports it; empty if none does."""


@dataclass(frozen=True, slots=True)
class AttemptChange:
    """New facts about an attempt. A field that is None stays as it was."""

    number: int | None = None
    """Counts the attempts of the job from 1; set when the attempt starts."""
    started_unix_ns: int | None = None
    ended_unix_ns: int | None = None
    topology: AttemptTopology | None = None
    first_step: int | None = None
    last_step: int | None = None

    def merged(self, later: AttemptChange) -> AttemptChange:
        """Both changes as one; `later` wins if both set a field."""
        values = {one.name: getattr(later, one.name) for one in fields(later)}
        return replace(self, **{name: value for name, value in values.items() if value is not None})


class SummaryBuilder:
    """Builds the summary of one job from frames, orders and attempts."""

    def __init__(self, job: str) -> None:
        self.attempt = ""
        self._job = job
        self._newest: JobSummary | None = None
        self._attempts = 0
        self._first_seen_ns: int | None = None
        self._paused = False
        self._loss: float | str | None = None
        self._progress_ns: int | None = None
        self._ordered_ns = 0
        self._steps: dict[str, list[int]] = {}

    @property
    def is_new(self) -> bool:
        """Whether no summary of this job was made yet."""
        return self._newest is None

    @property
    def first_seen_unix_ns(self) -> int | None:
        """When the job was first seen, stream time; None before its first summary."""
        return self._first_seen_ns

    def order(self, action: str, phase: str, now_s: float, *, paused: bool = False) -> None:
        """Apply the new phase of an order, in which the ranks are `paused` already or not."""
        self._ordered_ns = unix_ns(now_s)
        self._paused = paused or (action == "pause" and phase == "do")

    def frame(self, frame: Frame, now_s: float) -> None:
        """Add a closed frame."""
        if frame.family == "steps":
            self._progress_ns = unix_ns(now_s)
            first = self._steps.get(frame.attempt, [frame.step])[0]
            self._steps[frame.attempt] = [first, frame.step]
        if "loss" in frame.values:
            reported = frame.values["loss"][frame.present["loss"]]
            self._loss = as_json(float(np.mean(reported))) if len(reported) else None

    def attempt_started(self, start: AttemptStart, topology_state: TopologyState, now_s: float) -> AttemptChange:
        """The change of an attempt that starts, or whose topology became better known."""
        topology = AttemptTopology(
            world_size=topology_state.world_size,
            ranks=tuple(topology_state.infos),
            can=topology_state.can,
            replicated=start.topology.replicated,
            shared_slices=topology_state.shared_slices,
            watched=next((info.watched for info in topology_state.infos if info.watched), ""),
        )
        if start.attempt == self.attempt:
            return AttemptChange(topology=topology)
        self.attempt, self._paused = start.attempt, False
        self._attempts += 1
        return AttemptChange(number=self._attempts, started_unix_ns=unix_ns(now_s), topology=topology)

    def attempts_progressed(self, ended_unix_ns: int | None) -> dict[str, AttemptChange]:
        """By attempt, the steps finished since the last call.

        Args:
            ended_unix_ns: when the newest attempt ended; None if it runs.
        """
        changes = {
            attempt: AttemptChange(first_step=first, last_step=last) for attempt, (first, last) in self._steps.items()
        }
        if ended_unix_ns is not None and self.attempt:
            ended = AttemptChange(ended_unix_ns=ended_unix_ns)
            changes[self.attempt] = changes.get(self.attempt, AttemptChange()).merged(ended)
        self._steps = {attempt: steps for attempt, steps in self._steps.items() if attempt == self.attempt}
        return changes

    def begin_without_snapshot(self, first_seen_unix_ns: int | None, attempt: str, attempts: int) -> None:
        """Read from the tables what telemetry does not contain: the newest attempt, and the number of attempts."""
        self._first_seen_ns, self.attempt, self._attempts = first_seen_unix_ns, attempt, attempts

    def changed(
        self,
        assembler: Assembler,
        received_s: float,
        now_s: float,
        hung: bool,
        without_effect: Mapping[str, int],
        configuration: tuple[Mapping[str, Any], ...] = (),
    ) -> JobSummary | None:
        """The summary as of now; None if it has not changed.

        Args:
            assembler: the job's assembler.
            received_s: when its telemetry last arrived, stream time.
            now_s: stream time.
            hung: whether a hang of the running attempt is open.
            without_effect: events without effect, counted by reason.
            configuration: the newest changes of the configuration.
        """
        if self._first_seen_ns is None:
            self._first_seen_ns = unix_ns(now_s)
        board = assembler.board
        summary = JobSummary(
            name=self._job,
            state=self._state(assembler, received_s, now_s, hung),
            attempt=assembler.attempt or self.attempt,
            world_size=assembler.topology_state.world_size,
            ranks_reporting=0 if board is None else board.reporting(now_s, REPORTING_S),
            step=assembler.last_step,
            step_time_s=assembler.step_time_s or None,
            loss=self._loss,
            first_seen_unix_ns=self._first_seen_ns,
            last_seen_unix_ns=unix_ns(received_s),
            last_progress_unix_ns=self._progress_ns,
            dropped=dict(sorted({**assembler.dropped, **without_effect}.items())),
            configuration=configuration,
            accelerated=assembler.topology_state.accelerated,
        )
        if summary == self._newest:
            return None
        self._newest = summary
        return summary

    def _state(self, assembler: Assembler, received_s: float, now_s: float, hung: bool) -> str:
        if assembler.ended:
            return "ended"
        if now_s - received_s > LOST_S:
            return "lost"
        if self._paused:
            return "paused"
        if assembler.last_step < 0 and assembler.board is not None and assembler.board.any_in((LOG_NOT_UNDERSTOOD,)):
            return LOG_NOT_UNDERSTOOD
        return "stalled" if hung or self._stands_still(assembler, now_s) else "running"

    def _stands_still(self, assembler: Assembler, now_s: float) -> bool:
        if self._progress_ns is None or assembler.last_step < 0 or assembler.board is None:
            return False
        # Counted from the newest order too: after a long pause the newest step is old.
        allowed_s = max(STALLED_S, STALLED_STEPS * (assembler.step_time_s or 0.0))
        since_ns = max(self._progress_ns, self._ordered_ns)
        return unix_ns(now_s) - since_ns > allowed_s * 1e9 and not assembler.board.any_in(LONG_PHASES)

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            "attempt": self.attempt,
            "row": None if self._newest is None else asdict(self._newest),
            "attempts": self._attempts,
            "first_seen_ns": self._first_seen_ns,
            "paused": self._paused,
            "loss": self._loss,
            "progress_ns": self._progress_ns,
            "ordered_ns": self._ordered_ns,
            "steps": self._steps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` gave."""
        self.attempt, self._attempts = state["attempt"], state["attempts"]
        row = state["row"]
        self._newest = row and JobSummary(**row | {"configuration": tuple(row["configuration"])})
        self._first_seen_ns, self._paused = state["first_seen_ns"], state["paused"]
        self._loss, self._steps = state["loss"], dict(state["steps"])
        self._progress_ns, self._ordered_ns = state["progress_ns"], state["ordered_ns"]
