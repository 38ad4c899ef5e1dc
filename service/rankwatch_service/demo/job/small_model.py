"""A small data-parallel training without torch: numpy, and an all-reduce over a file that all ranks map.

Each rank draws its own batches, computes its own gradient, and waits for the others' before it steps, so that a rank
that is slow, has NaN or is gone affects its peers as in a large job.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

INPUTS: Final = 64
WIDTH: Final = 128
BATCH: Final = 256
LOOK_S: Final = 0.0005
"""Pause between two checks for the other ranks: a tenth of a rank's own work."""


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

    def __call__(self, vector: Floats) -> Floats:
        """The sum over all ranks' vectors; waits for every rank."""
        place = self._vectors[self._calls % 2]
        place[self._rank] = vector
        self._calls += 1
        self._counts[self._rank] = self._calls
        while self._counts.min() < self._calls:
            time.sleep(LOOK_S)
        return np.asarray(place.sum(axis=0))


class Regression:
    """Two layers that learn a fixed function of random inputs. Equal seeds give equal weights on all ranks."""

    def __init__(self, seed: int, rank: int) -> None:
        common = np.random.default_rng(seed)
        self._teacher = common.standard_normal(INPUTS) / np.sqrt(INPUTS)
        self.weights: Floats = common.standard_normal(INPUTS * WIDTH + WIDTH) * 0.1
        self._random = np.random.default_rng([seed, rank, time.monotonic_ns()])

    def batch(self, spoilt: float = 1.0) -> tuple[Floats, Floats]:
        """Inputs and targets; `spoilt` multiplies the targets."""
        inputs = self._random.standard_normal((BATCH, INPUTS))
        noise = 0.1 * self._random.standard_normal(BATCH)
        return inputs, spoilt * (np.tanh(inputs @ self._teacher) + noise + 1.0)

    def gradient(self, batch: tuple[Floats, Floats]) -> tuple[float, Floats]:
        """Loss and gradient of one batch."""
        inputs, wanted = batch
        first, second = self.weights[: INPUTS * WIDTH].reshape(INPUTS, WIDTH), self.weights[INPUTS * WIDTH :]
        hidden = np.tanh(inputs @ first)
        error = hidden @ second - wanted
        back = (error[:, None] * second) * (1 - hidden**2)
        gradient = np.concatenate([(inputs.T @ back).ravel(), hidden.T @ error]) / BATCH
        return float(np.mean(error**2)), gradient
