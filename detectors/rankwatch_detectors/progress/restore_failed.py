"""Reports that a job stands still because it could not load a checkpoint, after a rollback or a relaunch.

It ends with the first step that the rank trains afterwards, in whichever attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rankwatch_detectors.base import AttemptStart, Finding, Frame, Kind, Occurrence, Presence, Severity
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.ends.teardown import ENDS, end_of, is_request
from rankwatch_detectors.episodes import EPISODES_MAX
from rankwatch_detectors.progress.checkpoint_failure import (
    RESTORE,
    Failure,
    error_of,
    evidence_of,
    failure_of,
    first_of,
    follows_from_an_end,
)
from rankwatch_detectors.scope import WHOLE_JOB


@dataclass(frozen=True, slots=True)
class RestoreFailedConfig:
    """Settings of the restore_failed detector."""

    wait_s: float = 60.0
    """How long a script may take to go on from another checkpoint, or from none."""


class RestoreFailedDetector(DispatchingDetector):
    """Scope "job". Memory: one entry for each rank that failed, at most `EPISODES_MAX`."""

    kind: Kind = Kind.RESTORE_FAILED
    STATE: ClassVar[tuple[str, ...]] = (*DispatchingDetector.STATE, "_suspected", "_failed")

    def __init__(self, config: RestoreFailedConfig) -> None:
        super().__init__()
        self.name = "restore_failed"
        self.version = 1
        self._config = config
        self._suspected: dict[str, Failure] = {}
        """By rank, failures after which the rank may yet go on by itself."""
        self._failed: dict[str, Failure] = {}
        """By rank, those of the open episode."""

    def _begin(self, start: AttemptStart) -> list[Finding]:
        # A new attempt must not close this kind's episode, as it does for other kinds: only training does.
        self.attempt, self.world_size = start.attempt, start.topology.world_size
        return []

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        if frame.family != "steps":
            return ()
        self._suspected = {rank: one for rank, one in self._suspected.items() if not _is_over(one, frame)}
        if not self._failed or not all(_is_over(one, frame) for one in self._failed.values()):
            return ()
        return self._end(frame.step, f"Training goes on with step {frame.step}.")

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:
        del presence
        limit_s = self.now_s - self._config.wait_s
        return self._report([rank for rank, one in self._suspected.items() if one["time_s"] <= limit_s])

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        rank = str(occurrence.rank)
        if occurrence.kind == "accepted" and self.kind in occurrence.fields.get("kinds", ()):
            return self._end(occurrence.step, "The incident was resolved.")
        if occurrence.kind in ENDS:
            return self._ended(occurrence)
        if occurrence.kind == "checkpoint_loaded":
            self._suspected.pop(rank, None)
        is_restore = occurrence.kind == "checkpoint_failed" and occurrence.fields.get("what") == RESTORE
        if not is_restore or occurrence.rank is None or len(self._suspected) >= EPISODES_MAX:
            return ()
        failure = self._suspected[rank] = failure_of(occurrence)
        # After a rollback that failed on one rank, no rank goes on.
        stands = occurrence.fields.get("ordered") is True and not follows_from_an_end(failure)
        return self._report([rank]) if stands else ()

    def _ended(self, occurrence: Occurrence) -> Sequence[Finding]:
        """A rank has ended: on request, or because of its failed restore, or so that the restores of others failed."""
        if occurrence.attempt.rpartition(".")[0] != self.attempt.rpartition(".")[0]:
            return ()
        rank = str(occurrence.rank)
        if is_request(end_of(occurrence, self.now_s)):
            self._suspected.pop(rank, None)
            return ()
        self._suspected = {name: one for name, one in self._suspected.items() if not follows_from_an_end(one)}
        return self._report([rank] if rank in self._suspected else [])

    def _report(self, ranks: Sequence[str]) -> list[Finding]:
        if not ranks:
            return []
        known = len(self._failed)
        for rank in ranks:
            failure = self._suspected.pop(rank)
            if len(self._failed) < EPISODES_MAX:
                self._failed.setdefault(rank, failure)
        if len(self._failed) == known:
            return []
        first = first_of(self._failed.values())
        others = sorted(one["rank"] for one in self._failed.values() if one is not first)
        words: dict[str, Any] = {
            "ranks": (first["rank"], *others),
            "detected_step": _step_of(first),
            "detected_time_s": self.now_s,
            "summary": self._summary(first),
            "evidence": evidence_of(first),
        }
        if WHOLE_JOB in self.episodes:
            return self.episodes.update(WHOLE_JOB, **words)
        return self.episodes.open(
            WHOLE_JOB,
            attempt=self.attempt,
            severity=Severity.CRITICAL,
            onset_step=_step_of(first),
            onset_time_s=first["time_s"],
            score=float("inf"),
            confidence=1.0,
            **words,
        )

    def _end(self, step: int | None, why: str) -> Sequence[Finding]:
        self._failed = {}
        return self.episodes.close(WHOLE_JOB, step, self.now_s, why) if WHOLE_JOB in self.episodes else ()

    def _summary(self, first: Failure) -> str:
        others = len(self._failed) - 1
        also = f", and so did {others} other{'s' * (others > 1)}" if others else ""
        what = f"checkpoint {first['checkpoint']}" if first["checkpoint"] else "the checkpoint"
        where = f" from {first['path']}" if first["path"] else ""
        return f"Rank {first['rank']} could not load {what}{where}{also}: {error_of(first)}. The job stands still."


def _is_over(failure: Failure, frame: Frame) -> bool:
    """Whether the rank has trained a step after the failure, or is none of the job any more."""
    later = frame.attempt != failure["attempt"] or frame.step > failure["step"]
    rank = failure["rank"]
    return later and any(rank >= present.size or present[rank] for present in frame.present.values())


def _step_of(failure: Failure) -> int | None:
    """The step of the checkpoint, so that what is advised is older; else that at which the rank stood, if any."""
    told = failure["checkpoint"].rpartition(":")[2]
    return int(told) if told.isdecimal() else failure["step"] if failure["step"] >= 0 else None
