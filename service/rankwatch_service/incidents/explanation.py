"""Attaches explanations of findings to the transitions of the incidents that they opened or joined. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankwatch_service.incidents.transition import TransitionKind, Update

WHY: Final = "why"
"""The field of a transition that has the explanations of its findings."""


def explain(updates: Sequence[Update], reasons: Sequence[Mapping[str, Any]]) -> None:
    """Attach each explanation to the newest update of an incident of which its finding is a part."""
    for reason in reasons:
        for update in reversed(updates):
            parts = update.incident.parts
            its = any((part.kind, str(part.scope)) == (reason["kind"], reason["scope"]) for part in parts)
            if its and update.what is not TransitionKind.RESOLVED:
                update.fields.setdefault(WHY, []).append(reason)
                break
