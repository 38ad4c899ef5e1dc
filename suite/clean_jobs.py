"""Jobs without a fault, long enough to measure how often the detectors report one.

Each has everything that a healthy job goes through: a silicon spread, garbage collection, bursts of slow steps,
evaluations, saves, skipped steps, slow first steps, a relaunch, a rollback, a daily wave, a change in the mix of data,
and from 64 ranks on pipeline stages and sequences of uneven length. A job-week is cut into parts, each a job with its
own seed, so that it can run on all cores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Final

from rankwatch_detectors.base import Change, Severity
from rankwatch_detectors.catalogue import CatalogueConfig, detectors
from rankwatch_detectors.statistics.shift import WEEK_S
from rankwatch_service.simulate.faults import LossLevel, RecurringStall, Restart, ScalerSkip
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, Noise, RankPlacement

PART_STEPS: Final = 3_000
TICK_S: Final = 5.0
"""Ticks are sparser than in the stream: where nothing stands still they decide nothing."""
BUDGETS: Final = (30.0, 100.0, 300.0, 1000.0)
EXPECTED: Final = 30.0
"""False incidents of one kind that a calibration run is long enough for: then their rate is known to a third."""


@dataclass(frozen=True)
class CleanJob:
    """One part of a run: so many ranks, steps and seconds a step, and the budget of each kind (None = the default)."""

    ranks: int
    steps: int
    seed: int
    step_s: float
    budget: float | None = None


def clean(part: CleanJob) -> Job:
    """The job of a part."""
    wide = part.ranks >= 64
    noise = Noise(
        uneven_cv=0.1 if wide else 0.0,
        hiccup_probability=0.001,
        hiccup_s=0.3 * part.step_s,
        collect_every=500,
        collect_s=0.3 * part.step_s,
        burst_probability=1e-5,
        wave=0.02,
        warm_up_steps=20,
        warm_up_factor=3.0,
    )
    job = Job(
        part.ranks, part.steps, part.seed, step_s=part.step_s, tick_s=TICK_S, noise=noise,
        placement=RankPlacement(pp=4 if wide else 1), fingerprint_every=50, ends=False,
    )  # fmt: skip
    return job.inject(
        RecurringStall(1000, 120.0, "eval"),
        RecurringStall(300, 30.0, "checkpoint_save"),
        ScalerSkip(450),
        Restart(part.steps // 3, part.steps // 3 - 20),
        Restart(part.steps // 2, part.steps // 2 - 20, relaunch=False),
        LossLevel(part.steps * 3 // 4, 0.97),
    )


def budgeted(budget: float) -> CatalogueConfig:
    """All kinds that have a budget with this one; where two detectors share a kind each has half of it."""
    usual = CatalogueConfig()
    return replace(
        usual,
        straggler=replace(usual.straggler, budget=budget),
        slowdown=replace(usual.slowdown, budget=budget / 2),
        stage=replace(usual.stage, budget=budget / 2),
        local_norm=replace(usual.local_norm, budget=budget),
    )


def heard(part: CleanJob) -> Counter[str]:
    """Findings opened in a part, by kind; info-level ones are marked."""
    bank = detectors(None if part.budget is None else budgeted(part.budget))
    opened: Counter[str] = Counter()
    for observation in generate(clean(part)):
        for detector in bank:
            for finding in detector.observe(observation):
                if finding.change is Change.OPEN:
                    informs = finding.severity is Severity.INFO
                    opened[f"{finding.kind} (information)" if informs else str(finding.kind)] += 1
    return opened


def parts(ranks: int, weeks: float, step_s: float, budget: float | None = None) -> list[CleanJob]:
    """So many job-weeks, rounded to whole parts."""
    count = max(1, round(weeks * WEEK_S / step_s / PART_STEPS))
    return [CleanJob(ranks, PART_STEPS, seed, step_s, budget) for seed in range(count)]


def weeks_of(some: list[CleanJob]) -> float:
    """How long parts are together, in job-weeks."""
    return sum(part.steps * part.step_s for part in some) / WEEK_S


def false_rates(sizes: dict[int, float], step_s: float, pool: Executor) -> Iterator[list[str]]:
    """One line for each size: job-weeks, false incidents and what that says about their rate."""
    for ranks, weeks in sizes.items():
        run = parts(ranks, weeks, step_s)
        opened = sum(pool.map(heard, run), Counter[str]())
        false = sum(count for kind, count in opened.items() if not kind.endswith(")"))
        lived = weeks_of(run)
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(opened.items())) or "-"
        # Seeing n in so many weeks excludes rates above about n + 3 for n = 0, n + 2 sqrt(n + 1) + 1 else, at 95 %.
        upper = (3.0 if false == 0 else false + 2 * (false + 1) ** 0.5 + 1) / lived
        yield [f"{ranks:,}", f"{lived:.2f}", str(false), f"{false / lived:.2f}", f"{upper:.2f}", kinds]


def calibration(sizes: list[int], step_s: float, length: float, pool: Executor) -> Iterator[list[str]]:
    """One line for each size and kind: what really came at each budget, per job-week.

    Args:
        sizes: numbers of ranks.
        step_s: seconds of a step.
        length: 1 = as long as `EXPECTED` false incidents of a kind take, if as many came as the budget allows.
        pool: where parts are judged.
    """
    for ranks in sizes:
        runs = [parts(ranks, length * EXPECTED / budget, step_s, budget) for budget in BUDGETS]
        came = [sum(pool.map(heard, run), Counter[str]()) for run in runs]
        for kind in ("straggler", "slowdown", "corruption"):
            counts = [of[kind] + of[f"{kind} (information)"] for of in came]
            rates = [f"{count / weeks_of(run):.0f} ({count})" for count, run in zip(counts, runs, strict=True)]
            yield [f"{ranks:,}", kind, *rates]
