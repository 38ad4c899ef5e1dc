"""The faults that the demo injects, and the file by which it arms them.

The demo writes one list of armed faults; every rank checks that file's modification time at the start of a step. A
fault belongs to one attempt and one step, so a step that is repeated after a rollback or a relaunch has no fault. A
rank notes each fault with its time before it injects it, since a rank that kills itself cannot do so afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path


class FaultKind(StrEnum):
    """The faults of a rank."""

    SLOW = "slow"
    """Twice the CPU time in each step, from the armed step until it is disarmed."""
    NAN = "nan"
    """One NaN in the rank's own gradients, before they are reduced."""
    BIT_FLIP = "bit flip"
    """One mantissa bit of one weight of this replica."""
    HANG = "hang"
    """An endless loop in the forward pass."""
    KILL = "kill"
    """The process ends by SIGKILL."""


@dataclass(frozen=True, slots=True)
class Armed:
    """One fault that a rank will have at `step` of `attempt` (LAUNCH.k)."""

    fault: FaultKind
    rank: int
    attempt: str
    step: int


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault as the rank noted it: the attempt, step and wall clock time at which it began."""

    attempt: str
    step: int
    unix_ns: int


class FaultFile:
    """The demo's side: arms faults and reads what was injected."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def arm(self, faults: Sequence[Armed]) -> None:
        """Replace the list of armed faults; an empty list ends a lasting one."""
        fresh = self.directory / "armed.json.new"
        fresh.write_text(json.dumps([asdict(fault) for fault in faults]))
        fresh.replace(self.directory / "armed.json")

    def injected(self, armed: Armed) -> Injected | None:
        """When and where the rank injected this fault; None before."""
        path = mark_path(self.directory, armed)
        return Injected(**json.loads(path.read_text())) if path.exists() else None


def mark_path(directory: Path, armed: Armed) -> Path:
    """File in which the rank notes that it injected this fault."""
    return directory / f"{armed.attempt}-{armed.step}-{armed.rank}-{armed.fault.replace(' ', '_')}.json"
