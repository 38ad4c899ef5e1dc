"""Faults as they come in practice: drawn with the shares in which large jobs report their causes.

What only device counters tell (an XID, a throttled clock) shows here by what it does to the ranks.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from rankwatch_service.simulate.injected import Stall
from rankwatch_service.simulate.scenario import Job

SHARES: Final = {
    "device_gone": 20,  # a device falls off its bus: its rank arrives nowhere
    "memory_error": 20,  # uncorrectable memory: the process ends with an error of the device
    "driver": 10,  # half exceptions, half hangs
    "link_in_host": 6,  # a link between the devices of one host: all its ranks are late
    "host_lost": 10,
    "link_between_hosts": 10,  # half down for good, half a moment
    "collective": 6,  # all are alive, one never entered
    "user_error": 10,
    "storage": 3,  # a save that takes far longer
    "silent_corruption": 4,  # one in six shows, the others are a difference between replicas
    "throttled": 1,
}
"""Of 100 faults."""

SECOND_SLOW: Final = 0.1
"""Probability that another rank is slow at the same time."""

RESTART_STEPS: Final = 50
"""After a fault that ends the attempt the job goes on from the last multiple of this."""

GAP_STEPS: Final = 150
"""Steps between two faults, and before the first: detectors have to have learnt the job anew."""


def add_mix(job: Job, faults: int) -> list[str]:
    """Let faults happen to a job, evenly spread, each followed by what follows in practice.

    Returns:
        The causes that were drawn, in the order of their steps.

    Raises:
        ValueError: the job has not steps enough for so many.
    """
    if not faults:
        return []
    room = (job.steps - job.start_step) // GAP_STEPS - 1
    if faults > room:
        raise ValueError(f"{faults} faults need {(faults + 1) * GAP_STEPS} steps")
    random = np.random.default_rng([job.seed, 2])
    weights = np.asarray(list(SHARES.values())) / 100
    causes = [str(cause) for cause in random.choice(list(SHARES), faults, p=weights)]
    apart = (job.steps - job.start_step) // (faults + 1)
    for number, cause in enumerate(causes, 1):
        _add(job, cause, job.start_step + number * apart, random)
    return causes


def _add(job: Job, cause: str, at: int, random: np.random.Generator) -> None:
    rank = int(random.integers(job.world_size))
    host = job.topology().host[rank]
    neighbours = tuple(r for r, name in enumerate(job.topology().host) if name == host)
    half = bool(random.random() < 0.5)
    match cause:
        case "device_gone" | "collective":
            job.hang(rank, at)
        case "memory_error":
            job.kill(rank, at, None, 1, "RuntimeError: CUDA error: uncorrectable ECC error encountered")
        case "driver" if half:
            job.kill(rank, at, None, 1, "RuntimeError: CUDA error: unspecified launch failure")
        case "driver":
            job.hang(rank, at)
        case "link_in_host":
            job.hang(neighbours, at)
        case "host_lost":
            job.lose_host(host, at)
        case "link_between_hosts" if half:
            job.flap(at, float(random.uniform(2, 6)))
            return
        case "link_between_hosts":
            job.hang(rank, at)
        case "user_error":
            job.kill(rank, at, None, 1, "ValueError: expected a batch, got None")
        case "storage":
            job.stalls.append(Stall(at, 300.0, "checkpoint_save"))
            return
        case "silent_corruption":
            job.nonfinite(rank, at) if random.random() < 1 / 6 else job.flip(rank, at)
            at = min(at + 30, job.steps - 1)
        case "throttled":
            # Durations of slow episodes are log-normal, with a mean of ten minutes.
            lasts = max(int(random.lognormal(math.log(600 / job.step_s) - 0.5, 1.0)), 20)
            job.slow(rank, at, float(random.uniform(1.05, 1.3)), at + lasts)
            if random.random() < SECOND_SLOW:
                other = (rank + int(random.integers(1, job.world_size))) % job.world_size
                job.slow(other, at + lasts // 4, float(random.uniform(1.05, 1.3)), at + lasts)
            return
    job.restart(at, max(at - at % RESTART_STEPS - RESTART_STEPS, job.start_step))
