"""One rank of the small job: a training loop that uses rankwatch, and its scripted faults.

Every `every` steps the next fault comes, then the script begins again: a rank twice as slow for half of that time, NaN
in one rank's gradient, bad batches, a rank in an endless loop for `HANG_S`, and a rank that kills itself, after which
the launcher restarts all ranks from their newest checkpoint.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

import rankwatch
from rankwatch_service.demo.job.small_model import AllReduce, Floats, Regression
from rankwatch_service.supervise import die_with_parent

STEP_S: Final = 0.1
"""Interval between steps; the rank spends the rest of it waiting for data."""

REPEATS: Final = 6
"""How often a rank computes its batch, so that a step takes some milliseconds."""

SAVE_STEPS: Final = 50
LEARNING_RATE: Final = 0.02
HANG_S: Final = 20.0
SPOILT_STEPS: Final = 10
SPOILT: Final = 12.0

SLOW_RANK, NAN_RANK, HUNG_RANK, KILLED_RANK = 5, 3, 2, 6


@dataclass(frozen=True)
class SmallRankOptions:
    """The options that the launcher gives to every rank."""

    job: str
    every: int
    folder: Path
    token_file: str


class SmallRankFaults:
    """The faults of a step, by the number of steps since the launch began."""

    def __init__(self, rank: int, world_size: int, every: int) -> None:
        self._every = every
        self._rank = rank
        self._world_size = world_size

    def _is(self, culprit: int) -> bool:
        return self._rank == culprit % self._world_size

    def slow(self, step: int) -> bool:
        """This rank works twice as long."""
        return self._is(SLOW_RANK) and self._every <= step < self._every * 3 // 2

    def poisoned(self, step: int) -> bool:
        """This rank's gradient is NaN."""
        return self._is(NAN_RANK) and step == 2 * self._every

    def spoilt(self, step: int) -> bool:
        """All ranks get bad batches."""
        return 3 * self._every <= step < 3 * self._every + SPOILT_STEPS

    def hung(self, step: int) -> bool:
        """This rank hangs for `HANG_S`."""
        return self._is(HUNG_RANK) and step == 4 * self._every

    def killed(self, step: int) -> bool:
        """This rank ends here."""
        return self._is(KILLED_RANK) and step == 5 * self._every


def main() -> None:
    """Train until a stop command."""
    parser = argparse.ArgumentParser(description="one rank of the small job")
    parser.add_argument("--job", required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--token-file", default="")
    options = SmallRankOptions(**vars(parser.parse_args()))
    die_with_parent(os.getppid())()
    train(options, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["RANKWATCH_LAUNCH"])


def train(options: SmallRankOptions, rank: int, world_size: int, launch: str) -> None:
    """The training script, as a user would write it."""
    model = Regression(1, rank)
    all_reduce = AllReduce(options.folder / f"reduce-{launch}", rank, world_size, len(model.weights) + 1)
    faults = SmallRankFaults(rank, world_size, options.every)
    watch = rankwatch.start(options.job, relaunches=True, token_file=options.token_file or None)

    @watch.on_checkpoint
    def save(step: int) -> str:
        path = options.folder / f"weights-{step:09d}.npy"
        if rank == 0:
            fresh = path.with_suffix(".new")
            with fresh.open("wb") as file:
                np.save(file, model.weights)
            fresh.replace(path)
            for old in sorted(options.folder.glob("weights-*.npy"))[:-4]:
                old.unlink()
        return str(path)

    @watch.on_rollback
    def load(checkpoint: rankwatch.Checkpoint) -> int:
        model.weights = np.load(checkpoint.location)
        return checkpoint.step

    saved = sorted(options.folder.glob("weights-*.npy"))
    first = 0
    if saved:
        model.weights, first = np.load(saved[-1]), int(saved[-1].stem.partition("-")[2])
    beat_s = time.monotonic()
    for step in watch.steps(10**12, start=first):
        since = step - first
        with watch.phase("data_wait"):
            batch = model.batch(SPOILT if faults.spoilt(since) else 1.0)
            beat_s = max(beat_s + STEP_S, time.monotonic())
            time.sleep(beat_s - time.monotonic() if beat_s > time.monotonic() else 0.0)
        loss, gradient = _compute(model, batch, watch, faults, since)
        if faults.poisoned(since):
            gradient[0] = math.nan
        own_norm = float(np.linalg.norm(gradient))
        with watch.phase("collective"):
            reduced = all_reduce(np.append(gradient, loss)) / world_size
        norm = float(np.linalg.norm(reduced[:-1]))
        with watch.phase("optimizer"):
            if math.isfinite(norm):  # a step with a non-finite gradient is skipped, as in many scripts
                model.weights = model.weights - LEARNING_RATE * reduced[:-1] / max(norm, 1.0)
        watch.log(loss=float(reduced[-1]), grad_norm=norm, local_grad_norm=own_norm)
        if (step + 1) % SAVE_STEPS == 0:
            begun_s = time.monotonic()
            with watch.phase("checkpoint_save"):
                location = save(step + 1)
            watch.checkpoint_saved(step + 1, location, seconds=time.monotonic() - begun_s)


def _compute(
    model: Regression, batch: tuple[Floats, Floats], watch: rankwatch.Watch, faults: SmallRankFaults, since: int
) -> tuple[float, Floats]:
    if faults.killed(since):
        os.kill(os.getpid(), signal.SIGKILL)
    with watch.phase("forward"):
        if faults.hung(since):
            endless_loop()
        for _ in range(REPEATS * (2 if faults.slow(since) else 1)):
            loss, gradient = model.gradient(batch)
    return loss, gradient


def endless_loop() -> None:
    """Loop for `HANG_S`."""
    until_s = time.monotonic() + HANG_S
    while time.monotonic() < until_s:
        pass


if __name__ == "__main__":
    main()
