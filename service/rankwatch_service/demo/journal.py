"""What each rank writes down about itself, apart from rankwatch: the witness that the demo and its tests judge by.

One line for each step: step, attempt, wall clock time at the step's end and a sum over the bits of all weights. Two
ranks that stand at one step of one attempt with different sums have mixed weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished step of one rank."""

    rank: int
    attempt: str
    step: int
    unix_ns: int
    weights: int
    """Sum of the weights' bits as integers: equal on equal replicas."""


class Journal:
    """One rank's side. Each line goes to the kernel at once, so it outlives the process."""

    def __init__(self, directory: Path, launch: str, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = os.open(directory / f"{launch}-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, attempt: str, step: int, weights: int) -> None:
        """Note that `step` is finished with weights that sum to `weights`."""
        os.write(self._file, f"{attempt} {step} {time.time_ns()} {weights}\n".encode())


class JournalReader:
    """Reads all ranks' journals of one directory, each line once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read_bytes: dict[str, int] = {}

    def new_entries(self) -> Iterator[Entry]:
        """Yield what was written since the last call, rank by rank; a line that is still being written waits."""
        if not self._directory.exists():
            return
        for path in sorted(self._directory.iterdir()):
            rank = int(path.name.rpartition("-")[2])
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path.name, 0))
                whole = file.read().rpartition(b"\n")[0]
            if not whole:
                continue
            self._read_bytes[path.name] = self._read_bytes.get(path.name, 0) + len(whole) + 1
            for line in whole.decode().splitlines():
                attempt, step, unix_ns, weights = line.split()
                yield Entry(rank, attempt, int(step), int(unix_ns), int(weights))
