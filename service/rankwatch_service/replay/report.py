"""The results of a replay: as JSON for programs, as sentences for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankwatch_detectors.base import Kind
from rankwatch_detectors.words import listed
from rankwatch_service.incidents.kinds import KINDS
from rankwatch_service.incidents.lost_time import cost_unit
from rankwatch_service.incidents.model import Incident
from rankwatch_service.numbers import plain
from rankwatch_service.replay.run import ReplayResult

RANKS_SHOWN: Final = 8

NOT_IN_FILES: Final = [kind for kind, row in KINDS.items() if row.in_files is None]
"""Kinds that no file shows."""

FIRST_STEP: Final[Mapping[Kind, str]] = {Kind.HANG: "See what the ranks did at that time; a file has no stacks."}
"""What a person does first about an incident in a file, where `KindTraits.first_steps` needs more."""

LEFT_OUT: Final[Mapping[str, str]] = {
    "late": "rows of steps that were closed already; is the file sorted by rank, not by step?",
    "repeated": "further rows of the same rank and step",
    "old_attempt_rows": "rows of an attempt after the next one began",
    "incomplete": "steps closed without some ranks' rows",
    "pushed": "steps closed early, since too many were open",
    "far": "rows of a step far ahead of all others",
    "names": "values of metrics beyond the limit",
    "gap_s": "seconds without rows, skipped",
}
"""Descriptions of the reasons for which rows and values did not reach the detectors."""


def as_json(incident: Incident, named: bool) -> dict[str, Any]:
    """One incident as an object; with ranks only if the file `named` any."""
    return {
        "kind": str(incident.kind),
        "severity": str(incident.severity),
        "ranks": list(incident.ranks) if named else [],
        "hosts": [host for host in incident.hosts if host],
        "onset_step": incident.first.onset_step,
        "detected_step": incident.detected_step,
        "onset_time_s": incident.first.onset_time_s,
        "detected_time_s": incident.detected_time_s,
        "resolved_step": incident.resolved_step,
        "is_open": incident.resolved_time_s is None,
        "score": plain(incident.score),
        "summary": incident.summary,
        "evidence": plain(incident.evidence),
        "scope": str(incident.scope),
        "attempt": incident.attempt,
        "cause": incident.cause,
        "consequences": [part.consequence().fields() for part in incident.parts[1:]],
    }


def summary(outcome: ReplayResult, seconds: float) -> dict[str, Any]:
    """What was read, and the time that it took."""
    return {
        "rows": outcome.rows,
        "seconds": round(seconds, 3),
        "steps": outcome.frames,
        "ranks": outcome.ranks,
        "incidents": len(outcome.incidents[0]),
        "columns": outcome.metrics,
        "columns_left_out": outcome.left_out_columns,
        "left_out": dict(sorted(outcome.left_out.items())),
        "not_looked_for": [*(kind for kind, _ in missing(outcome)), *map(str, NOT_IN_FILES)],
        "failures": outcome.failures,
        "error": None if outcome.broken is None else str(outcome.broken),
    }


def unshared(first: Sequence[Incident], second: Sequence[Incident]) -> tuple[list[Incident], list[Incident]]:
    """Incidents that only one of two configurations found: the other has none of that kind and ranks at the time."""
    only_first = [one for one in first if not any(_same(one, other) for other in second)]
    only_second = [one for one in second if not any(_same(one, other) for other in first)]
    return only_first, only_second


def _same(one: Incident, other: Incident) -> bool:
    if one.kind is not other.kind or one.attempt != other.attempt:
        return False
    if set(one.ranks) != set(other.ranks) and not set(one.ranks) & set(other.ranks):
        return False
    return one.first.onset_time_s <= _end(other) and other.first.onset_time_s <= _end(one)


def _end(incident: Incident) -> float:
    return float("inf") if incident.resolved_time_s is None else incident.resolved_time_s


def missing(outcome: ReplayResult) -> list[tuple[str, str]]:
    """Kinds that these files cannot show, and the columns that they lack."""
    here = outcome.columns
    needed = {kind: row.in_files for kind, row in KINDS.items() if row.in_files is not None}
    return [
        (str(kind), ", and ".join(map(_either, groups)))
        for kind, groups in needed.items()
        if not all(here & set(group) for group in groups)
    ]


def _either(columns: Sequence[str]) -> str:
    """One of these columns, for people."""
    *others, last = [*columns, *(["forward_s and backward_s"] if "busy_s" in columns else [])]
    return f"{', '.join(others)} or {last}" if others else last


def what_was_read(outcome: ReplayResult, seconds: float) -> str:
    """One sentence about the files."""
    rows = f"Read {_many(outcome.rows, 'row')} in {seconds:.1f} s"
    who = _many(outcome.ranks, "rank") if outcome.named else "one series for the whole job"
    if not outcome.frames:
        return f"{rows}: {who}, no step."
    return f"{rows}: {who}, {_many(outcome.frames, 'step')} ({outcome.first_step} to {outcome.last_step})."


def culprits(incident: Incident) -> str:
    """The culprits: ranks and hosts, as far as they are known."""
    if not incident.ranks:
        return "the whole job"
    hosts = [host for host in incident.hosts if host]
    where = f" on {', '.join(hosts[:RANKS_SHOWN])}" if hosts else ""
    return f"rank{'s' * (len(incident.ranks) != 1)} {listed(incident.ranks, RANKS_SHOWN)}{where}"


def cost(incident: Incident, *, accelerated: bool) -> str | None:
    """Its cost while it lasts; None if that is not known. `accelerated`: as of the job."""
    wasted = incident.cost_gpu_hours_per_hour
    return None if wasted is None else f"costs {wasted:.3g} {cost_unit(accelerated)} in each hour of training"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def duration(incident: Incident) -> str:
    """Its beginning and end, in steps where they are known."""
    onset, found = incident.first.onset_step, incident.detected_step
    began = f"since step {onset}" if onset is not None else f"since {incident.first.onset_time_s:.0f} s"
    late = f", found in step {found}" if found is not None and found != onset else ""
    if incident.resolved_time_s is None:
        return f"{began}{late}; still open at the end"
    over = (
        f"step {incident.resolved_step}" if incident.resolved_step is not None else f"{incident.resolved_time_s:.0f} s"
    )
    return f"{began}{late}; over in {over}"
