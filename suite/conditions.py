"""More cases: a fault that begins in a job with a standing condition, faults that change slowly, and accelerators.

A standing condition is a heavy stage, or a rank that was always slow. Alone it must open no incident, except for a rank
that is slow from the start; a fault beside it must be one incident of its own, found and named as if the condition were
not there. On accelerators, what devices measure comes late, and beside it a steady CPU time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Final

from rankwatch_detectors.base import Kind
from rankwatch_service.simulate.faults import (
    Congestion,
    Drift,
    Hang,
    Label,
    LossClimb,
    LossSpike,
    Overflow,
    Slow,
    SlowJob,
    WanderingPace,
)
from rankwatch_service.simulate.job import Job, Noise, RankPlacement
from suite.cases import Case

SIZES: Final = (16, 64, 1024)
AT: Final = 300
STEPS: Final = 420
STAGES: Final = 4


@dataclass(frozen=True)
class CasePart:
    """Half of a case: what it does to a job, and within how many steps it must be found where it has a label."""

    name: str
    apply: Callable[[Job], Job]
    delay_max: float = 30.0


def _unlabelled(job: Job, rank: int | tuple[int, ...], at: int, factor: float) -> Job:
    return replace(job.inject(Slow(rank, at, factor)), expected=job.labels)


def _heavier_stage(job: Job) -> Job:
    """The last stage becomes 40 % heavier than the others, where it was 25 %."""
    ranks = tuple(range(job.world_size - job.world_size // STAGES, job.world_size))
    heavier = _unlabelled(job, ranks, AT, 1.4 / 1.25)
    return replace(heavier, expected=(*heavier.labels, Label(Kind.SLOWDOWN, (), AT)))


def _heavy_stage(job: Job) -> Job:
    return replace(job, placement=replace(job.placement, heavy_stage=(STAGES - 1, 1.25)))


CONDITIONS: Final = [
    CasePart("the last stage 25 % heavier", _heavy_stage),
    CasePart("a rank 8 % slower from the start", lambda job: _unlabelled(job, job.world_size // 2, 0, 1.08)),
    CasePart("a rank 30 % slower from the start", lambda job: job.inject(Slow(job.world_size // 2, 0, 1.3))),
    CasePart("a pace that wanders by 1 to 3 %", lambda job: job.inject(WanderingPace(0.01, 0.03, 100))),
]
"""What is true of a job from its start."""

LATER: Final = [
    CasePart("all 8 % slower", lambda job: job.inject(SlowJob(AT, 1.08))),
    CasePart("collectives x3", lambda job: job.inject(Congestion(AT, 3.0)), 40),
    CasePart("a rank 10 % slower", lambda job: job.inject(Slow(3, AT, 1.1)), 20),
    CasePart("the last stage 40 % heavier", _heavier_stage),
    CasePart("a hang", lambda job: job.inject(Hang(5, AT, 30)), 8),
]
"""Faults that begin later."""


def _case(size: int, fault: CasePart, condition: CasePart | None = None) -> Case:
    parts = (fault,) if condition is None else (condition, fault)

    def job(seed: int) -> Job:
        made = Job(size, STEPS, seed, placement=RankPlacement(pp=STAGES))
        for part in parts:
            made = part.apply(made)
        return made

    beside = "" if condition is None else f", beside {condition.name}"
    return Case(f"{fault.name}{beside}, {size:,} ranks", job, max(part.delay_max for part in parts))


def combined(sizes: tuple[int, ...] = SIZES) -> Iterator[Case]:
    """Every later fault alone and beside every condition, in every size."""
    for size in sizes:
        for fault in LATER:
            yield _case(size, fault)
            for condition in CONDITIONS:
                yield _case(size, fault, condition)


def conditions_alone(sizes: tuple[int, ...] = SIZES) -> Iterator[Case]:
    """Every condition without a fault, in every size."""
    for size in sizes:
        for condition in CONDITIONS:
            yield replace(_case(size, condition), delay_max=math.inf)


def wandering_pace(sizes: tuple[int, ...] = (8, 64, 256)) -> Iterator[Case]:
    """A pace that goes 5 to 9 % up and down every hundred steps, without a fault and with a slowdown."""
    for size in sizes:
        yield Case(f"a pace that wanders, {size:,} ranks", partial(_wandering, size))
        yield Case(f"all 30 % slower, beside a pace that wanders, {size:,} ranks", partial(_wandering_slower, size), 30)


def _wandering(size: int, seed: int) -> Job:
    return Job(size, 2200, seed).inject(WanderingPace(0.05, 0.09, 120))


def _wandering_slower(size: int, seed: int) -> Job:
    return _wandering(size, seed).inject(SlowJob(2000, 1.3))


CHANGE_SIZES: Final = (16, 64, 256)
START: Final = 1000
"""The loss is flat from there on."""
CHANGE_AT: Final = START + 500
"""By then the job's own spread between blocks is known."""
CHANGE_STEPS: Final = CHANGE_AT + 700

CHANGES: Final = [
    CasePart("all ranks +25 % over 1,800 steps", lambda job: job.inject(Drift(CHANGE_AT, 1.25, 1800)), 640),
    CasePart("loss x2.2 over 1,300 steps", lambda job: job.inject(LossClimb(CHANGE_AT, 2.2, 1300)), 200),
    CasePart(
        "a norm that overflows on one rank", lambda job: job.inject(Overflow(job.world_size // 3, CHANGE_AT + 300)), 0
    ),
]
SPIKE: Final = CasePart("a spike of x2", lambda job: job.inject(LossSpike(CHANGE_AT + 400, 2.0, 2)), 2)


def _changing_job(size: int, seed: int, *parts: CasePart) -> Job:
    job = Job(size, CHANGE_STEPS, seed, start_step=START, noise=Noise(loss=0.015), placement=RankPlacement(pp=STAGES))
    for part in parts:
        job = part.apply(job)
    return job


def _change_case(size: int, fault: CasePart, *others: CasePart) -> Case:
    name = ", beside ".join(part.name for part in (fault, *others))
    delay_max = max(part.delay_max for part in (fault, *others))
    return Case(f"{name}, {size:,} ranks", lambda seed: _changing_job(size, seed, fault, *others), delay_max)


def slow_changes(sizes: tuple[int, ...] = CHANGE_SIZES) -> Iterator[Case]:
    """Every change alone, beside every condition and every other change, and a spike on the way up, in every size."""
    for size in sizes:
        for fault in CHANGES:
            yield _change_case(size, fault)
            for condition in CONDITIONS:
                yield _change_case(size, fault, condition)
        for one, other in combinations(CHANGES, 2):
            yield _change_case(size, one, other)
        yield _change_case(size, CHANGES[1], SPIKE)


KINDS_ON_DEVICES: Final = frozenset({Kind.STRAGGLER, Kind.SLOWDOWN, Kind.HANG, Kind.NONFINITE})
CAUSES: Final = {"worker": "device"}
"""Causes that have another name where devices measure their own work."""


def on_accelerators(cases: Iterable[Case]) -> Iterator[Case]:
    """Those with a slow rank, a slow job, a hang or a NaN, as jobs whose devices measure their steps."""
    for case in cases:
        job = case.job(0)
        if job.placement.accelerated and any(label.kind in KINDS_ON_DEVICES for label in job.labels):
            name = f"{case.name}, on accelerators"
            yield replace(case, name=name, job=_Accelerated(case), cause=CAUSES.get(case.cause, case.cause))


class _Accelerated:
    """The jobs of a case, as those of devices."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __call__(self, seed: int) -> Job:
        job = self._case.job(seed)
        return replace(job, placement=replace(job.placement, launch_cpu=True, device_times=True), late_values=True)
