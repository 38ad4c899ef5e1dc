"""All scripts with all faults, several times, also beside CPU burners (`make adoption`).

Prints a line for each run, what went wrong with it, and a Markdown table at the end. The exit status is 1 where
something was told of a script with which all was well, or a fault was not named, or more than it was.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.adoption.cases import CASES, SLOW, Case, Fault
from tests.adoption.world import World, opened_world

Cell = tuple[Case, Fault | None]

CLEAN = "clean"
COLUMNS = (CLEAN, "stop", "kill", "fail", "leave", "slow", "nan", "flip", "spike")
ROUNDS = 3
BURNERS = (0, 2)
AT_A_TIME = 2


class Table:
    """How often each cell came out right."""

    def __init__(self) -> None:
        self._right: Counter[tuple[str, str]] = Counter()
        self._tried: Counter[tuple[str, str]] = Counter()

    def add(self, case: Case, column: str, right: bool) -> None:
        self._right[case.name, column] += right
        self._tried[case.name, column] += 1

    @property
    def failed(self) -> int:
        return self._tried.total() - self._right.total()

    def markdown(self) -> str:
        """Right of tried; a dash where a fault does not apply."""
        lines = [f"| script | {' | '.join(COLUMNS)} |", f"| --- {'| --- ' * len(COLUMNS)}|"]
        for name in dict.fromkeys(name for name, _ in self._tried):
            cells = [
                f"{self._right[name, column]} of {self._tried[name, column]}" if self._tried[name, column] else "–"
                for column in COLUMNS
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        return "\n".join(lines)


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    """So many endless loops beside whatever happens meanwhile."""
    beside = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in beside:
            process.kill()
            process.wait()


def tried(world: World, case: Case, fault: Fault | None) -> str:
    """Run one cell; "" if it came out right, else what came out."""
    try:
        outcome = world.run(case, fault)
        right = outcome.loud == [] if fault is None else outcome.told(fault) and len(outcome.loud) == 1
        return "" if right else str(outcome)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return str(error)


def column(fault: Fault | None) -> str:
    """In which column of the table a cell stands."""
    return CLEAN if fault is None else fault.name.partition("_")[0]


def outcomes(world: World, cells: Sequence[Cell]) -> Iterator[tuple[Case, Fault | None, str]]:
    """What came out of each cell, two at a time; a slow rank alone, since its fault is a matter of time."""
    together = [cell for cell in cells if cell[1] is not SLOW]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for cell, wrong in zip(together, pool.map(lambda cell: tried(world, *cell), together), strict=True):
            yield *cell, wrong
    for case, fault in cells:
        if fault is SLOW:
            yield case, fault, tried(world, case, fault)


def main() -> int:
    """Run the matrix."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--burners", type=int, nargs="+", default=BURNERS, help="each round is run beside each of these"
    )
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--faults", nargs="+", default=COLUMNS)
    options = parser.parse_args()
    cells = [
        (case, fault)
        for case in CASES
        for fault in (None, *case.faults)
        if case.name in options.cases and column(fault) in options.faults
    ]
    failed = 0
    with tempfile.TemporaryDirectory() as folder, opened_world(Path(folder)) as world:
        for burners in options.burners:
            table = Table()
            for number in range(options.rounds):
                with burning(burners):
                    for case, fault, wrong in outcomes(world, cells):
                        table.add(case, column(fault), not wrong)
                        told = f"round {number + 1}, {burners} burners: {case.name}, {column(fault)}"
                        print(f"{told}: {'WRONG' if wrong else 'right'}", wrong, sep="\n" * bool(wrong), flush=True)
            print(f"\nBeside {burners} CPU burners, {options.rounds} rounds:\n\n{table.markdown()}\n", flush=True)
            failed += table.failed
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
