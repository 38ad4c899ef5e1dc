"""Measures ranks that share cores: `python -m tests.support.ranks.crowded_rows OUT [RANKS] [SECONDS] [LOADS]`.

Real processes do the same work in each step and wait for each other, recorded by the SDK without an agent, while bursts
of endless loops come and go beside them. OUT is a gzipped CSV for `rankwatch replay`, in the order of steps.
"""

from __future__ import annotations

import csv
import gzip
import os
import random
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np

import rankwatch
from rankwatch.reader import RingReader, StepEntry

PRODUCTS = 24
"""Products of matrices in a step: some 20 ms on an idle core."""

STEPS_MAX = 1_000_000


def work(rank: int, world_size: int, barrier: Barrier) -> None:
    """One rank."""
    watch = rankwatch.start(job="crowded", launch="l", rank=rank, world_size=world_size, agent=False)
    matrix = np.random.default_rng(rank).standard_normal((256, 256))
    for _ in watch.steps(STEPS_MAX):
        for _ in range(PRODUCTS):
            matrix = matrix @ matrix
            matrix /= np.abs(matrix).max()
        with watch.phase("collective"):
            barrier.wait()


def record(out: Path, world_size: int = 4, seconds: float = 60, loads: int = 0) -> None:
    """Run the job for so long, with bursts of up to so many endless loops, and write what it recorded."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"RANKWATCH_DIR": folder, "OPENBLAS_NUM_THREADS": "1"}
        fresh = get_context("spawn")
        barrier = fresh.Barrier(world_size)
        ranks = [fresh.Process(target=work, args=(rank, world_size, barrier)) for rank in range(world_size)]
        readers: dict[Path, RingReader] = {}
        entries: list[tuple[int, StepEntry]] = []
        burst: list[subprocess.Popen[bytes]] = []
        chance, now_s = random.Random(world_size), time.monotonic()
        end_s, burst_end_s = now_s + seconds, now_s + 5.0
        for process in ranks:
            process.start()
        try:
            while (now_s := time.monotonic()) < end_s:
                if loads and now_s > burst_end_s:
                    _end(burst)
                    count = chance.randint(0, loads)
                    burst = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
                    burst_end_s = now_s + chance.uniform(2.0, 20.0)
                time.sleep(0.5)
                entries += _taken(Path(folder), readers)
        finally:
            _end(burst)
            for process in ranks:
                process.kill()
                process.join()
            for reader in readers.values():
                reader.close()
        _write(out, entries)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def _taken(folder: Path, readers: dict[Path, RingReader]) -> list[tuple[int, StepEntry]]:
    """What ranks have recorded since the last time."""
    taken = []
    for path in sorted(folder.glob("*.ring")):
        if path not in readers:
            readers[path] = RingReader(str(path))
        rank = int(path.name.split("-r")[-1].split("-p")[0])
        taken += [(rank, entry) for entry in readers[path].poll().entries if isinstance(entry, StepEntry)]
    return taken


def _write(out: Path, entries: list[tuple[int, StepEntry]]) -> None:
    with gzip.open(out, "wt", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["step", "rank", "host", "time_s", "step_time_s", "busy_s", "busy_cpu_s", "queued_s", "wait_s"])
        first_ns = min(entry.time_unix_ns for _, entry in entries)
        for rank, entry in sorted(entries, key=lambda each: (each[1].step, each[0])):
            seconds = (entry.step_time_s, entry.busy_s, entry.busy_cpu_s, entry.queued_s, entry.wait_s)
            since_s = (entry.time_unix_ns - first_ns) / 1e9
            rows.writerow([entry.step, rank, "here", f"{since_s:.3f}", *(f"{each:.5f}" for each in seconds)])


if __name__ == "__main__":
    record(Path(sys.argv[1]), *map(int, sys.argv[2:]))
