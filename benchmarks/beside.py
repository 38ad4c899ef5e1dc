"""Lines of the labelled suite with two things at once: a job with a way of its own, and what goes wrong in it later.

Each condition alone must disturb nobody, or name who is slow from the start; each fault beside it is one incident of
its own, found and named as if the condition were not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from suite import Case

from rankwatch_detectors.base import Kind
from rankwatch_service.simulate.injected import Label
from rankwatch_service.simulate.scenario import Job

SIZES: Final = (16, 64, 1024)
AT: Final = 300
STEPS: Final = 420
STAGES: Final = 4


@dataclass(frozen=True)
class Part:
    """Half of a line: what it does to a job, and within how many steps it has to be told where it is labelled."""

    name: str
    apply: Callable[[Job], object]
    delay_max: float = 30.0


def _unlabelled(job: Job, rank: int | tuple[int, ...], at: int, factor: float) -> None:
    before = list(job.labels)
    job.slow(rank, at, factor).labels[:] = before


def _heavier_stage(job: Job) -> None:
    """The last stage becomes 40 % heavier than the others, where it was 25 %."""
    ranks = tuple(range(job.world_size - job.world_size // STAGES, job.world_size))
    _unlabelled(job, ranks, AT, 1.4 / 1.25)
    job.labels.append(Label(Kind.SLOWDOWN, (), AT))


CONDITIONS: Final = [
    Part("the last stage 25 % heavier", lambda job: job.heavy_stage(STAGES - 1, 1.25)),
    Part("a rank 8 % slower from the start", lambda job: _unlabelled(job, job.world_size // 2, 0, 1.08)),
    Part("a rank 30 % slower from the start", lambda job: job.slow(job.world_size // 2, 0, 1.3)),
    Part("a pace that wanders by 1 to 3 %", lambda job: job.wander(0.01, 0.03, 100)),
]
"""A job's own way."""

LATER: Final = [
    Part("all 8 % slower", lambda job: job.slow_all(AT, 1.08)),
    Part("collectives x3", lambda job: job.congest(AT, 3.0), 40),
    Part("a rank 10 % slower", lambda job: job.slow(3, AT, 1.1), 20),
    Part("the last stage 40 % heavier", _heavier_stage),
    Part("a hang", lambda job: job.hang(5, AT, 30), 8),
]
"""What goes wrong in it."""


def _job(size: int, seed: int, *parts: Part) -> Job:
    job = Job(size, STEPS, seed, pp=STAGES)
    for part in parts:
        part.apply(job)
    return job


def beside(sizes: tuple[int, ...] = SIZES) -> Iterator[Case]:
    """Every later fault alone and beside every condition, in every size."""
    for size in sizes:
        for fault in LATER:
            yield Case(f"{fault.name}, {size:,} ranks", lambda s, n=size, f=fault: _job(n, s, f), fault.delay_max)
            for condition in CONDITIONS:
                yield Case(
                    f"{fault.name}, beside {condition.name}, {size:,} ranks",
                    lambda s, n=size, f=fault, c=condition: _job(n, s, c, f),
                    max(fault.delay_max, condition.delay_max),
                )


def alone(sizes: tuple[int, ...] = SIZES) -> Iterator[Case]:
    """Every condition by itself, in every size."""
    for size in sizes:
        for condition in CONDITIONS:
            yield Case(f"{condition.name}, {size:,} ranks", lambda s, n=size, c=condition: _job(n, s, c))


def wandering(sizes: tuple[int, ...] = (8, 64, 256)) -> Iterator[Case]:
    """A pace that goes 5 to 9 % up and down every hundred steps, alone and with a slowdown that is none of it."""
    for size in sizes:
        yield Case(f"a pace that wanders, {size:,} ranks", lambda s, n=size: _wandering(n, s))
        name = f"all 30 % slower, beside a pace that wanders, {size:,} ranks"
        yield Case(name, lambda s, n=size: _wandering(n, s).slow_all(2000, 1.3), 30)


def _wandering(size: int, seed: int) -> Job:
    return Job(size, 2200, seed).wander(0.05, 0.09, 120)
