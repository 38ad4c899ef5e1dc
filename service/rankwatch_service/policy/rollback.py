"""How a job goes back, and to which checkpoint. Pure.

In *full* (weights, optimizer, schedulers, random states, data, step) inside its processes where it can; else by a
*relaunch* from what lies on disk. Its *weights* alone go back only where that was asked for: a model from before a
fault over data from after it is nothing that anybody should find out later.
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
    """What goes back."""

    FULL = "full"
    WEIGHTS = "weights"
    RELAUNCH = "relaunch"


BY_ITSELF: Final = (RollbackMode.FULL, RollbackMode.RELAUNCH)
"""Tried in this order where no mode was asked for."""

IN_PLACE: Final = ("rollback_memory", "rollback_disk", "rollback_weights")
"""What ranks say of it (`wire.RankInfo.can`); an SDK that says `rollback` and none of these knows no modes."""

USABLE: Final = (Verdict.UNPROVEN, Verdict.GOOD, Verdict.SUSPECT)
"""What a person may choose by its id."""

Refused = tuple[str, CheckpointTier]
"""(mode, tier) that ranks would not do."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way back."""

    mode: RollbackMode
    entry: LedgerEntry


def knows_modes(can: Collection[str]) -> bool:
    """Whether the ranks say what a rollback takes back."""
    return any(word in can for word in IN_PLACE) or "rollback" not in can


def tiers(mode: RollbackMode, can: Collection[str]) -> tuple[CheckpointTier, ...]:
    """Where the checkpoints lie that this job can load in a mode; while nothing is known of it (), any."""
    if mode is RollbackMode.RELAUNCH:
        return SURVIVES_PROCESSES if "relaunch" in can else ()
    if mode is RollbackMode.WEIGHTS:
        return (CheckpointTier.MEMORY,) if "rollback_weights" in can else ()
    if not can or not knows_modes(can):
        return SPEED
    memory = (CheckpointTier.MEMORY,) if "rollback_memory" in can else ()
    return memory + (SURVIVES_PROCESSES if "rollback_disk" in can else ())


def possible(mode: str, can: Collection[str]) -> bool:
    """Whether this job can go back at all, in a mode or ("") in full or by a relaunch, given a checkpoint."""
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
    """The best way back; None where there is none.

    Args:
        entries: the job's ledger.
        can: what every rank says that it can be told to do; empty while nobody has said anything.
        mode: the one asked for; "" = in full, else by a relaunch.
        wanted: id of a checkpoint. Where it is gone or refused, the newest good one that is not newer takes its place.
        refused: what ranks would not do.
        survives: tiers that what has failed left alone.
        before_step: onset of the trouble: only saves of earlier steps come into question, unless one is `wanted`.
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


def why_none(entries: Sequence[LedgerEntry], can: Collection[str], mode: str = "") -> str:
    """What to tell where `way_back` found nothing: what is missing, and what could be asked for instead."""
    if not possible(mode, can):
        told = f"the job cannot go back in mode {mode}" if mode else "the job can neither go back in full nor relaunch"
    elif not entries:
        told = "there is no checkpoint to go back to"
    else:
        told = f"there is no good checkpoint to go back to: {_counted(entries)}"
    weights = way_back(entries, can, RollbackMode.WEIGHTS)
    return told + (f"; mode weights would take back its weights alone, to {weights.entry.id}" if weights else "")


def _modes(mode: str) -> tuple[RollbackMode, ...]:
    return (RollbackMode(mode),) if mode else BY_ITSELF


def _counted(entries: Iterable[LedgerEntry]) -> str:
    counts = Counter((entry.tier, entry.verdict) for entry in entries)
    return ", ".join(f"{count} {verdict} ({tier})" for (tier, verdict), count in sorted(counts.items()))
