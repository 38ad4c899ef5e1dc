"""What a person does first about a hang: that depends on whether a signal stopped the rank and on stacks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankwatch_detectors.progress.arrival import STOPPED
from rankwatch_service.incidents.hang.stack_groups import STACKS

HOSTS_NAMED: Final = 3
NO_STACK: Final = "On the host of the named rank run `py-spy dump --pid PID`: the evidence has no stack of it."


def hang_steps(steps: Sequence[str], evidence: Mapping[str, Any], hosts: Sequence[str]) -> list[str]:
    """The first steps about one hang.

    Args:
        steps: those of the kind; the first of them is to read a stack.
        evidence: of the incident.
        hosts: of the ranks that it names.
    """
    (read, *others) = steps
    look = read if _has_stack(evidence) else NO_STACK
    missing = evidence.get("missing") or [evidence]
    # A process that a debugger holds (t), or that is dead (Z), does not go on by a signal.
    states = {one.get("os_state", "T") for one in missing if isinstance(one, Mapping)}
    if evidence.get("decided_by") != STOPPED or "T" not in states:
        return [look, *others]
    where = f"host {', '.join(hosts[:HOSTS_NAMED])}" if hosts else "its host"
    return [
        f"Continue the stopped process: `kill -CONT PID` on {where}; `ps -eo pid,stat,args` shows it with a T.",
        "Find out who or what stopped it, for example a debugger, a scheduler or a person.",
        *others[1:],
    ]


def _has_stack(evidence: Mapping[str, Any]) -> bool:
    groups = evidence.get(STACKS) or ()
    groups = groups.values() if isinstance(groups, Mapping) else groups
    return any(group.get("stack") if isinstance(group, Mapping) else group for group in groups)
