"""Compares what a person could do about an incident, with the cost of each action in GPU-hours. Pure.

The costs are estimates from the job's own figures: its step time, its checkpoints, and what the incident costs now.
Waiting is right until it has cost as much as the suggested action (`break_even_s`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from rankwatch_detectors.base import Kind
from rankwatch_service.incidents.kinds import KINDS
from rankwatch_service.policy.actions import ACTIONS, Action
from rankwatch_service.policy.checkpoint_ledger import Ledger, LedgerEntry
from rankwatch_service.policy.policy import Decision, IncidentFacts, Mode, rollback_way
from rankwatch_service.policy.rollback import RollbackMode, Way, resumed_from, why_from_scratch

WAIT: Final = "wait"
INVESTIGATE: Final = "investigate"
"""Suggested in place of waiting if the trouble does not pass by itself."""

RELAUNCH_S: Final = 120.0
"""Assumed seconds from the end of the processes to the first new step."""

RESTARTED: Final = "the launcher starts the job again by itself"
"""Why to wait although the job stands still."""

PASSED: Final[dict[str, Any]] = {
    "action": WAIT,
    "reason": "it has ended by itself, and is watched in case it comes back",
    "mode": None,
    "checkpoint": None,
    "cost_gpu_hours": 0.0,
    "break_even_s": None,
    "alternatives": [],
    "policy": {"mode": str(Mode.NOTIFY), "action": "", "reason": "it has ended by itself"},
}
"""The suggestion for an incident that is over and not resolved yet."""

NOWHERE: Final = "no good checkpoint is known to go back to"
"""The reason where a rollback would help and is not possible."""

_REASONS: Final[dict[str, str]] = {
    WAIT: "it may pass by itself",
    INVESTIGATE: "it rarely passes by itself",
    **{action: traits.reason for action, traits in ACTIONS.items()},
}


@dataclass(frozen=True, slots=True)
class Figures:
    """The job's own figures at the time of the incident."""

    step: int
    step_time_s: float
    impact_gpu_hours_per_hour: float
    """What the incident costs while it lasts; the world size if the job stands still."""
    relaunch_s: float = RELAUNCH_S


def suggest(
    incident: IncidentFacts, decision: Decision, figures: Figures, capabilities: Collection[str], ledger: Ledger
) -> dict[str, Any]:
    """Compare the actions that may help in an incident.

    Returns:
        What `Incident.suggestion` holds: {action, reason, mode, checkpoint, cost_gpu_hours, break_even_s,
        alternatives: [{action, cost_gpu_hours, reason, checkpoint}]}. The mode is that of a rollback; the checkpoint
        that from which a rollback or a relaunch goes on. Costs are GPU-hours, for waiting, investigating and pausing
        those of one hour; null: unknown. The action is the policy's if it has chosen one.
    """
    traits = KINDS[Kind(incident.kind)]
    ways = (*traits.actions, *filter(None, (decision.action,)))
    # A job that can relaunch has a launcher that restarts it; otherwise waiting does not help a job that stands still.
    if traits.stands_still and Action.RELAUNCH not in capabilities:
        ways = tuple(way for way in ways if way != WAIT)
    reasons = _REASONS | ({WAIT: RESTARTED} if traits.stands_still else {})
    resume = resumed_from(ledger.entries)
    if resume is None:
        reasons |= {Action.RELAUNCH: f"starts new processes from scratch: {why_from_scratch(ledger.entries)}"}
    mode = str(decision.params.get("mode", ""))
    back = rollback_way(incident, ledger, capabilities, mode)
    last = WAIT if WAIT in ways else INVESTIGATE
    fit = [way for way in dict.fromkeys((*ways, last)) if _possible(way, capabilities, back, mode)]
    chosen = decision.action if decision.action in fit else fit[0]
    costs = {way: _cost_gpu_hours(way, incident, figures, back, resume) for way in fit}
    cost = costs[chosen]
    entries = {str(Action.ROLLBACK): back.entry if back else None, str(Action.RELAUNCH): resume}
    ids = {way: entry.id for way, entry in entries.items() if entry is not None}
    nowhere = Action.ROLLBACK in ways and back is None and chosen != Action.RELAUNCH
    loss_per_s = figures.impact_gpu_hours_per_hour / 3_600
    return {
        "action": chosen,
        "reason": NOWHERE if nowhere else reasons[chosen],
        "mode": back.mode if chosen == Action.ROLLBACK and back else None,
        "checkpoint": ids.get(chosen),
        "cost_gpu_hours": cost,
        "break_even_s": cost / loss_per_s
        if chosen not in (WAIT, INVESTIGATE) and cost is not None and loss_per_s > 0
        else None,
        "alternatives": [
            {"action": way, "cost_gpu_hours": costs[way], "reason": reasons[way], "checkpoint": ids.get(way)}
            for way in fit
            if way != chosen
        ],
    }


def _possible(way: str, capabilities: Collection[str], back: Way | None, mode: str) -> bool:
    if way == Action.ROLLBACK:
        # A rollback by relaunch is listed as the action relaunch, unless the policy asks for it.
        return bool(capabilities) and back is not None and back.mode in (RollbackMode.FULL, mode)
    return way in (WAIT, INVESTIGATE) or way in capabilities


def _cost_gpu_hours(
    way: str, incident: IncidentFacts, figures: Figures, back: Way | None, resume: LedgerEntry | None
) -> float | None:
    gpu_hours_per_s = incident.world_size / 3_600
    match way:
        case "wait" | "investigate":
            return figures.impact_gpu_hours_per_hour
        case Action.ROLLBACK:
            assert back is not None
            new_s = figures.relaunch_s * (back.mode is RollbackMode.RELAUNCH)
            return (new_s + _lost_s(figures, back.entry)) * gpu_hours_per_s
        case Action.RELAUNCH:
            # Without a checkpoint all work is lost, and the figures do not say how long it took.
            return None if resume is None else (figures.relaunch_s + _lost_s(figures, resume)) * gpu_hours_per_s
        case Action.CHECKPOINT:
            return back.entry.seconds * gpu_hours_per_s if back else None
        case Action.PAUSE:
            return float(incident.world_size)
        case _:
            return 0.0


def _lost_s(figures: Figures, entry: LedgerEntry) -> float:
    """Seconds of training to repeat, plus loading the checkpoint, which is assumed to take as long as saving it."""
    return max(figures.step - entry.step, 0) * figures.step_time_s + entry.seconds
