"""False and missed changes of the rule `change` on autocorrelated noise, as Markdown.

    python benchmarks/metric_rules.py [--jobs 100] [--values 2000] [--correlations 0,0.5,0.9,0.97]

Each job logs one metric: AR(1) noise of deviation 1 and a given autocorrelation. Without a change every incident is a
false one. For the delay, the level changes after 500 values by some deviations, and stays.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import numpy as np

from rankwatch_detectors.base import AttemptStart, Change, Frame, StepKind, Topology
from rankwatch_detectors.metric_detector import MetricDetector
from rankwatch_detectors.metric_rule import Condition, MetricRule

RULE = MetricRule("change", "metric", Condition.CHANGE)
BEFORE, AFTER = 500, 400
SHIFTS = (2.0, 3.0, 5.0)


def noise(correlation: float, count: int, seed: int) -> list[float]:
    """AR(1) noise of deviation 1."""
    random, at, values = np.random.default_rng(seed), 0.0, []
    at = float(random.normal())
    for fresh in random.normal(0.0, math.sqrt(1 - correlation**2), count).tolist():
        at = correlation * at + fresh
        values.append(at)
    return values


def opened(values: list[float]) -> Iterator[int]:
    """The numbers of the values at which incidents open."""
    zero, here = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.bool_)
    detector = MetricDetector()
    topology = Topology(1, ("",), ("",), zero, zero, zero, zero, zero)
    detector.observe(AttemptStart("noise.0", topology, 0.0, (RULE,)))
    for step, value in enumerate(values):
        column = np.array([value])
        frame = Frame("noise.0", "steps", step, StepKind.TRAIN, float(step), {"metric": column}, {"metric": here})
        if any(finding.change is Change.OPEN for finding in detector.observe(frame)):
            yield step


def row(correlation: float, jobs: int, values: int) -> list[str]:
    """One line of the table."""
    false = [len(list(opened(noise(correlation, values, seed)))) for seed in range(jobs)]
    cells = [
        f"{correlation:g}",
        f"{1e4 * sum(false) / (jobs * values):.2f}",
        f"{sum(count > 0 for count in false)} of {jobs}",
    ]
    for shift in SHIFTS:
        delays = []
        for seed in range(jobs):
            series = noise(correlation, BEFORE + AFTER, seed)
            moved = [value + (shift if step >= BEFORE else 0.0) for step, value in enumerate(series)]
            delays += [step - BEFORE for step in opened(moved) if step >= BEFORE][:1]
        middle = f"{np.median(delays):.0f}" if delays else "-"
        cells.append(f"{len(delays) / jobs:.0%}, {middle}")
    return cells


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--values", type=int, default=2_000)
    parser.add_argument("--correlations", default="0,0.5,0.9,0.97")
    options = parser.parse_args()
    found = [f"+{shift:g}: found, delay" for shift in SHIFTS]
    titles = ["autocorrelation", "false in 10,000 values", "jobs with one", *found]
    print("| " + " | ".join(titles) + " |")
    print("| " + " | ".join("---" for _ in titles) + " |")
    for text in options.correlations.split(","):
        print("| " + " | ".join(row(float(text), options.jobs, options.values)) + " |", flush=True)


if __name__ == "__main__":
    main()
