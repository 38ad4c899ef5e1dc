"""The operating characteristic of each kind that has a size: the delay of a fault by its size.

    python benchmarks/operating.py [--seeds 3] [--only straggler] [--write docs/incidents]

All detectors at their defaults on synthetic jobs, the fault once its baselines are learned. With `--write` the table
and a plot of it go into each kind's page, between its markers, and beside it.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rankwatch_detectors.base import Change, Kind
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.simulate.faults import LocalGradient, LossDivergence, LossSpike, NormSpike, Slow, SlowJob
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from suite.scoring import table

AT_STEP = 300
BEGIN, END = "<!-- operating characteristic -->", "<!-- end -->"
HEAD = ["size", "found", "delay, median (steps)", "worst"]


@dataclass(frozen=True)
class Curve:
    """One kind, the sizes to try, and what was done to the job."""

    kind: Kind
    what: str
    sizes: tuple[float, ...]
    job: Callable[[float, int], Job]


CURVES = [
    Curve(
        Kind.STRAGGLER,
        "one rank of 64, 2 % noise",
        (1.02, 1.03, 1.05, 1.1, 1.2, 1.5, 2.0),
        lambda size, seed: Job(64, 500, seed).inject(Slow(seed % 64, AT_STEP, size)),
    ),
    Curve(
        Kind.SLOWDOWN,
        "all 64 ranks",
        (1.03, 1.05, 1.1, 1.2, 1.5, 2.0),
        lambda size, seed: Job(64, 500, seed).inject(SlowJob(AT_STEP, size)),
    ),
    Curve(
        Kind.LOSS_SPIKE,
        "ten points, 2 % noise",
        (1.05, 1.1, 1.2, 1.5, 2.0, 3.0),
        lambda size, seed: Job(8, 1300, seed, start_step=800).inject(LossSpike(800 + AT_STEP, size, 10)),
    ),
    Curve(
        Kind.LOSS_DIVERGENCE,
        "growth a point, 2 % noise",
        (1.001, 1.002, 1.005, 1.01, 1.02, 1.05),
        lambda size, seed: Job(8, 1300, seed, start_step=800).inject(LossDivergence(800 + AT_STEP, size - 1)),
    ),
    Curve(
        Kind.GRAD_NORM,
        "two points, 15 % noise",
        (2.0, 3.0, 5.0, 10.0, 50.0),
        lambda size, seed: Job(8, 500, seed).inject(NormSpike(AT_STEP, size, 2)),
    ),
    Curve(
        Kind.CORRUPTION,
        "local gradient norm of one rank of 64, 10 % noise",
        (1.2, 1.3, 1.5, 2.0, 3.0),
        lambda size, seed: Job(64, 500, seed).inject(LocalGradient(5, AT_STEP, size)),
    ),
]


def delay(curve: Curve, size: float, seed: int) -> float | None:
    """Steps until the fault was found with its kind and ranks; None if it was not."""
    job = curve.job(size, seed)
    (label,) = job.labels
    bank = detectors()
    for observation in generate(job):
        for detector in bank:
            for finding in detector.observe(observation):
                named = finding.kind is curve.kind and finding.ranks == label.ranks
                step = finding.detected_step or 0
                if named and finding.change is not Change.CLOSE and step >= label.at_step:
                    return float(step - label.at_step)
    return None


def measure(curve: Curve, seeds: int) -> list[tuple[float, list[float]]]:
    """Delays of the seeds in which it was found, for each size."""
    return [
        (size, [found for seed in range(seeds) if (found := delay(curve, size, seed)) is not None])
        for size in curve.sizes
    ]


def cells(curve: Curve, size: float, delays: list[float], seeds: int) -> list[str]:
    """One line of the table."""
    change = f"+{(size - 1) * 100:.3g} %" if size < 2 and curve.kind is not Kind.GRAD_NORM else f"x{size:g}"
    middle = f"{statistics.median(delays):.0f}" if delays else "-"
    return [change, f"{len(delays)}/{seeds}", middle, f"{max(delays):.0f}" if delays else "-"]


def plot(curve: Curve, measured: list[tuple[float, list[float]]]) -> str:
    """The median delay against the size, both in logarithms, as SVG; hollow where not every seed found it."""
    width, height, left, bottom = 480, 240, 48, 40
    logs = [math.log(size - 1) for size, _ in measured]
    top = math.log10(max((max(delays) for _, delays in measured if delays), default=1.0) + 1) or 1.0
    most = max(len(delays) for _, delays in measured)

    def x(size: float) -> float:
        return left + (math.log(size - 1) - logs[0]) / (logs[-1] - logs[0]) * (width - left - 24)

    def y(steps: float) -> float:
        return height - bottom - math.log10(steps + 1) / top * (height - bottom - 24)

    shown = [(size, statistics.median(delays), len(delays)) for size, delays in measured if delays]
    line = " ".join(f"{x(size):.0f},{y(steps):.0f}" for size, steps, _ in shown)
    marks = "".join(
        f'<circle cx="{x(size):.0f}" cy="{y(steps):.0f}" r="4" stroke="#0a66c2" stroke-width="2" '
        f'fill="{"#0a66c2" if count == most else "#fff"}"/>'
        for size, steps, count in shown
    )
    ticks = "".join(
        f'<text x="{x(size):.0f}" y="{height - 22}" text-anchor="middle">{cells(curve, size, [], 0)[0]}</text>'
        for size, _ in measured
    )
    levels = [steps for steps in (0, 1, 3, 10, 30, 100) if math.log10(steps + 1) <= top]
    grid = "".join(
        f'<path d="M{left} {y(steps):.0f}H{width - 16}" stroke="#ddd"/>'
        f'<text x="{left - 8}" y="{y(steps) + 4:.0f}" text-anchor="end">{steps}</text>'
        for steps in levels
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11" fill="#333"><rect width="{width}" height="{height}" fill="#fff"/>{grid}{ticks}'
        f'<polyline points="{line}" fill="none" stroke="#0a66c2" stroke-width="2"/>{marks}'
        f'<text x="{left}" y="14">steps until reported (median)</text>'
        f'<text x="{width - 16}" y="{height - 6}" text-anchor="end">{curve.what}</text></svg>\n'
    )


def write(folder: Path, curve: Curve, text: str, picture: str) -> None:
    """Put table and plot into the kind's page."""
    page = folder / f"{curve.kind}.md"
    (folder / f"{curve.kind}.svg").write_text(picture)
    before, found, rest = page.read_text().partition(BEGIN)
    if not found:
        before, rest = page.read_text().rstrip() + "\n\n## Operating characteristic\n\n", END + "\n"
    image = f"![Steps until reported, by size]({curve.kind}.svg)"
    page.write_text(f"{before}{BEGIN}\n{text}\n\n{image}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    """Measure and print; with `--write` into the pages as well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    for curve in [curve for curve in CURVES if options.only in curve.kind]:
        measured = measure(curve, options.seeds)
        lines = [cells(curve, size, delays, options.seeds) for size, delays in measured]
        text = f"`{curve.kind}`: {curve.what}; seeds 0 to {options.seeds - 1}.\n\n{table(HEAD, lines)}"
        print(f"{text}\n", flush=True)
        if options.write:
            write(options.write, curve, text, plot(curve, measured))


if __name__ == "__main__":
    main()
