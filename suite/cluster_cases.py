"""Lines of the labelled suite from the cluster model. They have no goals, and no detector is tuned to them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from suite.cases import LabelledCase
from suite.cluster_model import (
    ClusterFault,
    ClusterJob,
    ClusterPlacement,
    LossBurst,
    LossDrift,
    NonFiniteGradient,
    RankHang,
    RankKill,
    Resize,
    SlowDevice,
    SlowLoader,
    SlowSwitch,
    hosts_for,
    ranks_of_host,
    ranks_of_switch,
)

AT: Final = 300
"""The step at which faults begin."""
LOSS_FROM: Final = 2_000
"""A step from which the loss is nearly flat."""
RANK, SETTING_RANK = 5, 13
"""The ranks of faults of one rank; in a setting it is on the second host, which has the slower kind of devices."""
SETTINGS: Final = {
    "experts": ClusterJob(ClusterPlacement(ep=8)),
    "long sequences": ClusterJob(ClusterPlacement(tp=2, cp=4)),
    "stages": ClusterJob(ClusterPlacement(tp=2, pp=4)),
    "two kinds of devices": ClusterJob(ClusterPlacement(speeds=(1.0, 0.7))),
    "elastic": ClusterJob(resizes=(Resize(120, tuple(range(1, 8))), Resize(220, tuple(range(8))))),
    "uneven evaluations": ClusterJob(eval_every=60),
    "steps of 30 ms": ClusterJob(step_s=0.03, steps=1500),
    "steps of 60 s": ClusterJob(step_s=60.0),
    "every tenth loss": ClusterJob(log_every=10, log_lag=10),
}
"""Jobs of 64 ranks, each with something that most jobs do not have."""


ClusterCase = LabelledCase[ClusterJob]


def cluster_faults(sizes: Sequence[int]) -> Iterator[ClusterCase]:
    """Jobs with a fault: each fault at each number of ranks, multiples of eight, and a slow rank in each setting."""
    for size in sizes:
        job = ClusterJob(hosts=hosts_for(size))
        for name, fault, cause in _faults(size):
            yield _case(f"{name}, {size:,} ranks", job, fault, cause)
        for name, fault in LOSS_FAULTS.items():
            yield _case(f"{name}, {size:,} ranks", replace(job, start_step=LOSS_FROM, steps=LOSS_FROM + 500), fault)
    for setting, job in SETTINGS.items():
        for ratio in (1.1, 1.3):
            yield _case(
                f"straggler {_percent(ratio)}, {setting}", job, SlowDevice(AT, ratio, (SETTING_RANK,)), "worker"
            )
    logged = replace(SETTINGS["every tenth loss"], start_step=LOSS_FROM, steps=LOSS_FROM + 700)
    for name, fault in LOSS_FAULTS.items():
        yield _case(f"{name}, every tenth loss", logged, fault)


def cluster_clean(sizes: Sequence[int]) -> Iterator[ClusterCase]:
    """Jobs without a fault: each number of ranks, and each setting."""
    for size in sizes:
        yield _case(f"clean, {size:,} ranks", ClusterJob(hosts=hosts_for(size), steps=1000))
    for setting, job in SETTINGS.items():
        yield _case(setting, job)


LOSS_FAULTS: Final[dict[str, ClusterFault]] = {
    "loss x1.5 for 20 steps": LossBurst(LOSS_FROM + 400, 1.5, 20),
    "loss +2 % a step": LossDrift(LOSS_FROM + 400, 0.02),
}


def _faults(size: int) -> Iterator[tuple[str, ClusterFault, str]]:
    """Faults of jobs of so many ranks: name, fault, expected cause."""
    for ratio in (1.05, 1.1, 1.3):
        yield f"straggler {_percent(ratio)}", SlowDevice(AT, ratio, (RANK,)), "worker"
    yield "loader of a rank x3", SlowLoader(AT, 3.0, (RANK,)), "data"
    if size > 2 * len(ranks_of_host(0)):
        yield "host +10 %", SlowDevice(AT, 1.1, ranks_of_host(1)), ""
        yield "loaders of a host x3", SlowLoader(AT, 3.0, ranks_of_host(1)), "data"
    if size > 2 * len(ranks_of_switch(0)):
        yield "rack below a switch +10 %", SlowDevice(AT, 1.1, ranks_of_switch(1)), ""
    yield "all devices +10 %", SlowDevice(AT, 1.1), ""
    yield "all devices +30 %", SlowDevice(AT, 1.3), ""
    yield "collectives over a switch x4", SlowSwitch(AT, 4.0, 0), ""
    yield "hang", RankHang(AT, RANK, 60.0), ""
    yield "rank killed", RankKill(AT, RANK), ""
    yield "NaN in a rank's gradients", NonFiniteGradient(AT, RANK), ""


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.0f} %"


def _case(name: str, job: ClusterJob, fault: ClusterFault | None = None, cause: str = "") -> ClusterCase:
    job = job if fault is None else replace(job, faults=(fault,))
    return ClusterCase(name, partial(_of_seed, name, job), cause=cause)


def _of_seed(name: str, job: ClusterJob, seed: int) -> ClusterJob:
    """Every line has noise of its own, so that what is rare is not in all of them at once."""
    return replace(job, seed=zlib.crc32(f"{name} {seed}".encode()))
