"""A small job that trains without end on one host with scripted faults, for `docker compose up`.

    python -m rankwatch_service.demo.small_job --job small --ranks 8 --folder DIR

Its ranks are real processes that use rankwatch's SDK, with a real agent; torch is not needed. The addresses of the
service and Kafka are read from the environment, as by every job.

Every `--every` steps the next fault comes, then the script begins again: a rank twice as slow for half of that time,
NaN in one rank's gradient, bad batches, a rank in an endless loop for `HANG_S`, and a rank that kills itself, after
which the launcher restarts all ranks from their newest checkpoint.
"""

from __future__ import annotations

import argparse
import math
import mmap
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

import rankwatch
from rankwatch_service.clock import SystemClock
from rankwatch_service.demo.processes import Launcher, await_none
from rankwatch_service.supervise import die_with_parent, python_module

EVERY_STEPS: Final = 600
"""Steps between two faults, which take a minute."""
STEP_S: Final = 0.1
"""Interval between steps; the rank spends the rest of it waiting for data."""
WORK_S: Final = 0.01
"""CPU time that a rank needs for its batch."""
WEIGHTS: Final = 64
SAVE_STEPS: Final = 50
LEARNING_RATE: Final = 0.02
HANG_S: Final = 20.0
SPOILT_STEPS: Final = 10
SPOILT: Final = 12.0
SLOW_RANK, NAN_RANK, HUNG_RANK, KILLED_RANK = 5, 3, 2, 6

LOOK_S: Final = 0.05
REDUCE_LOOK_S: Final = 0.0005
"""Pause between two checks for the other ranks."""
AGENT_END_S: Final = 8.0
"""Time for the agent to send the last records and exit."""


def main(arguments: list[str]) -> int:
    """Run the job until SIGTERM or SIGINT; with `--as-rank`, be one of its ranks."""
    parser = argparse.ArgumentParser(description="a small job with faults by script")
    parser.add_argument("--job", default="small")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--every", type=int, default=EVERY_STEPS, help="steps between two faults")
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints and the ranks' output")
    parser.add_argument("--token-file", default="", help="file with an ingest token")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.as_rank:
        die_with_parent(os.getppid())()
        train(options.job, options.every, options.folder, options.token_file or None)
        return 0
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: stopping.append(number))
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    ranks = ("--as-rank", "--job", options.job, "--every", str(options.every), "--folder", str(folder))
    command = python_module("rankwatch_service.demo.small_job", *ranks, "--token-file", options.token_file)
    # One thread for each rank, since there may be more ranks than cores.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    # A number that increases with each start, so that a job restarted in the same folder repeats no launch name.
    begins = SystemClock().unix_ns() // 10**9
    launcher = Launcher(command, options.ranks, options.job, folder / "logs", environment, sys.maxsize, begins)
    launcher.start()
    try:
        while not stopping:
            if launcher.poll():
                print(f"a rank died, all ranks restart as {launcher.launch}", flush=True)  # noqa: T201 - to the container's log
            time.sleep(LOOK_S)
    finally:
        launcher.stop()
    await_none(str(folder), AGENT_END_S, "rankwatch.agent")
    return 0


class AllReduce:
    """Sums vectors over all ranks of one host. Counters and vectors are in a file that each rank maps.

    A rank writes its vector, then its count; it reads the others' vectors once their counts are as high. Two sets of
    vectors alternate, so that a rank one call ahead does not overwrite vectors that a slower one still reads.
    """

    def __init__(self, path: Path, rank: int, world_size: int, length: int) -> None:
        """Map the file at `path`, which is the same for all ranks; the first one creates it."""
        size = 8 * world_size * (1 + 2 * length)
        with path.open("a+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        words = np.frombuffer(self._map, dtype=np.float64)
        self._counts = words[:world_size].view(np.int64)
        self._vectors = words[world_size:].reshape(2, world_size, length)
        self._rank = rank
        self._calls = 0

    def __call__(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum over all ranks' vectors; waits for every rank."""
        place = self._vectors[self._calls % 2]
        place[self._rank] = vector
        self._calls += 1
        self._counts[self._rank] = self._calls
        while self._counts.min() < self._calls:
            time.sleep(REDUCE_LOOK_S)
        return np.asarray(place.sum(axis=0))


def train(job: str, every: int, folder: Path, token_file: str | None) -> None:
    """The training script, as a user would write it, with its faults: weights that descend to zero."""
    rank, world_size, launch = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["RANKWATCH_LAUNCH"]
    all_reduce = AllReduce(folder / f"reduce-{launch}", rank, world_size, WEIGHTS + 1)
    random = np.random.default_rng([rank, time.monotonic_ns()])
    watch = rankwatch.start(job, relaunches=True, token_file=token_file)
    weights = np.ones(WEIGHTS)

    @watch.on_checkpoint
    def save(step: int) -> str:
        path = folder / f"weights-{step:09d}.npy"
        if rank == 0:
            fresh = path.with_suffix(".new")
            with fresh.open("wb") as file:
                np.save(file, weights)
            fresh.replace(path)
            for old in sorted(folder.glob("weights-*.npy"))[:-4]:
                old.unlink()
        return str(path)

    @watch.on_rollback
    def load(checkpoint: rankwatch.Checkpoint) -> int:
        weights[:] = np.load(checkpoint.location)
        return checkpoint.step

    saved = sorted(folder.glob("weights-*.npy"))
    first = 0
    if saved:
        weights[:], first = np.load(saved[-1]), int(saved[-1].stem.partition("-")[2])
    beat_s = time.monotonic()
    for step in watch.steps(10**12, start=first):
        fault, since = divmod(step - first, every)
        with watch.phase("data_wait"):
            beat_s = max(beat_s + STEP_S, time.monotonic())
            time.sleep(max(beat_s - time.monotonic(), 0.0))
        if (fault, since, rank) == (5, 0, KILLED_RANK % world_size):
            os.kill(os.getpid(), signal.SIGKILL)
        with watch.phase("forward"):
            if (fault, since, rank) == (4, 0, HUNG_RANK % world_size):
                endless_loop()
            compute(WORK_S * (2 if fault == 1 and 2 * since < every and rank == SLOW_RANK % world_size else 1))
            gradient = weights + 0.1 * random.standard_normal(WEIGHTS)
            loss = float(np.mean(weights**2)) + 1.0 + 0.02 * random.standard_normal()
        if fault == 3 and since < SPOILT_STEPS:
            gradient, loss = SPOILT * gradient, SPOILT**2 * loss
        if (fault, since, rank) == (2, 0, NAN_RANK % world_size):
            gradient[0] = math.nan
        own_norm = float(np.linalg.norm(gradient))
        with watch.phase("collective"):
            reduced = all_reduce(np.append(gradient, loss)) / world_size
        norm = float(np.linalg.norm(reduced[:-1]))
        with watch.phase("optimizer"):
            if math.isfinite(norm):  # a step with a non-finite gradient is skipped, as in many scripts
                weights -= LEARNING_RATE * reduced[:-1] / max(norm, 1.0)
        watch.log(loss=float(reduced[-1]), grad_norm=norm, local_grad_norm=own_norm)
        if (step + 1) % SAVE_STEPS == 0:
            begun_s = time.monotonic()
            with watch.phase("checkpoint_save"):
                location = save(step + 1)
            watch.checkpoint_saved(step + 1, location, seconds=time.monotonic() - begun_s)


def compute(seconds: float) -> None:
    """Work for so much CPU time."""
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def endless_loop() -> None:
    """Loop for `HANG_S`."""
    until_s = time.monotonic() + HANG_S
    while time.monotonic() < until_s:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
