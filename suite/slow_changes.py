"""Cases in which something changes slowly, or shows on one rank only: alone, in pairs, and in standing conditions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Final

from rankwatch_service.simulate.faults import Drift, LossClimb, LossSpike, Overflow
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.noise import Noise
from rankwatch_service.simulate.placement import RankPlacement
from suite.cases import Case
from suite.conditions import CONDITIONS, STAGES, CasePart

SIZES: Final = (16, 64, 256)
START: Final = 1000
"""The loss is flat from there on."""
AT: Final = START + 500
"""By then the job's own spread between blocks is known."""
STEPS: Final = AT + 700

CHANGES: Final = [
    CasePart("all ranks +25 % over 1,800 steps", lambda job: job.inject(Drift(AT, 1.25, 1800)), 640),
    CasePart("loss x2.2 over 1,300 steps", lambda job: job.inject(LossClimb(AT, 2.2, 1300)), 200),
    CasePart("a norm that overflows on one rank", lambda job: job.inject(Overflow(job.world_size // 3, AT + 300)), 0),
]
SPIKE: Final = CasePart("a spike of x2", lambda job: job.inject(LossSpike(AT + 400, 2.0, 2)), 2)


def _job(size: int, seed: int, *parts: CasePart) -> Job:
    job = Job(size, STEPS, seed, start_step=START, noise=Noise(loss=0.015), placement=RankPlacement(pp=STAGES))
    for part in parts:
        job = part.apply(job)
    return job


def _case(size: int, fault: CasePart, *others: CasePart) -> Case:
    name = ", beside ".join(part.name for part in (fault, *others))
    delay_max = max(part.delay_max for part in (fault, *others))
    return Case(f"{name}, {size:,} ranks", lambda seed: _job(size, seed, fault, *others), delay_max)


def slow_changes(sizes: tuple[int, ...] = SIZES) -> Iterator[Case]:
    """Every change alone, beside every condition and every other change, and a spike on the way up, in every size."""
    for size in sizes:
        for fault in CHANGES:
            yield _case(size, fault)
            for condition in CONDITIONS:
                yield _case(size, fault, condition)
        for one, other in combinations(CHANGES, 2):
            yield _case(size, one, other)
        yield _case(size, CHANGES[1], SPIKE)
