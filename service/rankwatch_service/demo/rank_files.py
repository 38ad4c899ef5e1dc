"""The files between the demo and its ranks: the faults that it arms, and what each rank has done.

The demo writes one list of armed faults; every rank checks that file's modification time at the start of a step. A
fault belongs to one attempt and one step, so a step that is repeated after a rollback or a relaunch has no fault. A
rank notes each fault with its time before it injects it, since a rank that kills itself cannot do so afterwards.

Each rank keeps a journal independently of rankwatch, by which the demo and tests check the training: one line for each
step with attempt, step, wall clock time at its end, and the sum of the bits of all weights. Ranks with different sums
after the same step of an attempt have diverged.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

from rankwatch_service.clock import Clock, SystemClock

STEP_TIMES_COUNT = 50


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


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """One finished step of one rank."""

    rank: int
    attempt: str
    step: int
    unix_ns: int
    weights: int
    """Sum of the weights' bits as integers: equal on equal replicas."""


class Journal:
    """The journal of one rank. Each line is written at once, so that it survives the process."""

    def __init__(self, directory: Path, launch: str, rank: int, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        directory.mkdir(parents=True, exist_ok=True)
        self._file = os.open(directory / f"{launch}-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, attempt: str, step: int, weights: int) -> None:
        """Append that `step` is finished with weights that sum to `weights`."""
        os.write(self._file, f"{attempt} {step} {self._clock.unix_ns()} {weights}\n".encode())


class JournalReader:
    """Reads the journals of all ranks: how far training is, and whether the ranks agree. `look` reads new lines."""

    def __init__(self, directory: Path, world_size: int) -> None:
        self._directory = directory
        self._world_size = world_size
        self._read_bytes: dict[str, int] = {}
        self._steps: dict[tuple[str, int], dict[int, FinishedStep]] = {}
        self.attempt = ""
        """The newest attempt that any rank has finished a step of."""
        self._step: dict[int, int] = {}

    @property
    def step(self) -> int:
        """The newest step of the newest attempt that every rank has finished; -1 before."""
        return min(self._step.values()) if len(self._step) == self._world_size else -1

    @property
    def steps_trained(self) -> int:
        """Steps finished in all attempts; repeated steps count again."""
        return len(self._steps)

    def look(self) -> None:
        """Read what the ranks have written since the last call."""
        for entry in self._new_entries():
            self._steps.setdefault((entry.attempt, entry.step), {})[entry.rank] = entry
            if _order(entry.attempt) > _order(self.attempt):
                self.attempt, self._step = entry.attempt, {}
            if entry.attempt == self.attempt:
                self._step[entry.rank] = entry.step

    def ended_unix_ns(self, attempt: str, step: int) -> int | None:
        """When the last rank finished this step; None if no rank did."""
        ranks = self._steps.get((attempt, step), {})
        return max((entry.unix_ns for entry in ranks.values()), default=None)

    def first_step(self, attempt: str) -> int:
        """The first step that any rank finished in this attempt.

        Raises:
            ValueError: no rank finished a step.
        """
        return min(step for known, step in self._steps if known == attempt)

    def step_time_s(self) -> float:
        """Median time of one step over the newest `STEP_TIMES_COUNT` of this attempt; 0 before there are two."""
        newest = range(max(self.step - STEP_TIMES_COUNT, 0), self.step + 1)
        ends = [end for step in newest if (end := self.ended_unix_ns(self.attempt, step)) is not None]
        return statistics.median(b - a for a, b in pairwise(ends)) / 1e9 if len(ends) > 1 else 0.0

    def mixed(self) -> list[tuple[str, int]]:
        """Steps (attempt, step) after which the ranks had different weights, in order of time."""
        return [place for place, ranks in self._steps.items() if len({entry.weights for entry in ranks.values()}) > 1]

    def ragged(self) -> list[tuple[str, int]]:
        """Steps (attempt, step) that some ranks of an attempt made and others skipped.

        The last step of an attempt is left out: when a rank dies, the others may just have finished it. In the newest
        attempt only steps that all ranks have passed are checked.
        """
        newest: dict[str, int] = {}
        for attempt, step in self._steps:
            newest[attempt] = max(step, newest.get(attempt, -1))
        settled = {attempt: self.step if attempt == self.attempt else last - 1 for attempt, last in newest.items()}
        return [
            (attempt, step)
            for (attempt, step), ranks in self._steps.items()
            if len(ranks) < self._world_size and step <= settled[attempt]
        ]

    def _new_entries(self) -> Iterator[FinishedStep]:
        if not self._directory.exists():
            return
        for path in sorted(self._directory.iterdir()):
            rank = int(path.name.rpartition("-")[2])
            # A line that is still being written waits for the next call.
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path.name, 0))
                whole = file.read().rpartition(b"\n")[0]
            if not whole:
                continue
            self._read_bytes[path.name] = self._read_bytes.get(path.name, 0) + len(whole) + 1
            for line in whole.decode().splitlines():
                attempt, step, unix_ns, weights = line.split()
                yield FinishedStep(rank, attempt, int(step), int(unix_ns), int(weights))


def _order(attempt: str) -> tuple[int, int]:
    """Attempts in the order of time: by number of the launch, then by rollback."""
    if not attempt:
        return (-1, -1)
    launch, _, k = attempt.rpartition(".")
    return int(launch.rpartition("-")[2]), int(k)
