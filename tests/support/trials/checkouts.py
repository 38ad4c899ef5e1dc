"""Blocks of a benchmark that two checkouts' packages measure alternately, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import rankwatch

ROOT = Path(__file__).parents[3]
SIDES = ("before", "after")
"""The other checkout, and this one."""
Block = Callable[[Any], Any]
"""Measures one block; takes and returns what JSON can hold."""


@contextlib.contextmanager
def measured_by(root: Path, script: str, *arguments: str) -> Iterator[Block]:
    """A process that measures blocks with a checkout's `rankwatch`.

    Args:
        root: the checkout.
        script: the benchmark. With `--blocks FOLDER` and the arguments it calls `serve`.
        arguments: what its blocks are like.

    Raises:
        SystemExit: the process measures another package, or has ended.
    """
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=shared) as folder:
        command = [sys.executable, "-W", "ignore", script, "--blocks", folder, *arguments]
        env = {**os.environ, "PYTHONPATH": str(root / "collectors")}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env) as child:
            asks, answers = child.stdin, child.stdout
            assert asks is not None
            assert answers is not None

            def answer() -> Any:
                if not (line := answers.readline()):
                    raise SystemExit(f"what measures {root} has ended; to see why: {shlex.join(command)}")
                return json.loads(line)

            def block(asked: Any) -> Any:
                print(json.dumps(asked), file=asks, flush=True)
                return answer()

            package = answer()
            if not Path(package).is_relative_to(root):
                raise SystemExit(f"{package} was measured, which is not in {root}")
            yield block
            asks.close()


def serve(block: Block) -> None:
    """Answer with a block for each line of stdin; what `measured_by` starts calls this once it is ready."""
    print(json.dumps(rankwatch.__file__), flush=True)
    for line in sys.stdin:
        print(json.dumps(block(json.loads(line))), flush=True)


def alternately(
    before: str, rounds: int, asked: Iterable[Any], script: str, *arguments: str
) -> Iterator[tuple[list[Any], list[Any]]]:
    """For each of `asked`: the blocks of the other checkout and, round by round beside them, of this one."""
    roots = Path(before).resolve(), ROOT
    with contextlib.ExitStack() as stack:
        blocks = [stack.enter_context(measured_by(root, script, *arguments)) for root in roots]
        for one in asked:
            taken: tuple[list[Any], list[Any]] = [], []
            for number in range(rounds):
                for side in (0, 1) if number % 2 else (1, 0):
                    taken[side].append(blocks[side](one))
            yield taken
