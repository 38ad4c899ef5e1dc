"""Adds stack dumps to the evidence of the hang for which they were requested. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rankwatch_detectors.base import Kind, Occurrence
from rankwatch_service.incidents.model import Incident
from rankwatch_service.incidents.transition import TransitionKind, Update

STACKS: Final = "stacks"
"""Action of the commands that request stacks; they do not touch the loop of any rank."""

STACK_CHARS_MAX: Final = 16_384
"""Characters kept of each stack: about 200 frames."""

STACKS_MAX: Final = 8
"""Stacks kept with one incident."""


def attach_stack(dump: Occurrence, incidents: Sequence[Incident]) -> list[Update]:
    """Add a stack to the open incident that requested it, else to the open hang of its attempt.

    A stack is evidence: nobody is notified of it.
    """
    if dump.rank is None:
        return []
    incident = _asked(dump, incidents)
    if incident is None:
        return []
    stacks: dict[str, Any] = incident.evidence.setdefault("stacks", {})
    if str(dump.rank) in stacks or len(stacks) >= STACKS_MAX:
        return []
    kept = {key: value[:STACK_CHARS_MAX] if isinstance(value, str) else value for key, value in dump.fields.items()}
    kept.pop("order", None)
    stacks[str(dump.rank)] = kept
    text = f"stack of rank {dump.rank}" if kept.get("stack") else f"no stack of rank {dump.rank} could be taken"
    return [Update(incident, TransitionKind.EVIDENCE, text, fields={"rank": dump.rank, **kept})]


def _asked(dump: Occurrence, incidents: Sequence[Incident]) -> Incident | None:
    hangs = [
        incident
        for incident in incidents
        if any(part.kind is Kind.HANG and part.attempt == dump.attempt for part in incident.parts)
    ]
    order = dump.fields.get("order")
    named = (incident for incident in hangs if order == incident.command_id(STACKS))
    return next(named, hangs[0] if hangs else None)
