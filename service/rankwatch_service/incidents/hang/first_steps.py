"""What a person does first about a hang: that depends on whether a signal stopped the rank and on stacks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankwatch_detectors.progress.hang import STOPPED
from rankwatch_service.incidents.hang.stack_groups import STACKS

HOSTS_NAMED: Final = 3

PIDS: Final = "pids"
"""Field of the evidence of a hang: by host, process ids of the named ranks."""

PIDS_MAX: Final = 16
"""Ranks whose process ids the evidence has: a person continues the few first by hand, and all of a host by a script."""


def hang_steps(steps: Sequence[str], evidence: Mapping[str, Any], hosts: Sequence[str]) -> list[str]:
    """The first steps about one hang.

    Args:
        steps: those of the kind; the first of them is to read a stack.
        evidence: of the incident.
        hosts: of the ranks that it names.
    """
    (read, *others) = steps
    pids = evidence.get(PIDS) or {}
    if not stopped_by_signal(evidence):
        return [read if _has_stack(evidence) else _look(pids, hosts), *others]
    return [
        _go_on(pids, hosts),
        "Find out who or what stopped it, for example a debugger, a scheduler or a person.",
        *others[1:],
    ]


def stopped_by_signal(evidence: Mapping[str, Any]) -> bool:
    """Whether a signal stopped the process of a rank that a hang names, so that another one lets it go on."""
    missing = evidence.get("missing") or [evidence]
    # A process that a debugger holds (t), or that is dead (Z), does not go on by a signal.
    states = {one.get("os_state", "T") for one in missing if isinstance(one, Mapping)}
    return evidence.get("decided_by") == STOPPED and "T" in states


def _look(pids: Mapping[str, Sequence[int]], hosts: Sequence[str]) -> str:
    """How to see where the first of the named processes stands, as long as its stack has not come.

    Args:
        pids: their ids by host; empty: not known.
        hosts: of the ranks that the hang names.
    """
    where = next(iter(pids or hosts), "the host of the named rank")
    which = f"{pids[where][0]}` on {where}" if pids else f"PID` on {where}, with the process id of the named rank"
    return f"Run `py-spy dump --pid {which}, unless `rankwatch incidents show` has its stack by now."


def _go_on(pids: Mapping[str, Sequence[int]], hosts: Sequence[str]) -> str:
    """How to let stopped processes go on.

    Args:
        pids: their ids by host; empty: not known.
        hosts: of the ranks that the hang names.
    """
    if not pids:
        where = f"host {', '.join(hosts[:HOSTS_NAMED])}" if hosts else "its host"
        return f"Continue the stopped process: `kill -CONT PID` on {where}; `ps -eo pid,stat,args` shows it with a T."
    named = [f"`kill -CONT {' '.join(map(str, ids))}` on host {host}" for host, ids in pids.items()]
    what = "process" if sum(map(len, pids.values())) == 1 else "processes"
    left = len(named) - HOSTS_NAMED
    more = f", and on {left} more {'host' if left == 1 else 'hosts'}" if left > 0 else ""
    return f"Continue the stopped {what}: {', '.join(named[:HOSTS_NAMED])}{more} (within its container, if it has one)."


def _has_stack(evidence: Mapping[str, Any]) -> bool:
    groups = evidence.get(STACKS) or ()
    groups = groups.values() if isinstance(groups, Mapping) else groups
    return any(group.get("stack") if isinstance(group, Mapping) else group for group in groups)
