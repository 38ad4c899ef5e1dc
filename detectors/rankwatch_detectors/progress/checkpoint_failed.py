"""Reports that a job could not save a checkpoint: training goes on, and what it would lose grows.

A save has failed when it raised an exception, or when a rank's part of it never came although those of the others did.
It is reported once training goes on without it: a script that catches the exception and saves at the second try has
lost nothing, and a save that fails because the job ends on request is none that anybody needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rankwatch_detectors.base import AttemptStart, Finding, Frame, Kind, Occurrence, Presence, Severity
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.ends.teardown import ENDS, end_of, is_request
from rankwatch_detectors.episodes import EPISODES_MAX
from rankwatch_detectors.progress.checkpoint_failure import (
    NO_ROOM,
    SAVE,
    Failure,
    error_of,
    evidence_of,
    failure_of,
    first_of,
    follows_from_an_end,
    tier_of,
)
from rankwatch_detectors.progress.disk_report import DiskReport
from rankwatch_detectors.progress.save_parts import SaveParts, SavePartsConfig
from rankwatch_detectors.scope import WHOLE_JOB


@dataclass(frozen=True, slots=True)
class CheckpointFailedConfig:
    """Settings of the checkpoint_failed detector."""

    wait_s: float = 120.0
    """How long a rank that makes no step may take to save at another try."""
    parts: SavePartsConfig = field(default_factory=SavePartsConfig)


class CheckpointFailedDetector(DispatchingDetector):
    """Scope "job". Memory: one entry for each rank of a save, for a few saves."""

    kind: Kind = Kind.CHECKPOINT_FAILED
    STATE: ClassVar[tuple[str, ...]] = (
        *DispatchingDetector.STATE,
        "_suspected",
        "_failed",
        "_step",
        "_ends_on_request",
        "_disk",
        "_parts",
    )

    def __init__(self, config: CheckpointFailedConfig) -> None:
        super().__init__()
        self.name = "checkpoint_failed"
        self.version = 1
        self._config = config
        self._suspected: dict[str, Failure] = {}
        """By rank, failures that may yet be made good."""
        self._failed: dict[str, Failure] = {}
        """By rank, those of the open episode."""
        self._step = -1
        """Newest step of this attempt."""
        self._ends_on_request = False
        self._disk = DiskReport()
        self._parts = SaveParts(config.parts)

    def _begin(self, start: AttemptStart) -> list[Finding]:
        # A new attempt must not close this kind's episode, as it does for other kinds: only a save does.
        new_launch = start.launch != self.attempt.rpartition(".")[0]
        if start.attempt != self.attempt:
            if self._ends_on_request:
                self._suspected = {}
            self._step, self._ends_on_request = -1, False
            self._parts.begin(new_launch=new_launch)
        if new_launch:
            self._failed = {}  # any rank's save ends the episode: these are other processes
        self.attempt, self.world_size = start.attempt, start.topology.world_size
        return []

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        if frame.family == "steps":
            self._step = max(self._step, frame.step)
        return ()

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:
        del presence
        # Judged here and not with a frame: an agent sends the rows of some steps before the events of these steps.
        for rank in self._parts.missing(self.now_s):
            self._suspected.setdefault(str(rank), self._without_part(rank))
        return self._report()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.kind == "checkpoint_disk":
            self._disk.take(occurrence)
            return self._tell_of_disk()
        if occurrence.kind == "checkpoint_saved":
            return self._saved(occurrence)
        if occurrence.kind == "accepted" and self.kind in occurrence.fields.get("kinds", ()):
            return self._end(occurrence.step, "The incident was resolved.")
        if occurrence.kind in ENDS:
            return self._ended(occurrence)
        is_save = occurrence.kind == "checkpoint_failed" and occurrence.fields.get("what") == SAVE
        if is_save and occurrence.rank is not None:
            known = self._failed if str(occurrence.rank) in self._failed else self._suspected
            if len(known) < EPISODES_MAX:
                known.setdefault(str(occurrence.rank), failure_of(occurrence))
        return ()

    def _saved(self, occurrence: Occurrence) -> Sequence[Finding]:
        """A rank has saved: what it failed to save is made good."""
        rank, tier = str(occurrence.rank), tier_of(occurrence)
        if tier == "disk" and occurrence.attempt == self.attempt:
            self._parts.take(occurrence, self.now_s)
        for failures in (self._suspected, self._failed):
            if rank in failures and failures[rank]["tier"] == tier:
                del failures[rank]
        if self._failed or WHOLE_JOB not in self.episodes or self._evidence_told["tier"] != tier:
            return ()
        return self._end(occurrence.step, f"A checkpoint of step {occurrence.step} was saved.")

    def _ended(self, occurrence: Occurrence) -> Sequence[Finding]:
        """A rank has ended: on request, or because of its failed save, or so that the saves of others failed."""
        if occurrence.attempt.rpartition(".")[0] != self.attempt.rpartition(".")[0]:
            return ()
        self._parts.stop()
        if is_request(end_of(occurrence, self.now_s)):
            self._suspected.pop(str(occurrence.rank), None)
            self._ends_on_request = True
            return ()
        self._suspected = {rank: one for rank, one in self._suspected.items() if not follows_from_an_end(one)}
        if (own := self._suspected.get(str(occurrence.rank))) is not None:
            own["ended"] = True
        return self._report()

    def _is_lost(self, failure: Mapping[str, Any]) -> bool:
        """Whether training goes on, or has ended, without what was to be saved."""
        if failure["ended"] or self._ends_on_request:
            return bool(failure["ended"])
        went_on = self._step > failure["step"] if failure["attempt"] == self.attempt else self._step >= 0
        return went_on or self.now_s - failure["time_s"] >= self._config.wait_s

    def _report(self) -> list[Finding]:
        lost = {rank: one for rank, one in self._suspected.items() if self._is_lost(one)}
        if not lost:
            return []
        self._suspected = {rank: one for rank, one in self._suspected.items() if rank not in lost}
        self._failed = lost | self._failed
        first = first_of(self._failed.values())
        fields = {
            "ranks": self._ranks(first),
            "detected_step": max(self._step, first["step"]),
            "detected_time_s": self.now_s,
            "summary": self._summary(first),
            "evidence": self._evidence(first),
            "cause": self._cause(self._failed.values()),
        }
        if WHOLE_JOB in self.episodes:
            return self.episodes.update(WHOLE_JOB, **fields)
        return self.episodes.open(
            WHOLE_JOB,
            attempt=self.attempt,
            severity=Severity.WARNING,
            onset_step=max(first["step"], 0),
            onset_time_s=first["time_s"],
            score=float("inf"),
            confidence=1.0,
            **fields,
        )

    def _tell_of_disk(self) -> Sequence[Finding]:
        """Add to the open episode how full the file system is: agents look at it when a save has failed."""
        if WHOLE_JOB not in self.episodes or not self._failed:
            return ()
        first, cause = first_of(self._failed.values()), self._cause(self._failed.values())
        if cause == self.episodes.told(WHOLE_JOB)["cause"] and "disk" in self._evidence_told:
            self.episodes.note(WHOLE_JOB, self._evidence(first))
            return ()
        words = {"summary": self._summary(first), "evidence": self._evidence(first), "cause": cause}
        return self.episodes.update(WHOLE_JOB, **words)

    @property
    def _evidence_told(self) -> Mapping[str, Any]:
        evidence: Mapping[str, Any] = self.episodes.told(WHOLE_JOB)["evidence"]
        return evidence

    def _end(self, step: int | None, why: str) -> Sequence[Finding]:
        self._failed = {}
        return self.episodes.close(WHOLE_JOB, step, self.now_s, why) if WHOLE_JOB in self.episodes else ()

    def _cause(self, failures: Iterable[Failure]) -> str:
        return "disk" if self._disk.is_full or any(one["errno"] in NO_ROOM for one in failures) else ""

    def _ranks(self, first: Failure) -> tuple[int, ...]:
        """The ranks that failed, the first one first."""
        others = sorted(one["rank"] for one in self._failed.values() if one is not first)
        return (first["rank"], *others)

    def _summary(self, first: Failure) -> str:
        others = len(self._failed) - 1
        also = f", and so did {others} other{'s' * (others > 1)}" if others else ""
        at = f" of {first['path']}" if first["path"] else ""
        newest = self._parts.newest_step
        left = f"the newest one is of step {newest}" if newest is not None else "none was saved in this launch before"
        if first["type"]:
            what = f"Rank {first['rank']} could not save its checkpoint{at} in step {first['step']}{also}"
            return f"{what}: {error_of(first)}; {left}.{self._disk.sentence}"
        what = f"Rank {first['rank']} did not save its part of the checkpoint of step {first['step']}{also}"
        return f"{what}, although the others have saved theirs; {left}.{self._disk.sentence}"

    def _evidence(self, first: Failure) -> dict[str, Any]:
        return {
            **evidence_of(first),
            "newest_step": self._parts.newest_step,
            **({"disk": self._disk.evidence} if self._disk.evidence else {}),
        }

    def _without_part(self, rank: int) -> Failure:
        """The failure of a rank that has told nothing."""
        step = self._parts.missed_step
        told = Occurrence("checkpoint_failed", self.attempt, "", self.now_s, rank, step, {})
        return failure_of(told)
