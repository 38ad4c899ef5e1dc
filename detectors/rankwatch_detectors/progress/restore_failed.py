"""Reports that a checkpoint could not be loaded, after a rollback or a relaunch, and that training does not go on.

It ends with the first step that each rank that failed trains afterwards, in whichever attempt.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rankwatch_detectors.base import AttemptStart, Finding, Frame, Kind, Occurrence, Presence, Severity
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.ends.teardown import ENDS, end_of, is_request
from rankwatch_detectors.progress.checkpoint_reports import (
    DISK,
    RESTORE,
    Failure,
    RankFailures,
    also,
    error_of,
    evidence_of,
    failure_of,
    launch_of,
    ranks_of,
)
from rankwatch_detectors.progress.progress_timeout import HangConfig
from rankwatch_detectors.scope import WHOLE_JOB

_HANG = HangConfig()


@dataclass(frozen=True, slots=True)
class RestoreFailedConfig:
    """Settings of the restore_failed detector: how long a rank that has failed to restore may make no step."""

    ordered_s: float = 60.0
    """After an ordered rollback, if its error may be the consequence of another rank's."""
    load_s: float = dict(_HANG.long_phases)["checkpoint_load"]
    """A script may go on from another checkpoint: as long as the hang detector lets it load one ..."""
    first_step_s: float = _HANG.first_step_s
    """... and before its first step, from none: start, compilation and first collectives follow."""


class RestoreFailedDetector(DispatchingDetector):
    """Scope "job". Memory: that of `RankFailures`."""

    kind: Kind = Kind.RESTORE_FAILED
    TAKES_LATE: ClassVar[bool] = True
    STATE: ClassVar[str] = "lockstep _suspected _failed _has_ended"

    def __init__(self, config: RestoreFailedConfig) -> None:
        super().__init__()
        self.name = "restore_failed"
        self.version = 3
        self._config = config
        self._suspected = RankFailures()
        """Failures after which the rank may yet go on by itself."""
        self._failed = RankFailures()
        """Those of the open episode."""
        self._has_ended = False
        """A rank of this attempt has ended, so that the restores of others may fail."""

    def _begin(self, start: AttemptStart) -> list[Finding]:
        # A new attempt must not close this kind's episode, as it does for other kinds: only training does.
        if start.attempt != self.attempt:
            self._has_ended = False
        self.attempt, self.world_size = start.attempt, start.topology.world_size
        self.lockstep = start.topology.lockstep
        return []

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        if frame.family != "steps" or not (self._suspected or self._failed):
            return ()
        for failures in (self._suspected, self._failed):
            failures.take_out(lambda one: _is_over(one, frame))
        if self._failed or WHOLE_JOB not in self.episodes:
            return ()
        return self._end(frame.step, f"Training goes on with step {frame.step}.")

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:
        del presence
        return self._report()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.kind == "accepted" and self.kind in occurrence.fields.get("kinds", ()):
            return self._end(occurrence.step, "The incident was resolved.")
        if occurrence.kind in ENDS:
            return self._ended(occurrence)
        is_of_restore = occurrence.fields.get("what") == RESTORE
        if occurrence.kind == "checkpoint_loaded" or (occurrence.kind == "checkpoint_succeeded" and is_of_restore):
            self._suspected.drop(occurrence.rank)
        if occurrence.kind == "checkpoint_failed" and is_of_restore and occurrence.rank is not None:
            failure = failure_of(occurrence)
            self._suspect(failure)
            return self._report_first() if self._wait_s(failure) == 0.0 else ()
        return ()

    def _suspect(self, failure: Failure) -> None:
        self._suspected.drop(failure["rank"])  # the newest try counts
        follows = self._has_ended and failure["follows"]
        if not follows and self._failed.get(failure["rank"], failure["tier"]) is None:
            self._suspected.add(failure)

    def _ended(self, occurrence: Occurrence) -> Sequence[Finding]:
        """A rank has ended: on request, or because of its failed restore, or so that the restores of others failed."""
        if launch_of(occurrence.attempt) != launch_of(self.attempt):
            return ()
        end = end_of(occurrence, self.now_s)
        if is_request(end):
            self._suspected.drop(occurrence.rank)
            return ()
        if not self._has_ended:
            self._has_ended = True
            self._suspected.take_out(lambda one: one["follows"])
        own = self._suspected.get(occurrence.rank, DISK)
        if own is None or (_is_first_start(own) and own["type"] not in end["error"]):
            return ()
        own["ended"] = True
        return self._report_first()

    def _stands_still(self, failure: Failure) -> bool:
        """Whether its rank does not go on by itself any more."""
        return bool(failure["ended"]) or self.now_s - failure["time_s"] >= self._wait_s(failure)

    def _wait_s(self, failure: Failure) -> float:
        """How long the rank may make no step."""
        if failure["ordered"]:
            # After a rollback that failed on one rank, no rank goes on.
            return self._config.ordered_s if failure["follows"] else 0.0
        if _is_first_start(failure):
            return math.inf
        return self._config.first_step_s if failure["step"] < 0 else self._config.load_s

    def _report_first(self) -> list[Finding]:
        """Report at once what opens the episode; ranks that join it are reported together, with the next tick."""
        return [] if WHOLE_JOB in self.episodes else self._report()

    def _report(self) -> list[Finding]:
        stuck = self._suspected.take_out(self._stands_still) if self._suspected else []
        if not stuck:
            return []
        for one in stuck:
            self._failed.add(one)
        failures = self._failed.shown
        first = failures[0]
        words: dict[str, Any] = {
            "ranks": ranks_of(failures),
            "detected_step": _step_of(first),
            "detected_time_s": self.now_s,
            "summary": self._summary(first, also(len(failures) - 1)),
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
        self._failed.clear()
        return self.episodes.close(WHOLE_JOB, step, self.now_s, why) if WHOLE_JOB in self.episodes else ()

    def _summary(self, first: Failure, others: str) -> str:
        what = f"checkpoint {first['checkpoint']}" if first["checkpoint"] else "the checkpoint"
        where = f" from {first['path']}" if first["path"] else ""
        still = " The job stands still." if self.lockstep else ""
        return f"Rank {first['rank']} could not load {what}{where}{others}{error_of(first)}.{still}"


def _is_over(failure: Failure, frame: Frame) -> bool:
    """Whether the rank has trained a step after the failure, or is none of the job any more."""
    later = frame.attempt != failure["attempt"] or frame.step > failure["step"]
    rank = failure["rank"]
    return later and any(rank >= present.size or present[rank] for present in frame.present.values())


def _is_first_start(failure: Failure) -> bool:
    """Whether there was nothing to load yet when the rank began, as a script finds out by trying to."""
    is_absent = failure["errno"] == errno.ENOENT or failure["type"] == "FileNotFoundError"
    return is_absent and failure["step"] < 0 and not failure["ordered"]


def _step_of(failure: Failure) -> int | None:
    """The step of the checkpoint, so that what is advised is older; else that at which the rank stood, if any."""
    reported = failure["checkpoint"].rpartition(":")[2]
    return int(reported) if reported.isdecimal() else failure["step"] if failure["step"] >= 0 else None
