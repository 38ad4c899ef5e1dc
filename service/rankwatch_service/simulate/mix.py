"""Faults in the proportions that are reported for large jobs.

Causes that only device counters show (an XID, a throttled clock) are represented by their effect on the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import numpy as np

from rankwatch_service.simulate.faults import (
    BitFlip,
    Fault,
    Hang,
    HostLoss,
    Kill,
    LinkFlap,
    NonFinite,
    Restart,
    Slow,
    Stall,
)
from rankwatch_service.simulate.job import Job

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
"""Number of each cause among 100 faults."""

SECOND_SLOW: Final = 0.1
"""Probability that another rank is slow at the same time."""

RESTART_STEPS: Final = 50
"""After a fault that ends the attempt, the job resumes from the multiple of this before the last one."""

GAP_STEPS: Final = 150
"""Steps between two faults, and before the first: detectors need them to learn the job again."""


def add_mix(job: Job, faults: int) -> tuple[Job, list[str]]:
    """Inject `faults` faults, evenly spread, each with its usual consequences.

    Returns:
        The job, and the causes that were drawn, in the order of their steps.

    Raises:
        ValueError: the job has too few steps for so many faults.
    """
    if not faults:
        return job, []
    room = (job.steps - job.start_step) // GAP_STEPS - 1
    if faults > room:
        raise ValueError(f"{faults} faults need {(faults + 1) * GAP_STEPS} steps")
    random = np.random.default_rng([job.seed, 2])
    weights = np.asarray(list(SHARES.values())) / 100
    causes = [str(cause) for cause in random.choice(list(SHARES), faults, p=weights)]
    apart = (job.steps - job.start_step) // (faults + 1)
    for number, cause in enumerate(causes, 1):
        job = job.inject(*_faults(job, cause, job.start_step + number * apart, random))
    return job, causes


def _faults(job: Job, cause: str, at: int, random: np.random.Generator) -> Iterator[Fault]:
    rank = int(random.integers(job.world_size))
    hosts = job.topology().host
    half = bool(random.random() < 0.5)
    match cause:
        case "device_gone" | "collective":
            yield Hang(rank, at)
        case "memory_error":
            yield Kill(rank, at, None, 1, "RuntimeError: CUDA error: uncorrectable ECC error encountered")
        case "driver" if half:
            yield Kill(rank, at, None, 1, "RuntimeError: CUDA error: unspecified launch failure")
        case "driver":
            yield Hang(rank, at)
        case "link_in_host":
            yield Hang(tuple(neighbour for neighbour, host in enumerate(hosts) if host == hosts[rank]), at)
        case "host_lost":
            yield HostLoss(hosts[rank], at)
        case "link_between_hosts" if half:
            yield LinkFlap(at, float(random.uniform(2, 6)))
            return
        case "link_between_hosts":
            yield Hang(rank, at)
        case "user_error":
            yield Kill(rank, at, None, 1, "ValueError: expected a batch, got None")
        case "storage":
            yield Stall(at, 300.0, "checkpoint_save")
            return
        case "silent_corruption":
            yield NonFinite(rank, at) if random.random() < 1 / 6 else BitFlip(rank, at)
            at = min(at + 30, job.steps - 1)
        case "throttled":
            # Durations of slow episodes are log-normal, with a mean of ten minutes.
            lasts = max(int(random.lognormal(math.log(600 / job.step_s) - 0.5, 1.0)), 20)
            yield Slow(rank, at, float(random.uniform(1.05, 1.3)), at + lasts)
            if random.random() < SECOND_SLOW:
                other = (rank + int(random.integers(1, job.world_size))) % job.world_size
                yield Slow(other, at + lasts // 4, float(random.uniform(1.05, 1.3)), at + lasts)
            return
    yield Restart(at, max(at - at % RESTART_STEPS - RESTART_STEPS, job.start_step))
