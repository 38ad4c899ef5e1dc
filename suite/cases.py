"""The labelled suite: synthetic jobs with one fault, and synthetic jobs without any. No detector is tuned to them.

Each case is a job for each seed, with the goal of the detectors at their defaults. Unless a case says otherwise, a job
makes one step a second, with heavy-tailed noise of 2 % and a silicon spread of 2 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from rankwatch_detectors.base import Kind
from rankwatch_detectors.statistics.shift import WEEK_S
from rankwatch_service.simulate.faults import (
    BatchRamp,
    BitFlip,
    Congestion,
    Drift,
    Hang,
    HostSilence,
    Kill,
    Label,
    LinkFlap,
    LocalGradient,
    LossClimb,
    LossDivergence,
    LossLevel,
    LossSpike,
    MissingRows,
    NonFinite,
    NormSpike,
    OrderedPause,
    RecurringStall,
    Restart,
    ScalerSkip,
    Slow,
    SlowJob,
)
from rankwatch_service.simulate.job import Job, Noise, RankPlacement

AT: Final = 200
"""The step at which most faults begin; baselines are learned by then."""
PLACES_AT: Final = 1_000
"""A step at which it is known for how long the noise of hosts and switches lasts."""
LOSS_AT: Final = 800
"""A step at which the loss curve is flat."""
STEPS_AFTER: Final = 5
"""Rows before a finding: bursts of two to four slow steps are common and harmless."""


JobT_co = TypeVar("JobT_co", covariant=True)


@dataclass(frozen=True)
class LabelledCase(Generic[JobT_co]):
    """A job for each seed, and its goal."""

    name: str
    job: Callable[[int], JobT_co]
    delay_max: float = math.inf
    """Steps within which it must be found; seconds for kinds that show as missing steps."""
    cause: str = ""
    """The expected cause class; "" = any."""
    ratio: float = 0.0
    """Size of a lasting shift of one rank's time, for Lorden's bound; 0 = none."""


Case = LabelledCase[Job]


def bound(job: Job, ratio: float) -> float:
    """Lorden's bound in steps: the mean delay of the best possible test at one false finding per job-week."""
    divergence = math.log(ratio) ** 2 / (2 * job.noise.busy**2)
    return math.log(job.world_size * WEEK_S / job.step_s) / divergence


def straggler(ranks: int, ratio: float, noise: float = 0.02, delay_max: float | None = None) -> Case:
    """One slow rank, to be found within twice the bound plus five steps unless another limit is given."""

    def job(seed: int) -> Job:
        return Job(ranks, AT + max(60, math.ceil(limit) + 40), seed, noise=Noise(busy=noise)).inject(
            Slow(_rank(seed, ranks), AT, ratio)
        )

    limit = delay_max or 2 * bound(Job(ranks, noise=Noise(busy=noise)), ratio) + STEPS_AFTER
    name = f"straggler +{(ratio - 1) * 100:.0f} %, noise {noise * 100:.0f} %, {ranks:,} ranks"
    return Case(name, job, limit, "worker", ratio)


def stragglers(sizes: Sequence[int]) -> list[Case]:
    """One slow rank, by the number of ranks and the size of the shift."""
    return [straggler(size, ratio) for size in sizes for ratio in (1.05, 1.10, 1.30)]


def _rank(seed: int, ranks: int) -> int:
    return (7 * seed + 5) % ranks


def _slow(seed: int, ratio: float, steps: int = 320, **more: object) -> Job:
    return Job(64, steps, seed).inject(Slow(_rank(seed, 64), AT, ratio, **more))  # type: ignore[arg-type]


def _slow_place(seed: int, ranks: int, slow: range, ratio: float, at: int) -> Job:
    """A host of 8 ranks is slower, or a switch of four such hosts."""
    return Job(ranks, at + 80, seed, placement=RankPlacement(hosts_per_switch=4)).inject(Slow(tuple(slow), at, ratio))


def _labelled(job: Job, *labels: Label) -> Job:
    """A job in which other labels should be found than those of its faults."""
    return replace(job, expected=labels)


def _staircase(seed: int) -> Job:
    """Five small slowdowns, each hard to see, together one fault."""
    job = Job(64, 640, seed)
    for stair in range(5):
        job = job.inject(Slow(_rank(seed, 64), AT + 50 * stair, 1.03))
    return _labelled(job, job.labels[0])


def _shared(seed: int) -> Job:
    """Four CPU ranks on two cores, ten steps a second."""
    return Job(
        4, 300, seed, step_s=0.1, noise=Noise(busy=0.04, contention=0.3), placement=RankPlacement(accelerated=False)
    )


def _slow_stage(seed: int) -> Job:
    job = Job(64, 400, seed, placement=RankPlacement(pp=4)).inject(Slow(tuple(range(16, 32)), 300, 1.1))
    return _labelled(job, Label(Kind.SLOWDOWN, (), 300))


def _level_of_loss(seed: int) -> Job:
    """The loss rises by five standard deviations of the noise that all ranks share."""
    return _labelled(_loss(seed).inject(LossLevel(LOSS_AT, 1.10)), Label(Kind.LOSS_SPIKE, (), LOSS_AT))


def _loss(seed: int, steps: int = 900) -> Job:
    return Job(8, steps, seed, start_step=300)


def _flat_loss(seed: int) -> Job:
    """The loss is flat from the first step, and the job is long enough to learn its usual variation."""
    return Job(8, 1800, seed, start_step=1000, noise=Noise(loss=0.015))


def _crash_loop(seed: int) -> Job:
    job = Job(8, 140, seed)
    for _ in range(5):
        job = job.inject(Kill(3, 100, None, 1, "ValueError: bad record"), Restart(100, 80))
    return _labelled(job, Label(Kind.RANK_LOST, (3,), 100), Label(Kind.RESTART_LOOP, (), 80))


FAULTS: Final = [
    straggler(1024, 1.05, 0.05),
    straggler(256, 1.03, delay_max=40),
    Case("staircase, 5 x 3 %", _staircase, 240),
    Case("every second step, x1.2", lambda s: _slow(s, 1.2, 400, every=2), 60, "worker"),
    Case(
        "two at once, +10 %", lambda s: Job(64, 300, s).inject(Slow(3, AT, 1.1), Slow(40, AT, 1.1)), 20, "worker", 1.1
    ),
    Case("one after the other", lambda s: Job(64, 360, s).inject(Slow(3, AT, 1.1), Slow(40, 280, 1.2)), 20, "worker"),
    Case(
        "whole host, +10 %",
        lambda s: Job(64, 300, s, placement=RankPlacement(tp=2)).inject(Slow(tuple(range(8, 16)), AT, 1.1)),
        20,
        "",
        1.1,
    ),
    Case("whole host, +2 %", lambda s: _slow_place(s, 64, range(8, 16), 1.02, PLACES_AT), 64),
    Case("whole switch of 4 hosts, +2 %", lambda s: _slow_place(s, 256, range(32, 64), 1.02, PLACES_AT), 64),
    Case("whole switch of 4 hosts, +10 %", lambda s: _slow_place(s, 256, range(32, 64), 1.1, AT), 20, "", 1.1),
    Case("half of a group of four, +50 %", lambda s: Job(4, 300, s).inject(Slow((0, 3), AT, 1.5)), 20, "worker"),
    Case("for 300 steps, +10 %", lambda s: _slow(s, 1.1, 700, until_step=AT + 300), 20, "worker", 1.1),
    Case("with a loss spike at once, +10 %", lambda s: _slow(s, 1.1, 400).inject(LossSpike(AT + 5, 3.0)), 20, "", 1.1),
    Case("with the whole job slower at once", lambda s: _slow(s, 1.2, 360).inject(SlowJob(AT, 1.15)), 30),
    Case("from the first step, +30 %", lambda s: Job(64, 100, s).inject(Slow(_rank(s, 64), 0, 1.3)), 40, "worker"),
    Case("waits for data, +30 %", lambda s: _slow(s, 1.3, data_wait=True), 20, "data", 1.3),
    Case(
        "uneven sequences, +10 %",
        lambda s: Job(64, 320, s, placement=RankPlacement(tp=2, pp=4), noise=Noise(uneven_cv=0.15)).inject(
            Slow(5, AT, 1.1)
        ),
        25,
        "",
        1.1,
    ),
    Case(
        "uneven sequences told, +10 %",
        lambda s: replace(_slow(s, 1.1), report_tokens=True, noise=Noise(uneven_cv=0.15)),
        25,
        "",
        1.1,
    ),
    Case("x2 by CPU time, 4 ranks on 2 cores", lambda s: _shared(s).inject(Slow(s % 4, AT, 2.0)), 30, "worker"),
    Case(
        "x1.7 asleep, 4 ranks on 2 cores", lambda s: _shared(s).inject(Slow(s % 4, AT, 1.7, asleep=True)), 30, "worker"
    ),
    Case("again after a relaunch, +20 %", lambda s: _slow(s, 1.2).inject(Restart(240, 230)), 20, "worker"),
    Case("one stage of four, +10 %", _slow_stage, 30),
    Case("uniform slowdown, +5 %", lambda s: Job(64, 380, s).inject(SlowJob(300, 1.05)), 30),
    Case("uniform slowdown, +20 %", lambda s: Job(64, 360, s).inject(SlowJob(300, 1.20)), 30),
    Case("network slower, +50 %", lambda s: Job(64, 380, s).inject(Congestion(300, 1.5)), 40),
    Case("all ranks +25 % over 1,800 steps", lambda s: Job(8, 1200, s).inject(Drift(500, 1.25, 1800)), 600),
    Case("hang", lambda s: Job(16, 120, s).inject(Hang(_rank(s, 16), 100, 30)), 8),
    Case(
        "stopped rank, 10 steps a second",
        lambda s: Job(16, 400, s, step_s=0.1).inject(Hang(3, 300, 30, stopped=True)),
        8,
    ),
    Case("hang of a whole host", lambda s: Job(32, 120, s).inject(Hang(tuple(range(8, 16)), 100, 30)), 8),
    Case("hang, 10 s a step", lambda s: Job(16, 60, s, step_s=10.0).inject(Hang(_rank(s, 16), 50, 120)), 25),
    Case("NaN in local gradients", lambda s: Job(16, 120, s).inject(NonFinite(_rank(s, 16), 100)), 0),
    Case(
        "flipped bit, fingerprints every 10", lambda s: Job(16, 130, s).inject(BitFlip(_rank(s, 16), 101 + s % 9)), 10
    ),
    Case("local gradient norm x1.5", lambda s: Job(64, 300, s).inject(LocalGradient(_rank(s, 64), AT, 1.5)), 10),
    Case("loss x3, one point", lambda s: _loss(s).inject(LossSpike(LOSS_AT, 3.0)), 3),
    Case("loss x1.2, ten points", lambda s: _loss(s).inject(LossSpike(LOSS_AT, 1.2, 10)), 5),
    Case("loss up by five sigmas, for good", _level_of_loss, 20),
    Case("loss +0.5 % a point", lambda s: _loss(s).inject(LossDivergence(LOSS_AT, 0.005)), 60),
    Case("loss diverges, +5 % a point", lambda s: _loss(s).inject(LossDivergence(LOSS_AT, 0.05)), 20),
    Case("loss x2.2 over 1,300 steps", lambda s: _flat_loss(s).inject(LossClimb(1500, 2.2, 1300)), 200),
    # Four blocks of a young curve have to grow alike.
    Case("young loss diverges, +5 % a point", lambda s: Job(8, 240, s).inject(LossDivergence(40, 0.05)), 128),
    Case("gradient norm x50", lambda s: _loss(s, 420).inject(NormSpike(380, 50.0, 2)), 3),
    Case("rank killed", lambda s: Job(16, 120, s).inject(Kill(_rank(s, 16), 100)), 0),
    Case("rank ended by an error", lambda s: Job(16, 120, s).inject(Kill(3, 100, None, 1, "CUDA error: ECC")), 0),
    Case("host silent", lambda s: Job(16, 150, s).inject(HostSilence("host-1", 100, 140)), 12),
    Case("the same crash again and again", _crash_loop),
]
"""Jobs with a fault; `stragglers` gives more by size."""

SILENT: Final = [
    Case("clean", lambda s: Job(64, 600, s)),
    Case("clean, two ranks", lambda s: Job(2, 600, s)),
    Case("one rank half again as fast", lambda s: Job(64, 400, s).inject(Slow(7, AT, 1 / 1.5))),
    Case("heavy stage", lambda s: Job(64, 400, s, placement=RankPlacement(pp=4, heavy_stage=(3, 1.6)))),
    Case(
        "uneven sequences, CV 15 %",
        lambda s: Job(64, 600, s, placement=RankPlacement(tp=2, pp=4), noise=Noise(uneven_cv=0.15)),
    ),
    Case("uneven sequences, told", lambda s: Job(64, 600, s, report_tokens=True, noise=Noise(uneven_cv=0.15))),
    Case(
        "garbage collection, now and then",
        lambda s: Job(64, 600, s, noise=Noise(hiccup_probability=0.01, hiccup_s=0.5)),
    ),
    Case(
        "garbage collection, every 100 steps", lambda s: Job(64, 600, s, noise=Noise(collect_every=100, collect_s=0.5))
    ),
    Case("bursts of 2 to 4 slow steps", lambda s: Job(64, 900, s, noise=Noise(burst_probability=2e-4))),
    Case("evaluations without a label", lambda s: Job(64, 400, s, step_s=0.5).inject(RecurringStall(50, 50.0))),
    Case("evaluations", lambda s: Job(64, 400, s).inject(RecurringStall(100, 60.0, "eval"))),
    Case("evaluations of 20 minutes", lambda s: Job(16, 260, s).inject(RecurringStall(80, 1200.0, "eval"))),
    Case("saves", lambda s: Job(64, 400, s).inject(RecurringStall(50, 20.0, "checkpoint_save"))),
    Case("silicon spread of 3 %", lambda s: Job(64, 600, s, noise=Noise(silicon=0.03))),
    Case("batches become larger", lambda s: Job(64, 500, s).inject(BatchRamp(250, 1.5))),
    Case(
        "a rank that starts late, rows missing",
        lambda s: Job(64, 500, s).inject(MissingRows(7, 0, 150), MissingRows(9, 200, 260)),
    ),
    Case("loss scaler skips", lambda s: Job(16, 400, s).inject(ScalerSkip(100), ScalerSkip(101), ScalerSkip(300))),
    Case("another mix of data: loss -5 %", lambda s: _loss(s).inject(LossLevel(600, 0.95))),
    Case("daily wave of 2 %", lambda s: Job(16, 1440, s, step_s=60.0, tick_s=5.0, noise=Noise(wave=0.02))),
    Case("slow first steps", lambda s: Job(64, 400, s, noise=Noise(warm_up_steps=50, warm_up_factor=3.0))),
    Case("one device less on a host", lambda s: Job(62, 400, s, placement=RankPlacement(lean_host=2))),
    Case("a link that flaps", lambda s: Job(64, 400, s).inject(LinkFlap(AT, 3.0))),
    Case("paused by order", lambda s: Job(16, 300, s).inject(OrderedPause(AT, 60.0))),
    Case("relaunched", lambda s: Job(64, 400, s).inject(Restart(250, 230))),
    Case("rolled back", lambda s: Job(64, 400, s).inject(Restart(250, 230, relaunch=False))),
    Case("late values", lambda s: Job(64, 400, s, late_values=True)),
    Case(
        "crowded cores",
        lambda s: Job(
            4, 1500, s, step_s=0.1, noise=Noise(busy=0.04, contention=0.6), placement=RankPlacement(accelerated=False)
        ),
    ),
]
"""Jobs without a fault."""
