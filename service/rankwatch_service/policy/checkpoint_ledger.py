"""The checkpoint ledger: which saves there are, and which of them may be trusted. Pure.

A checkpoint is *incomplete* until all its shards are reported, *unproven* until training went on cleanly for
`PROOF_STEPS` after it, then *good*. It is *suspect* if it was saved at or after the onset of an incident that may have
spoilt the weights, and *gone* when what held it is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import sqrt
from typing import Final

PROOF_STEPS: Final = 20
"""Clean steps that make a checkpoint good: two fingerprints at the default of one every 10 steps."""

ENTRIES_MAX: Final = 512
"""Entries kept for each job. A save every minute fills them in 8 hours; what is gone leaves first, then the oldest."""


class Verdict(StrEnum):
    """What is known about a checkpoint."""

    INCOMPLETE = "incomplete"
    UNPROVEN = "unproven"
    GOOD = "good"
    SUSPECT = "suspect"
    GONE = "gone"


class CheckpointTier(StrEnum):
    """Where a checkpoint lies. The members stand in order of speed."""

    MEMORY = "memory"
    """In the ranks' processes: survives a rollback, nothing else."""
    LOCAL = "local"
    """On the hosts: survives the processes."""
    REMOTE = "remote"
    """Survives the hosts."""


SPEED: Final = tuple(CheckpointTier)
SURVIVES_PROCESSES: Final = (CheckpointTier.LOCAL, CheckpointTier.REMOTE)
SURVIVES_HOSTS: Final = (CheckpointTier.REMOTE,)


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One save of one attempt, all shards together."""

    attempt: str
    step: int
    tier: CheckpointTier
    location: str
    shards_expected: int
    shards: tuple[int, ...]
    """Ranks that have reported theirs, ascending."""
    seconds: float
    """The slowest shard's."""
    bytes: int
    saved_unix_ns: int
    verdict: Verdict = Verdict.INCOMPLETE
    reason: str = ""

    @property
    def id(self) -> str:
        """TIER:ATTEMPT:STEP, unique within the job."""
        return f"{self.tier}:{self.attempt}:{self.step}"

    @property
    def launch(self) -> str:
        """The launch whose processes saved it."""
        return self.attempt.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's report of its part of a save (event `checkpoint_saved`)."""

    attempt: str
    step: int
    rank: int
    tier: CheckpointTier
    location: str
    shards: int
    """How many ranks save a part; 0 = not said, then it is one for each rank."""
    seconds: float
    bytes: int
    at_unix_ns: int


class Ledger:
    """All checkpoints of one job. Every change returns the entries that it changed, for the caller to store."""

    def __init__(self, entries: Iterable[LedgerEntry] = ()) -> None:
        self._entries = {entry.id: entry for entry in entries}

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """All entries in the order in which they were first reported."""
        return tuple(self._entries.values())

    def saved(self, shard: Shard, world_size: int) -> list[LedgerEntry]:
        """A rank reported its shard. Repeats change nothing."""
        expected = shard.shards or world_size
        blank = LedgerEntry(
            shard.attempt, shard.step, shard.tier, shard.location, expected, (), 0.0, 0, shard.at_unix_ns
        )
        before = self._entries.get(blank.id, blank)
        if shard.rank in before.shards:
            return []
        shards = tuple(sorted({*before.shards, shard.rank}))
        entry = replace(
            before,
            # Rank 0's place stands for the whole: it is what a rollback hands to every rank.
            location=shard.location if shard.rank == min(shards) else before.location,
            shards=shards,
            seconds=max(before.seconds, shard.seconds),
            bytes=before.bytes + shard.bytes,
        )
        if entry.verdict is Verdict.INCOMPLETE and len(shards) >= expected:
            entry = replace(entry, verdict=Verdict.UNPROVEN)
        while len(self._entries) >= ENTRIES_MAX and entry.id not in self._entries:
            # Saves go on after a fault: what is gone leaves first, not the last good one from before it.
            gone = (each.id for each in self._entries.values() if each.verdict is Verdict.GONE)
            del self._entries[next(gone, next(iter(self._entries)))]
        return self._put([entry])

    def began(self, attempt: str, first_step: int) -> list[LedgerEntry]:
        """An attempt trains its first step: what lay in the memory of other processes is gone, and so are half saves.

        Ranks forget what they kept of steps that a rollback has undone. Unproven saves of later steps can no longer be
        proven, since training goes another way from here.
        """
        launch = attempt.rpartition(".")[0]
        changed = []
        for entry in self._entries.values():
            if entry.attempt == attempt or entry.verdict is Verdict.GONE:
                continue
            forgotten = entry.tier is CheckpointTier.MEMORY and (entry.launch != launch or entry.step > first_step)
            if entry.verdict is Verdict.INCOMPLETE or forgotten:
                changed.append(replace(entry, verdict=Verdict.GONE, reason=f"attempt {entry.attempt} ended"))
            elif entry.verdict is Verdict.UNPROVEN and entry.step > first_step:
                changed.append(
                    replace(entry, verdict=Verdict.SUSPECT, reason="training went back before it was proven")
                )
        return self._put(changed)

    def progressed(self, attempt: str, first_step: int, step: int, onset_step: int | None = None) -> list[LedgerEntry]:
        """All ranks of `attempt` are in up to `step`: unproven saves that this proves become good.

        Args:
            attempt: the attempt that goes on now. It proves its own saves and those that it descends from.
            first_step: the first step it trained.
            step: the watermark.
            onset_step: the earliest onset of open incidents that put the weights in doubt; nothing from there on is
                proven by steps that follow.
        """
        limit = step if onset_step is None else min(step, onset_step - 1)
        return self._put(
            replace(entry, verdict=Verdict.GOOD, reason=f"{PROOF_STEPS} clean steps followed")
            for entry in self._entries.values()
            if entry.verdict is Verdict.UNPROVEN
            and (entry.attempt == attempt or entry.step <= first_step)
            and entry.step + PROOF_STEPS <= limit
        )

    def doubt(self, attempt: str, onset_step: int, reason: str) -> list[LedgerEntry]:
        """An incident that may have spoilt the weights began: this attempt's saves from its onset on are suspect."""
        return self._put(
            replace(entry, verdict=Verdict.SUSPECT, reason=reason)
            for entry in self._entries.values()
            if entry.verdict in (Verdict.UNPROVEN, Verdict.GOOD, Verdict.INCOMPLETE)
            and entry.attempt == attempt
            and entry.step >= onset_step
        )

    def lost(self, checkpoint_id: str, reason: str) -> list[LedgerEntry]:
        """A rank has no part of this checkpoint any more: so the whole of it is gone. Repeats change nothing."""
        entry = self._entries.get(checkpoint_id)
        if entry is None or entry.verdict is Verdict.GONE:
            return []
        return self._put([replace(entry, verdict=Verdict.GONE, reason=reason)])

    def process_ended(self, launch: str, rank: int) -> list[LedgerEntry]:
        """A process of a launch is gone, and with it its part of what lay in that launch's memory."""
        return self._put(
            replace(entry, verdict=Verdict.GONE, reason=f"the process of rank {rank} ended")
            for entry in self._entries.values()
            if entry.tier is CheckpointTier.MEMORY and entry.launch == launch and entry.verdict is not Verdict.GONE
        )

    def newest_good(
        self, tiers: Sequence[CheckpointTier] = SPEED, before_step: int | None = None
    ) -> LedgerEntry | None:
        """Where to go back to: see `newest_good`."""
        return newest_good(self._entries.values(), tiers, before_step)

    def _put(self, changed: Iterable[LedgerEntry]) -> list[LedgerEntry]:
        entries = list(changed)
        self._entries.update({entry.id: entry for entry in entries})
        return entries


def newest_good(
    entries: Iterable[LedgerEntry], tiers: Sequence[CheckpointTier] = SPEED, before_step: int | None = None
) -> LedgerEntry | None:
    """The good checkpoint with the highest step, in the fastest of `tiers` that has it; None where there is none.

    Args:
        entries: of one job.
        tiers: those that survive what failed.
        before_step: onset of the trouble: only saves of earlier steps come into question.
    """
    fit = [
        entry
        for entry in entries
        if entry.verdict is Verdict.GOOD and entry.tier in tiers and (before_step is None or entry.step < before_step)
    ]
    # Of two attempts that saved the same step the later one's lies nearer to what trains now.
    return max(fit, key=lambda entry: (entry.step, -SPEED.index(entry.tier), entry.saved_unix_ns), default=None)


def save_interval_s(save_s: float, failures: int, observed_s: float) -> float | None:
    """How often to save so that saving and lost work together cost least (Young 1974): sqrt(2 x save x MTBF).

    Args:
        save_s: seconds that training stands still for one save.
        failures: how many times training had to go back in `observed_s`.
        observed_s: seconds of training watched.

    Returns:
        Seconds between saves; None while nothing has failed or saving costs nothing measurable.

    >>> round(save_interval_s(save_s=30.0, failures=2, observed_s=86_400.0))
    1610
    """
    if failures <= 0 or save_s <= 0 or observed_s <= 0:
        return None
    return sqrt(2 * save_s * observed_s / failures)
