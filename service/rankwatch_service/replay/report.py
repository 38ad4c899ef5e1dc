"""What a replay found: as JSON for programs, as sentences for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rankwatch_service.replay.run import Outcome
from rankwatch_service.stream.incidents import Incident, plain

NEEDS: Final = (
    (
        "busy_s",
        "slow ranks (straggler): a time that each rank spends on its own work: busy_s, or forward_s and backward_s",
    ),
    ("step_time_s", "a slower job (slowdown): step_time_s"),
    ("loss", "loss_spike, loss_divergence: loss"),
    ("grad_norm", "grad_norm: grad_norm"),
    ("fingerprint", "corruption: fingerprint of each rank's parameters"),
)
"""By column: what cannot be looked for without it."""


def as_json(incident: Incident, named: bool) -> dict[str, Any]:
    """One incident as an object; ranks only where the file `named` any."""
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
        "score": plain(incident.score),
        "summary": incident.summary,
        "evidence": plain(incident.evidence),
        "scope": incident.scope,
        "attempt": incident.attempt,
        "cause": incident.cause,
        "consequences": [part.told() for part in incident.parts[1:]],
    }


def summary(outcome: Outcome, seconds: float) -> dict[str, Any]:
    """What was read, and how long it took."""
    return {
        "rows": outcome.rows,
        "seconds": round(seconds, 3),
        "steps": outcome.frames,
        "ranks": outcome.ranks,
        "incidents": len(outcome.incidents[0]),
        "columns": outcome.metrics,
        "columns_left_out": outcome.left_out_columns,
        "left_out": dict(sorted(outcome.left_out.items())),
    }


def unshared(first: Sequence[Incident], second: Sequence[Incident]) -> tuple[list[Incident], list[Incident]]:
    """Incidents that only one of two configurations found: no other of that kind and those ranks in the same time."""
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


def missing(outcome: Outcome) -> list[str]:
    """What could not be looked for in these files, and which column it would take."""
    return [what for column, what in NEEDS if column not in outcome.metrics]


def what_was_read(outcome: Outcome, seconds: float) -> str:
    """One sentence about the files."""
    who = f"{outcome.ranks} rank{'s' * (outcome.ranks != 1)}" if outcome.named else "one series for the whole job"
    steps = f"{outcome.frames} steps ({outcome.first_step} to {outcome.last_step})" if outcome.frames else "no steps"
    return f"Read {outcome.rows} rows in {seconds:.1f} s: {who}, {steps}."


def duration(incident: Incident) -> str:
    """From when to when, in steps where they are known."""
    onset, found = incident.first.onset_step, incident.detected_step
    began = f"since step {onset}" if onset is not None else f"since {incident.first.onset_time_s:.0f} s"
    late = f", found in step {found}" if found is not None and found != onset else ""
    if incident.resolved_time_s is None:
        return f"{began}{late}; still so at the end"
    over = (
        f"step {incident.resolved_step}" if incident.resolved_step is not None else f"{incident.resolved_time_s:.0f} s"
    )
    return f"{began}{late}; over in {over}"
