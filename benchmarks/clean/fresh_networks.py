"""Findings on healthy new networks: every network, optimizer and warm-up, over seeds.

    python benchmarks/clean/fresh_networks.py [--seeds 3] [--steps 600] [--only TEXT]

Each is trained from scratch (`suite.networks`), and its loss and gradient norm are judged from the first step on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import numpy as np
import torch

from rankwatch_detectors.base import AttemptStart, Change, Finding, Frame, StepKind, Topology
from rankwatch_detectors.catalogue import detectors
from suite.networks import NETWORKS, OPTIMIZERS, Curve, adversaries, trained

WARM_UP_STEPS = (0, 100)


def findings_of(curve: Curve, optimizers: int = 1) -> Iterator[Finding]:
    """What the catalogue opens or updates."""
    zero, bank = np.zeros(1, dtype=np.int64), detectors()
    topology = Topology(1, ("",), ("",), zero, zero, zero, zero, zero, optimizers=optimizers)
    for one in bank:
        one.observe(AttemptStart("fresh.0", topology, 0.0))
    here = np.ones(1, dtype=np.bool_)
    for step in range(len(curve["loss"])):
        values = {name: column[step : step + 1] for name, column in curve.items()}
        frame = Frame("fresh.0", "steps", step, StepKind.TRAIN, float(step), values, dict.fromkeys(values, here))
        for one in bank:
            yield from (finding for finding in one.observe(frame) if finding.change is not Change.CLOSE)


def curves(seeds: int, steps: int, only: str) -> Iterator[tuple[str, int, Curve]]:
    """Name, number of optimizers and curve of every run."""
    for seed in range(seeds):
        for optimizer in ("Adam", "SGD"):
            if only in (name := f"adversaries, {optimizer}, seed {seed}"):
                yield name, 2, adversaries(optimizer, seed=seed, steps=steps)
        for network in NETWORKS:
            for optimizer in OPTIMIZERS:
                for warm_up in WARM_UP_STEPS:
                    if only in (name := f"{network}, {optimizer}, warm-up {warm_up}, seed {seed}"):
                        yield name, 1, trained(network, optimizer, warm_up=warm_up, seed=seed, steps=steps)


def main() -> None:
    """Print each finding, and how many there were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--only", default="", help="only runs with this in their name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs, loud, counts = 0, 0, dict.fromkeys(("critical", "warning", "info"), 0)
    for name, optimizers, curve in curves(options.seeds, options.steps, options.only):
        findings = list(findings_of(curve, optimizers))
        runs, loud = runs + 1, loud + bool(findings)
        for finding in findings:
            counts[finding.severity] += 1
            print(f"{name}: {finding.severity} {finding.kind}: {finding.summary}", file=sys.stderr, flush=True)
    print("| runs | with findings | critical | warning | info |\n| --- | --- | --- | --- | --- |")
    print(f"| {runs} | {loud} | " + " | ".join(map(str, counts.values())) + " |")


if __name__ == "__main__":
    main()
