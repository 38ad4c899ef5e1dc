"""Missing ranks: those that the others wait for, and the evidence that distinguishes them. Pure.

What a rank does is in its progress block: its step and phase, whether it is outside of its step, the state of its
process, and, once it stands still, what its stack says (`Presence.doing`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from rankwatch_detectors.base import Bools, Floats, Presence, Topology

# A rank in a busy loop uses a whole core, one that waits in a socket none; ranks that poll while waiting are between.
BUSY_SHARE, IDLE_SHARE = 0.5, 0.2
DESCRIBED_MAX = 16
# Stopped by a signal, held by a debugger, dead and not reaped. Not D, in which a rank is while it saves to a slow disk.
STOPPED_STATES = ("T", "t", "Z")
STOPPED = "stopped by a signal"
"""`decided_by` of a rank that is in one of these states."""
SILENT = "it has stopped reporting"
"""`decided_by` of a rank whose blocks no longer come, while those of others do."""
COLLECTIVE, DATA, OWN, ENDING = "collective", "data", "own", "ending"
"""What a rank that stands still does (`Presence.doing`)."""
# A rank whose block is this many intervals older than the newest has missed two.
SILENT_BLOCKS = 2.5


@dataclass(frozen=True, slots=True)
class Missing:
    """The ranks that did not arrive, the evidence for it, and where the others wait."""

    ranks: tuple[int, ...]
    decided_by: str
    confidence: float
    described: list[dict[str, Any]]
    waiting: list[dict[str, Any]]
    """Ranks by step and phase: {"step", "phase", "ranks"}."""


def who_is_missing(presence: Presence, stuck: Bools, running: Bools, cpu_before: Floats, block_s: float) -> Missing:
    """Find the ranks that the others wait for, by the strongest evidence that distinguishes them.

    Args:
        presence: the newest progress blocks.
        stuck: ranks whose step is older than the deadline.
        running: ranks with a recent block that have neither left nor exited.
        cpu_before: row 0: CPU seconds of each rank when the step began; row 1: stream time of that reading.
        block_s: usual seconds between two progress blocks of a rank.
    """
    cpu_share = _cpu_share(presence, cpu_before, block_s)
    late_s = presence.received_s[running].max() - presence.received_s
    silent = presence.has_reported & ~presence.where("state", "left") & (late_s > SILENT_BLOCKS * block_s)
    decided: tuple[Bools, str, float] = (np.zeros_like(stuck), "no evidence distinguishes the ranks", 0.3)
    for candidates, reason, confidence in _evidence(presence, stuck, running, cpu_share, silent):
        # Evidence that applies to most ranks describes the waiting ranks.
        among = running if reason == SILENT else running & ~silent
        if candidates.any() and 2 * int(candidates.sum()) <= max(int(among.sum()), 2):
            decided = (candidates, reason, confidence)
            break
    chosen = tuple(int(rank) for rank in np.flatnonzero(decided[0]))
    described = [
        _describe(presence, rank, cpu_share)
        | ({"silent_s": float(late_s[rank])} if late_s[rank] > SILENT_BLOCKS * block_s else {})
        for rank in chosen[:DESCRIBED_MAX]
    ]
    return Missing(chosen, decided[1], decided[2], described, _grouped(presence, running & ~decided[0]))


def _evidence(
    presence: Presence, stuck: Bools, running: Bools, cpu_share: Floats, silent: Bools
) -> list[tuple[Bools, str, float]]:
    left = presence.has_reported & presence.where("state", "left")
    several = int(running.sum()) > 1
    if running.size == 1:
        return [(running, "it is the only rank", 1.0)]
    # Where a silent rank was says nothing of where it is.
    running = running & ~silent
    lowest_step = running & several & (presence.step == presence.step[running].min())
    sequence = presence.collective_seq
    lowest_sequence = running & several & (sequence == sequence[running].min())
    waiting = waiting_ranks(presence, running)
    busy, idle = stuck & (cpu_share > BUSY_SHARE), stuck & (cpu_share < IDLE_SHARE)
    return [
        (running & stopped_ranks(presence), STOPPED, 1.0),
        (running & presence.where("doing", ENDING), "it is shutting down", 0.95),
        (lowest_step, "it is in an earlier step", 0.95),
        (lowest_step & has_not_begun(presence), "it has not begun its step, the others have", 0.95),
        (lowest_sequence, "it has entered fewer collectives", 0.9),
        (running & ~waiting & bool(waiting.any()), "it is not in a collective, the others are", 0.85),
        (left, "it left its loop, the others wait", 0.8),
        (silent, SILENT, 0.75),
        (busy & bool(idle.any()), "it computes, the others wait", 0.7),
        (idle & bool(busy.any()), "it waits, the others compute", 0.5),
    ]


def waiting_ranks(presence: Presence, running: Bools) -> Bools:
    """Running ranks that wait for others, or may do so: a backward ends with a reduction."""
    return running & (presence.where("phase", "backward", COLLECTIVE) | presence.where("doing", COLLECTIVE))


def leading_ranks(topology: Topology) -> Bools:
    """Ranks that save, evaluate or log for all: rank 0, the first one of each host, and the last one of a pipeline."""
    firsts: dict[str, int] = {}
    for rank, host in enumerate(topology.host):
        firsts.setdefault(host, rank)
    leads = np.zeros(topology.world_size, dtype=np.bool_)
    leads[list(firsts.values())] = True
    leads[-1] |= bool(topology.pp.max() > 0)
    return leads


def has_not_begun(presence: Presence) -> Bools:
    """Ranks that have been outside of their step since it began, so that they are behind all others in it.

    Where an optimizer's step ends a step of the loop, the next one begins at once, and its work with the next forward.
    """
    return np.asarray((presence.outside_s >= 0) & (presence.outside_s >= presence.step_age_s))


def stopped_ranks(presence: Presence) -> Bools:
    """Ranks that are stopped by a signal, held by a debugger, or dead and not reaped."""
    return presence.where("os_state", *STOPPED_STATES)


def _cpu_share(presence: Presence, before: Floats, block_s: float) -> Floats:
    """CPU seconds per second of each rank since the step began; NaN if that is too recent."""
    elapsed = presence.received_s - before[1]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (presence.cpu_s - before[0]) / elapsed
    return np.where(elapsed >= block_s, share, np.nan)


def _describe(presence: Presence, rank: int, cpu_share: Floats) -> dict[str, Any]:
    return {
        "rank": rank,
        "step": int(presence.step[rank]),
        "phase": presence.phase[rank],
        "phase_age_s": float(presence.phase_age_s[rank]),
        "collective_seq": int(presence.collective_seq[rank]),
        "os_state": presence.os_state[rank],
        "doing": presence.doing[rank],
        "cpu_share": float(cpu_share[rank]),
    }


def _grouped(presence: Presence, others: Bools) -> list[dict[str, Any]]:
    groups = Counter((int(presence.step[rank]), presence.phase[rank]) for rank in np.flatnonzero(others))
    shown = groups.most_common(DESCRIBED_MAX)
    return [{"step": step, "phase": phase, "ranks": count} for (step, phase), count in shown]
