"""What a policy would have done about the incidents of the last days, before it is in force.

Each incident is decided by `policy.decide` with what is stored of it now: its newest severity and confidence, and what
its attempt could do. Actions that would have been taken count against the budget and the cool-down of their job, those
that were taken do not. A checkpoint counts if it was saved before the incident was detected, by its verdict of now; one
that is gone since counts as good, as captures in memory are replaced by newer ones all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import Connection, exists, func, select

from rankwatch_detectors.base import Kind
from rankwatch_service.policy.actions import Action
from rankwatch_service.policy.checkpoint_ledger import Ledger, LedgerEntry, Verdict
from rankwatch_service.policy.policy import Decision, IncidentFacts, Mode, PastAction, Policy, decide
from rankwatch_service.policy.precision import UNREVIEWED, Precision
from rankwatch_service.store.models import Attempt, Incident, JobOwnership

PAST_DAYS: Final = 7
INCIDENTS_MAX: Final = 1_000
"""Newest incidents that are decided: 30 ms, or 1.2 s if rules roll back or relaunch 12 jobs of 1,024 ranks whose
ledgers are full; 350 KB of an answer that names each."""
_FROM_CHECKPOINT: Final = (Action.ROLLBACK, Action.RELAUNCH)


@dataclass(frozen=True, slots=True)
class PastIncident:
    """An incident of the last days."""

    facts: IncidentFacts
    summary: str
    detected_unix_ns: int
    resolved_unix_ns: int | None
    can: frozenset[str]
    """What every rank of its attempt reported that it can do."""


def past_incidents(connection: Connection, now_unix_ns: int) -> tuple[list[PastIncident], int]:
    """The newest `INCIDENTS_MAX` incidents that were detected in the last `PAST_DAYS`, oldest first; how many more
    there were.
    """
    recent = Incident.detected_unix_ns >= now_unix_ns - PAST_DAYS * 86_400 * 10**9
    total = connection.scalar(select(func.count()).select_from(Incident).where(recent)) or 0
    mine = (Incident.job == Attempt.job) & (Incident.attempt == Attempt.attempt)
    known = select(Attempt.job, Attempt.attempt, Attempt.world_size, Attempt.topology["can"].label("can"))
    attempts = {
        (row.job, row.attempt): (row.world_size, frozenset(row.can or ()))
        for row in connection.execute(known.where(exists().where(mine, recent)))
    }
    projects = {row.job: row.project for row in connection.execute(select(JobOwnership.job, JobOwnership.project))}
    named = ("id", "job", "attempt", "kind", "severity", "confidence", "onset_step", "ranks", "consequences")
    more = ("summary", "detected_unix_ns", "resolved_unix_ns")
    query = select(*(getattr(Incident, name) for name in named + more)).where(recent)
    newest = query.order_by(Incident.detected_unix_ns.desc(), Incident.id.desc()).limit(INCIDENTS_MAX)
    found = [
        _past(row, *attempts.get((row["job"], row["attempt"]), (0, frozenset())), projects.get(row["job"], ""))
        for row in connection.execute(newest).mappings()
    ]
    return found[::-1], total - len(found)


def previewed(
    policy: Policy,
    incidents: Iterable[PastIncident],
    checkpoints: Callable[[str], Sequence[LedgerEntry]],
    precision: Mapping[str, Precision],
) -> list[tuple[PastIncident, Decision]]:
    """What the policy would have decided about each incident.

    Args:
        policy: the one to try.
        incidents: oldest first.
        checkpoints: gives the ledger of a job as it is now; asked once for each job that a rule would take back.
        precision: by kind, as it is now.
    """
    done: dict[str, list[PastAction]] = {}
    ledgers: dict[str, Sequence[LedgerEntry]] = {}
    found = []
    for past in incidents:
        job, at = past.facts.job, past.detected_unix_ns
        rule = next((rule for rule in policy.rules if rule.matches(past.facts)), None)
        ledger = Ledger()
        if rule is not None and rule.action in _FROM_CHECKPOINT:
            if job not in ledgers:
                ledgers[job] = checkpoints(job)
            ledger = Ledger(_at(ledgers[job], at))
        history = done.setdefault(job, [])
        of_kind = precision.get(past.facts.kind, UNREVIEWED)
        decision = decide(past.facts, policy, history, past.can, ledger, at, of_kind)
        if decision.mode is Mode.ACT:
            history.append(PastAction(decision.action, at))
        found.append((past, decision))
    return found


def _at(entries: Sequence[LedgerEntry], at_unix_ns: int) -> list[LedgerEntry]:
    """The entries as they may have been at a time."""
    return [
        replace(entry, verdict=Verdict.GOOD)
        if entry.verdict is Verdict.GONE and len(entry.shards) >= entry.shards_expected
        else entry
        for entry in entries
        if entry.saved_unix_ns < at_unix_ns
    ]


def _past(row: Mapping[Any, Any], world_size: int, can: frozenset[str], project: str) -> PastIncident:
    kinds = {row["kind"], *(one["kind"] for one in row["consequences"])}
    facts = IncidentFacts(
        id=row["id"],
        job=row["job"],
        kind=row["kind"],
        severity=row["severity"],
        confidence=row["confidence"],
        onset_step=row["onset_step"],
        ranks=tuple(row["ranks"]),
        world_size=world_size,
        project=project,
        hung=Kind.HANG in kinds,
        processes_lost=Kind.RANK_LOST in kinds,
        hosts_lost=Kind.TELEMETRY_LOST in kinds and Kind.RANK_LOST in kinds,
    )
    return PastIncident(facts, row["summary"], row["detected_unix_ns"], row["resolved_unix_ns"], can)
