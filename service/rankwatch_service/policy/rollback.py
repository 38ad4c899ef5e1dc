"""Chooses how a job goes back, and to which checkpoint. Pure.

A rollback is *full* (weights, optimizer, schedulers, random states, data, step) inside the processes if the job can do
that, else a *relaunch* from a checkpoint on disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rankwatch_service.policy.checkpoint_ledger import (
    SPEED,
    SURVIVES_PROCESSES,
    CheckpointTier,
    LedgerEntry,
    Verdict,
    newest_good,
)


class RollbackMode(StrEnum):
    """How a job goes back."""

    FULL = "full"
    """Preferred if no mode was requested."""
    RELAUNCH = "relaunch"


USABLE: Final = (Verdict.UNPROVEN, Verdict.GOOD, Verdict.SUSPECT)
"""Checkpoints that a person may choose by id."""

Refused = tuple[str, CheckpointTier]
"""(mode, tier) that a rank refused."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a job can go back: a mode, and a checkpoint that it can load in that mode."""

    mode: RollbackMode
    entry: LedgerEntry


def tiers(mode: RollbackMode, can: Collection[str]) -> tuple[CheckpointTier, ...]:
    """Tiers from which a job can load a checkpoint in a mode: all for a full rollback while `can` is empty."""
    if mode is RollbackMode.RELAUNCH:
        return SURVIVES_PROCESSES if "relaunch" in can else ()
    if not can:
        return SPEED
    memory = (CheckpointTier.MEMORY,) if "rollback_memory" in can else ()
    return memory + (SURVIVES_PROCESSES if "rollback_disk" in can else ())


def possible(mode: str, can: Collection[str]) -> bool:
    """Whether a job with a suitable checkpoint can go back in a mode; "": full, else relaunch."""
    return any(tiers(one, can) for one in _modes(mode))


def way_back(
    entries: Sequence[LedgerEntry],
    can: Collection[str],
    mode: str = "",
    *,
    wanted: str = "",
    refused: Collection[Refused] = (),
    survives: Collection[CheckpointTier] = SPEED,
    before_step: int | None = None,
) -> Way | None:
    """The best mode and checkpoint to go back with; None if there is none.

    Args:
        entries: the job's ledger.
        can: what every rank reports that it can do; empty while unknown.
        mode: the requested one; "": full, else relaunch.
        wanted: id of the requested checkpoint. If it is gone or refused, the newest good one up to its step is taken.
        refused: what ranks have refused before.
        survives: tiers that survived the failure.
        before_step: the onset of the trouble: only checkpoints of earlier steps are considered, besides `wanted`.
    """
    modes = _modes(mode)
    fit = {
        one: tuple(tier for tier in tiers(one, can) if tier in survives and (one, tier) not in refused) for one in modes
    }
    chosen = next((entry for entry in entries if entry.id == wanted), None)
    if chosen is not None:
        for one in modes:
            if chosen.tier in fit[one] and chosen.verdict in USABLE:
                return Way(one, chosen)
        before_step = min(chosen.step + 1, chosen.step + 1 if before_step is None else before_step)
    for one in modes:
        target = newest_good(entries, fit[one], before_step)
        if target is not None:
            return Way(one, target)
    return None


def resumed_from(entries: Iterable[LedgerEntry]) -> LedgerEntry | None:
    """The checkpoint from which a relaunch goes on, unless another one was chosen; None: it begins from scratch."""
    return newest_good(entries, SURVIVES_PROCESSES)


def why_from_scratch(entries: Sequence[LedgerEntry]) -> str:
    """Why a relaunch would begin from scratch, for people."""
    if not entries:
        return "the script has registered no checkpoint with rankwatch"
    return f"there is no good checkpoint on disk: {_counted(entries)}"


def why_none(entries: Sequence[LedgerEntry], can: Collection[str], mode: str = "") -> str:
    """Why `way_back` found nothing, for people."""
    if not possible(mode, can):
        return f"the job does not support mode {mode}" if mode else "the job supports neither mode full nor relaunch"
    if not entries:
        return "there is no checkpoint to go back to"
    return f"there is no good checkpoint to go back to: {_counted(entries)}"


def _modes(mode: str) -> tuple[RollbackMode, ...]:
    return (RollbackMode(mode),) if mode else tuple(RollbackMode)


def _counted(entries: Iterable[LedgerEntry]) -> str:
    counts = Counter((entry.tier, entry.verdict) for entry in entries)
    return ", ".join(f"{count} {verdict} ({tier})" for (tier, verdict), count in sorted(counts.items()))
