"""The checkpoint ledger: all checkpoints of a job, and which of them can be trusted. Pure.

A checkpoint is *incomplete* until all its shards are reported, *unproven* until `PROOF_STEPS` steps without trouble
have followed, then *good*. It is *suspect* if it was saved at or after the onset of an incident that may have corrupted
the weights, and *gone* when a shard of it no longer exists or will never be reported. It is *refused*, and never
loaded, if it is not where the job's checkpoints lie.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import sqrt
from typing import Final

PROOF_STEPS: Final = 20
"""Clean steps after which a checkpoint is good: they hold two parameter fingerprints, by default one in 10 steps."""

ENTRIES_MAX: Final = 512
"""Entries kept for each job: 8 hours of a save every minute. Gone checkpoints are removed first, then the oldest."""

REFUSED_MAX: Final = 16
"""Refused entries kept for each job, so that people see what was refused; further ones are only counted."""


class Verdict(StrEnum):
    """What is known about a checkpoint."""

    INCOMPLETE = "incomplete"
    UNPROVEN = "unproven"
    GOOD = "good"
    SUSPECT = "suspect"
    GONE = "gone"
    REFUSED = "refused"


class CheckpointTier(StrEnum):
    """Where a checkpoint is stored, fastest first."""

    MEMORY = "memory"
    """In the memory of the ranks' processes: survives a rollback inside them, but not their end."""
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
    """Ranks that have reported their shard, ascending."""
    seconds: float
    """How long the slowest shard took to save."""
    bytes: int
    """Size of all shards together."""
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
    seconds: float
    bytes: int
    at_unix_ns: int

    def blank(self, expected: int) -> LedgerEntry:
        """The entry of its save without any shard."""
        return LedgerEntry(self.attempt, self.step, self.tier, self.location, expected, (), 0.0, 0, self.at_unix_ns)


class Ledger:
    """All checkpoints of one job. Every change returns the entries that it changed, for the caller to store."""

    def __init__(self, entries: Iterable[LedgerEntry] = ()) -> None:
        self._entries = {entry.id: entry for entry in entries}

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """All entries in the order in which they were first reported."""
        return tuple(self._entries.values())

    def saved(self, shard: Shard, expected: int) -> list[LedgerEntry]:
        """Record a rank's shard, one of at least `expected`. A repeated report changes nothing."""
        blank = shard.blank(expected)
        before = self._entries.get(blank.id, blank)
        if before.verdict is Verdict.REFUSED:
            before = blank  # what was refused under this id was not this save
        if shard.rank in before.shards:
            return []
        expected = max(expected, before.shards_expected)
        shards = tuple(sorted({*before.shards, shard.rank}))
        entry = replace(
            before,
            # A rollback passes one location to every rank: that of the lowest rank.
            location=shard.location if shard.rank == min(shards) else before.location,
            shards_expected=expected,
            shards=shards,
            seconds=max(before.seconds, shard.seconds),
            bytes=before.bytes + shard.bytes,
        )
        if entry.verdict is Verdict.INCOMPLETE and len(shards) >= expected:
            entry = replace(entry, verdict=Verdict.UNPROVEN)
        self._make_room(entry)
        return self._put([entry])

    def refused(self, shard: Shard, reason: str) -> list[LedgerEntry]:
        """Record a save that must not be loaded, unless another one is known by its id or `REFUSED_MAX` are kept."""
        entry = replace(shard.blank(0), verdict=Verdict.REFUSED, reason=reason)
        kept = sum(each.verdict is Verdict.REFUSED for each in self._entries.values())
        if entry.id in self._entries or kept >= REFUSED_MAX:
            return []
        self._make_room(entry)
        return self._put([entry])

    def _make_room(self, entry: LedgerEntry) -> None:
        while len(self._entries) >= ENTRIES_MAX and entry.id not in self._entries:
            # A job keeps saving after a fault: its new entries must not displace the last good one from before it.
            gone = (each.id for each in self._entries.values() if each.verdict in (Verdict.GONE, Verdict.REFUSED))
            del self._entries[next(gone, next(iter(self._entries)))]

    def began(self, attempt: str, first_step: int) -> list[LedgerEntry]:
        """Record that an attempt trains its first step, `first_step`.

        Incomplete checkpoints of other attempts are gone: no further shard will come. So are those in the memory of
        another launch's processes, and those in memory with a later step, which ranks discard in a rollback. Unproven
        checkpoints of later steps become suspect: training went back, so nothing will prove them.
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
        """Record that all ranks of `attempt` have reported up to `step`; checkpoints that this proves become good.

        Args:
            attempt: the running attempt. It proves its own checkpoints, and those of steps up to its first one, from
                which it descends.
            first_step: the first step that it trained.
            step: the watermark.
            onset_step: the earliest onset of open incidents that put the weights in doubt; steps from there on prove
                nothing.
        """
        limit = step if onset_step is None else min(step, onset_step - 1)
        return self._put(
            replace(entry, verdict=Verdict.GOOD, reason=f"{PROOF_STEPS} clean steps followed")
            for entry in self._entries.values()
            if entry.verdict is Verdict.UNPROVEN
            and (entry.attempt == attempt or entry.step <= first_step)
            and entry.step + PROOF_STEPS <= limit
        )

    def mark_suspect(self, attempt: str, onset_step: int, reason: str) -> list[LedgerEntry]:
        """Mark an attempt's checkpoints from an onset on as suspect: an incident may have corrupted the weights."""
        return self._put(
            replace(entry, verdict=Verdict.SUSPECT, reason=reason)
            for entry in self._entries.values()
            # Incomplete ones too: the last shard would otherwise make them unproven.
            if entry.verdict in (Verdict.UNPROVEN, Verdict.GOOD, Verdict.INCOMPLETE)
            and entry.attempt == attempt
            and entry.step >= onset_step
        )

    def savers(self, checkpoint_id: object) -> Collection[int] | None:
        """The ranks that have saved a part of a checkpoint; None if it is not known."""
        entry = self._entries.get(checkpoint_id) if isinstance(checkpoint_id, str) else None
        return None if entry is None else entry.shards

    def lost(self, checkpoint_id: str, reason: str) -> list[LedgerEntry]:
        """Mark a checkpoint as gone, since a rank no longer has its shard. A repeated report changes nothing."""
        entry = self._entries.get(checkpoint_id)
        if entry is None or entry.verdict is Verdict.GONE:
            return []
        return self._put([replace(entry, verdict=Verdict.GONE, reason=reason)])

    def process_ended(self, launch: str, rank: int) -> list[LedgerEntry]:
        """Mark the checkpoints in a launch's memory as gone: one of its processes ended, and its shards with it."""
        return self._put(
            replace(entry, verdict=Verdict.GONE, reason=f"the process of rank {rank} ended")
            for entry in self._entries.values()
            if entry.tier is CheckpointTier.MEMORY and entry.launch == launch and entry.verdict is not Verdict.GONE
        )

    def newest_good(
        self, tiers: Sequence[CheckpointTier] = SPEED, before_step: int | None = None
    ) -> LedgerEntry | None:
        """The newest good checkpoint; see the function of this name."""
        return newest_good(self._entries.values(), tiers, before_step)

    def _put(self, changed: Iterable[LedgerEntry]) -> list[LedgerEntry]:
        entries = list(changed)
        self._entries.update({entry.id: entry for entry in entries})
        return entries


def newest_good(
    entries: Iterable[LedgerEntry], tiers: Sequence[CheckpointTier] = SPEED, before_step: int | None = None
) -> LedgerEntry | None:
    """The good checkpoint with the highest step, in the fastest of `tiers` that has it; None if there is none.

    Args:
        entries: of one job.
        tiers: only these are considered.
        before_step: the onset of the trouble: only checkpoints of earlier steps are considered.
    """
    fit = [
        entry
        for entry in entries
        if entry.verdict is Verdict.GOOD and entry.tier in tiers and (before_step is None or entry.step < before_step)
    ]
    # Two attempts may have saved the same step: the later save is closer to what trains now.
    return max(fit, key=lambda entry: (entry.step, -SPEED.index(entry.tier), entry.saved_unix_ns), default=None)


def save_interval_s(save_s: float, failures: int, observed_s: float) -> float | None:
    """The interval at which saving and lost work together cost least (Young 1974): sqrt(2 x save x MTBF).

    Args:
        save_s: seconds that training stands still for one save.
        failures: how often training had to go back in `observed_s`.
        observed_s: seconds of training watched.

    Returns:
        Seconds between saves; None while nothing has failed or saving costs nothing measurable.

    >>> round(save_interval_s(save_s=30.0, failures=2, observed_s=86_400.0))
    1610
    """
    if failures <= 0 or save_s <= 0 or observed_s <= 0:
        return None
    return sqrt(2 * save_s * observed_s / failures)
