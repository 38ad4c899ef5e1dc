"""Reports that a job could not save a checkpoint: training goes on, and what it would lose grows.

A save has failed when it raised an exception, or when a rank's part of it never came although those of the others did.
It is reported once training goes on without it: a script that catches the exception and saves at the second try has
lost nothing, and a save that fails because the job ends on request is none that anybody needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import AttemptStart, Finding, Frame, Kind, Occurrence, Presence, Severity
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.ends.teardown import ENDS, end_of, is_request
from rankwatch_detectors.progress.checkpoint_reports import (
    DISK,
    MEMORY,
    NO_ROOM,
    SAVE,
    DiskReport,
    Failure,
    RankFailures,
    also,
    error_of,
    evidence_of,
    failure_of,
    launch_of,
    ranks_of,
    tier_of,
)
from rankwatch_detectors.scope import WHOLE_JOB
from rankwatch_detectors.state import Stateful

SAVES_MAX: Final = 8
"""Newest saves that may be incomplete."""


@dataclass(frozen=True, slots=True)
class SavePartsConfig:
    """When a part of a save counts as missing."""

    wait_s: float = 300.0
    """Since the newest part came: ranks that write in the background end minutes apart."""
    factor: float = 3.0
    """The same in times the longest span between the parts of one save."""


class SaveParts(Stateful):
    """The saves of one launch to disk, of which ranks register their parts.

    A save that says how many ranks take part (`shards`) is whole when as many have registered theirs. Whose parts
    belong to any other is learned from the fullest one of the launch in its tier, and only these are looked after.
    Memory: `SAVES_MAX` numbers for a rank.
    """

    STATE: ClassVar[str] = "newest_step missed_step _usual _span_s _saves _stopped"

    def __init__(self, config: SavePartsConfig) -> None:
        self._config = config
        self.newest_step: int | None = None
        """Step of the newest complete save; None before the first of the launch."""
        self.missed_step = -1
        """Step of the save that `missing` reported last."""
        self._stopped = False
        self._usual: dict[str, dict[str, None]] = {}
        """The ranks of the fullest save, by tier."""
        self._span_s = 0.0
        self._saves: dict[str, dict[str, Any]] = {}

    def begin(self, *, new_launch: bool) -> None:
        """A new attempt begins: no further part comes of the saves before it."""
        self._saves, self._stopped = {}, False
        if new_launch:
            self._usual, self.newest_step = {}, None

    def stop(self) -> None:
        """A rank has ended: a part that is missing from now on needs no other reason."""
        self._saves, self._stopped = {}, True

    def add(self, occurrence: Occurrence, now_s: float) -> None:
        """Add a rank's part of a save (event `checkpoint_saved`)."""
        step, rank, shards = occurrence.step, occurrence.rank, occurrence.fields.get("shards")
        if step is None or rank is None:
            return
        tier = "remote" if occurrence.fields.get("tier") == "remote" else "local"
        save = self._saves.setdefault(
            str(occurrence.fields.get("checkpoint") or f"{tier}:{step}"),
            {"step": step, "tier": tier, "ranks": {}, "first_s": now_s, "shards": 0},
        )
        save["ranks"][str(rank)] = None
        save["last_s"] = now_s
        if isinstance(shards, int):
            save["shards"] = max(save["shards"], shards)
        self._span_s = max(self._span_s, now_s - save["first_s"])
        if len(save["ranks"]) >= (save["shards"] or len(self._usual.get(tier, ()))):
            self.newest_step = max(step, self.newest_step or 0)
            if not save["shards"]:
                self._usual[tier] = save["ranks"]
        while len(self._saves) > SAVES_MAX:
            del self._saves[next(iter(self._saves))]

    def missing(self, now_s: float) -> list[int]:
        """The ranks whose parts of one save are missing for too long, ascending; each save once."""
        wait_s = max(self._config.wait_s, self._config.factor * self._span_s)
        for name, save in self._saves.items():
            if not self._stopped and now_s - save["last_s"] >= wait_s:
                del self._saves[name]
                self.missed_step = save["step"]
                usual = {} if save["shards"] else self._usual[save["tier"]]
                return sorted(int(rank) for rank in usual if rank not in save["ranks"])
        return []


@dataclass(frozen=True, slots=True)
class CheckpointFailedConfig:
    """Settings of the checkpoint_failed detector."""

    wait_s: float = 120.0
    """How long a rank that makes no step may take to save at another try."""
    parts: SavePartsConfig = field(default_factory=SavePartsConfig)


class CheckpointFailedDetector(DispatchingDetector):
    """Scope "job". Memory: that of `RankFailures`, and one entry for each rank of a save, for a few saves."""

    kind: Kind = Kind.CHECKPOINT_FAILED
    STATE: ClassVar[str] = "lockstep _suspected _failed _step _has_saved _has_ended _ends_on_request _disk _parts"

    def __init__(self, config: CheckpointFailedConfig) -> None:
        super().__init__()
        self.name = "checkpoint_failed"
        self.version = 6
        self._config = config
        self._suspected = RankFailures()
        """Failures that may yet be made good."""
        self._failed = RankFailures()
        """Those of the open episode."""
        self._step = -1
        """Newest step of this attempt."""
        self._has_saved = False
        """A rank of this launch has saved to disk, which makes good what an earlier launch could not."""
        self._has_ended = False
        """A rank of this attempt has ended, so that the saves of others may fail."""
        self._ends_on_request = False
        self._disk = DiskReport()
        self._parts = SaveParts(config.parts)

    def _begin(self, start: AttemptStart) -> list[Finding]:
        # A new attempt must not close this kind's episode, as it does for other kinds: only a save does.
        new_launch = start.launch != launch_of(self.attempt)
        if start.attempt != self.attempt:
            if self._ends_on_request:
                self._suspected.clear()
            self._step, self._has_ended, self._ends_on_request = -1, False, False
            self._parts.begin(new_launch=new_launch)
        if new_launch:
            self._failed.clear()  # any rank's save ends the episode: these are other processes
            self._suspected.take_out(lambda one: one["tier"] == MEMORY)  # gone with the processes
            self._has_saved = False
        self.attempt, self.world_size = start.attempt, start.topology.world_size
        self.lockstep = start.topology.lockstep
        return []

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        if frame.family == "steps":
            self._step = max(self._step, frame.step)
        return ()

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:
        del presence
        # Judged here and not with a frame: an agent sends the rows of some steps before the events of these steps.
        for rank in self._parts.missing(self.now_s):
            self._suspected.add(self._without_part(rank))
        return self._report()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.kind == "checkpoint_disk":
            self._disk.add(occurrence)
            return self._report_of_disk()
        if occurrence.kind == "checkpoint_saved":
            return self._saved(occurrence, f"A checkpoint of step {occurrence.step} was saved.")
        is_of_save = occurrence.fields.get("what") == SAVE
        if occurrence.kind == "checkpoint_succeeded" and is_of_save:
            return self._saved(occurrence, f"Rank {occurrence.rank} saved without an error in step {occurrence.step}.")
        if occurrence.kind == "accepted" and self.kind in occurrence.fields.get("kinds", ()):
            return self._end(occurrence.step, "The incident was resolved.")
        if occurrence.kind in ENDS:
            return self._ended(occurrence)
        if occurrence.kind == "checkpoint_failed" and is_of_save and occurrence.rank is not None:
            self._suspect(failure_of(occurrence))
        return ()

    def _suspect(self, failure: Failure) -> None:
        follows = self._has_ended and failure["follows"]
        made_good = self._has_saved and launch_of(failure["attempt"]) != launch_of(self.attempt)
        if not follows and not made_good and self._failed.get(failure["rank"], failure["tier"]) is None:
            self._suspected.add(failure)

    def _saved(self, occurrence: Occurrence, why: str) -> Sequence[Finding]:
        """A rank has saved: what it failed to save is made good, and what any rank of another launch did."""
        tier, launch = tier_of(occurrence), launch_of(self.attempt)
        if occurrence.kind == "checkpoint_saved" and tier == DISK and occurrence.attempt == self.attempt:
            self._parts.add(occurrence, self.now_s)
        for failures in (self._suspected, self._failed):
            failures.drop(occurrence.rank, tier)
        if tier == DISK and not self._has_saved and launch_of(occurrence.attempt) == launch:
            self._has_saved = True
            for failures in (self._suspected, self._failed):
                failures.take_out(lambda one: launch_of(one["attempt"]) != launch)
        if WHOLE_JOB not in self.episodes or self._shown_tier != tier or self._failed.has(tier):
            return ()
        if self._failed:
            return self.episodes.update(WHOLE_JOB, detected_time_s=self.now_s, **self._words())
        return self._end(occurrence.step, why)

    def _ended(self, occurrence: Occurrence) -> Sequence[Finding]:
        """A rank has ended: on request, or because of its failed save, or so that the saves of others failed."""
        if launch_of(occurrence.attempt) != launch_of(self.attempt):
            return ()
        self._parts.stop()
        if is_request(end_of(occurrence, self.now_s)):
            self._suspected.drop(occurrence.rank)
            self._ends_on_request = True
            return ()
        if not self._has_ended:
            self._has_ended = True
            self._suspected.take_out(lambda one: one["follows"])
        for tier in (DISK, MEMORY):
            if (own := self._suspected.get(occurrence.rank, tier)) is not None:
                own["ended"] = True
        # Ranks that end together are reported together: those after the first with the next tick.
        return () if WHOLE_JOB in self.episodes else self._report()

    def _is_lost(self, failure: Failure) -> bool:
        """Whether training goes on, or has ended, without what was to be saved."""
        if failure["ended"] or self._ends_on_request:
            return bool(failure["ended"])
        went_on = self._step > failure["step"] if failure["attempt"] == self.attempt else self._step >= 0
        # At their own pace other ranks are steps ahead while this one tries again.
        return (went_on and self.lockstep) or self.now_s - failure["time_s"] >= self._config.wait_s

    def _report(self) -> list[Finding]:
        lost = self._suspected.take_out(self._is_lost) if self._suspected else []
        if not lost:
            return []
        for one in lost:
            self._failed.add(one)
        first, words = self._failed.shown[0], self._words()
        step = max(self._step, first["step"])
        if WHOLE_JOB in self.episodes:
            return self.episodes.update(WHOLE_JOB, detected_step=step, detected_time_s=self.now_s, **words)
        return self.episodes.open(
            WHOLE_JOB,
            attempt=self.attempt,
            severity=Severity.WARNING,
            onset_step=max(first["step"], 0),
            detected_step=step,
            onset_time_s=first["time_s"],
            detected_time_s=self.now_s,
            score=float("inf"),
            confidence=1.0,
            **words,
        )

    def _report_of_disk(self) -> Sequence[Finding]:
        """Add to the open episode how full the file system is: agents look at it when a save has failed."""
        if WHOLE_JOB not in self.episodes or not self._failed:
            return ()
        words, reported = self._words(), self.episodes.reported(WHOLE_JOB)
        if words["cause"] == reported["cause"] and "disk" in reported["evidence"]:
            self.episodes.note(WHOLE_JOB, words["evidence"])
            return ()
        return self.episodes.update(WHOLE_JOB, **words)

    @property
    def _shown_tier(self) -> str:
        tier: str = self.episodes.reported(WHOLE_JOB)["evidence"]["tier"]
        return tier

    def _end(self, step: int | None, why: str) -> Sequence[Finding]:
        self._failed.clear()
        return self.episodes.close(WHOLE_JOB, step, self.now_s, why) if WHOLE_JOB in self.episodes else ()

    def _words(self) -> dict[str, Any]:
        """The fields of a finding on the failures: ranks, summary, evidence and cause."""
        failures = self._failed.shown
        first, disk = failures[0], self._disk.evidence
        no_room = self._disk.is_full or any(one["errno"] in NO_ROOM for one in failures)
        return {
            "ranks": ranks_of(failures),
            "summary": self._summary(first, also(len(failures) - 1)),
            "evidence": {
                **evidence_of(first),
                "newest_step": self._parts.newest_step,
                **({"disk": disk} if disk else {}),
            },
            "cause": "disk" if no_room else "",
        }

    def _summary(self, first: Failure, others: str) -> str:
        newest = self._parts.newest_step
        left = "none is registered in this launch yet"
        if newest is not None:
            lost = (first["step"] or 0) - newest
            left = f"the newest complete one is of step {newest}" + f", so {lost} steps are at risk" * (lost > 1)
        if first["missing"]:
            what = f"Rank {first['rank']} did not save its part of the checkpoint of step {first['step']}{others}"
            return f"{what}, although the others have saved theirs; {left}.{self._disk.sentence}"
        at = f" to {first['path']}" if first["path"] else ""
        what = f"Rank {first['rank']} could not save its checkpoint{at} in step {first['step']}{others}"
        return f"{what}{error_of(first)}; {left}.{self._about_disk(first)}"

    def _about_disk(self, first: Failure) -> str:
        """How full the file system of the save is; of a save without a path, that of the last save."""
        known = first["path"] or first["errno"] in NO_ROOM
        return self._disk.sentence if known else self._disk.sentence_of_last_save

    def _without_part(self, rank: int) -> Failure:
        """The failure of a rank that has reported nothing."""
        step = self._parts.missed_step
        reported = Occurrence("checkpoint_failed", self.attempt, "", self.now_s, rank, step, {})
        return failure_of(reported) | {"missing": True}
