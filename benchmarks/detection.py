"""How well the detectors find injected faults, and how often they report a fault that is not there.

    python benchmarks/detection.py [--seeds 5] [--sizes 8,64,1024,16384] [--only TEXT] [--markdown FILE] [--processes N]
    python benchmarks/detection.py --generator cluster [--seeds 5] [--sizes 8,64,1024] [--only TEXT]
    python benchmarks/detection.py --accelerators [--seeds 5]      faults in jobs whose devices measure their steps
    python benchmarks/detection.py --beside [--seeds 5]            faults in jobs with a standing condition
    python benchmarks/detection.py --clean 8=20,64=10,1024=4,16384=1 [--step-s 20]      job-weeks without a fault
    python benchmarks/detection.py --calibration 8,64,1024,16384 [--length 1] [--step-s 20]
    python benchmarks/detection.py --speed 8,64,1024,16384

Every line is a synthetic job with labels (`suite.cases`, `suite.clean_jobs`, `suite.cluster_cases`), judged by all
detectors at their defaults and the correlator (`suite.scoring`). Delays are in steps after the injection. "x bound" is
the median delay as a multiple of Lorden's bound, log(ranks x steps per week) / KL, the best average of any test.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, repeat
from os import cpu_count
from pathlib import Path
from typing import Final

from rankwatch_detectors.base import Frame
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from suite.cases import FAULTS, SILENT, Case, stragglers
from suite.clean_jobs import BUDGETS, calibration, false_rates
from suite.cluster_cases import ClusterCase, cluster_clean, cluster_faults
from suite.conditions import combined, conditions_alone, on_accelerators, slow_changes, wandering_pace
from suite.scoring import Score, score, table

HEAD: Final = [
    "fault", "recall", "precision", "top 1", "cause", "delay, median (steps)", "95 %", "allowed", "critical, median",
    "x bound", "false pages", "false, for information", "incidents per fault", "messages per fault",
]  # fmt: skip
SILENT_HEAD: Final = ["job", "seeds", "false pages", "false, for information", "which"]
BUDGETS_HEAD: Final = [f"{budget:,.0f} allowed" for budget in BUDGETS]


def fault_line(case: Case | ClusterCase, seeds: range) -> list[str]:
    """The cells of a line with a fault."""
    return cells(case, score(case, seeds))


def cells(case: Case | ClusterCase, got: Score) -> list[str]:
    """A score as cells of the table."""
    worst = sorted(got.delays)[math.ceil(0.95 * len(got.delays)) - 1] if got.delays else math.nan
    bound = statistics.mean(got.bounds) if got.bounds else 0.0
    return [
        case.name,
        f"{got.found}/{got.labels}",
        f"{got.precision * 100:.0f} %",
        f"{got.named}/{got.labels}",
        f"{got.caused}/{got.named}" if case.cause else "-",
        f"{got.typical:.0f}{got.unit}",
        f"{worst:.0f}{got.unit}",
        "-" if math.isinf(case.delay_max) else f"{case.delay_max:.0f}{got.unit}",
        f"{statistics.median(got.criticals):.0f}{got.unit}" if got.criticals else "-",
        # Below five rows the rule of five slow rows decides, not the statistics.
        f"{got.typical / bound:.1f}" if bound >= 1 else "-",
        str(len(got.false)),
        str(got.informed),
        f"{got.incidents / max(got.roots, 1):.1f}",
        f"{got.notified / max(got.roots, 1):.1f}",
    ]


def silent_line(case: Case | ClusterCase, seeds: range) -> list[str]:
    """The cells of a line without a fault."""
    got = score(case, seeds)
    return [case.name, str(len(seeds)), str(len(got.false)), str(got.informed), "; ".join(got.false[:3]) or "-"]


def speed(ranks: int, steps: int = 120) -> list[str]:
    """Milliseconds of one core for each step, all detectors, 16 metrics."""
    observations = list(generate(Job(ranks, steps, 1, ends=False)))
    bank = detectors()
    frames: list[float] = []
    ticks: list[float] = []
    for observation in observations:
        before = time.process_time()
        for detector in bank:
            detector.observe(observation)
        spent = (time.process_time() - before) * 1e3
        (frames if isinstance(observation, Frame) else ticks).append(spent)
    middle, tick = statistics.median(frames), statistics.median(ticks)
    return [f"{ranks:,}", f"{middle:.2f}", f"{tick:.2f}", f"{middle * 1e6 / ranks:,.0f}"]


def _measured(
    line: Callable[[Case, range], list[str]], cases: list[Case], seeds: int, pool: ProcessPoolExecutor
) -> list[list[str]]:
    """A line for each case."""
    waiting = [pool.submit(_by_name, line, case.name, seeds) for case in cases]
    return _printed(future.result() for future in waiting)


def _printed(lines: Iterable[list[str]]) -> list[list[str]]:
    """The same lines, each printed as soon as it is measured."""
    measured = []
    for line in lines:
        measured.append(line)
        print(" | ".join(line), file=sys.stderr, flush=True)
    return measured


def _by_name(line: Callable[[Case, range], list[str]], name: str, seeds: int) -> list[str]:
    """A case holds functions, which cannot be pickled for another process; its name can."""
    plain = (*stragglers((8, 64, 1024, 16_384)), *FAULTS)
    every = (*plain, *SILENT, *in_conditions(), *on_accelerators(plain))
    return line(next(case for case in every if case.name == name), range(seeds))


def in_conditions() -> Iterator[Case]:
    """The cases of `--beside`."""
    yield from chain(combined(), conditions_alone(), wandering_pace(), slow_changes())


def _sizes(text: str) -> list[int]:
    return [int(size) for size in text.split(",")]


def _weeks(text: str) -> dict[int, float]:
    pairs = (part.split("=") for part in text.split(","))
    return {int(size): float(weeks) for size, weeks in pairs}


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", choices=["simulator", "cluster"], default="simulator", help="of synthetic jobs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sizes", type=_sizes, default=[8, 64, 1024], help="ranks of the slow-rank lines")
    parser.add_argument("--only", default="", help="only lines with this in their name, and nothing else")
    parser.add_argument("--accelerators", action="store_true", help="faults in jobs whose devices measure their steps")
    parser.add_argument("--beside", action="store_true", help="faults in jobs with a standing condition")
    parser.add_argument("--clean", type=_weeks, metavar="RANKS=WEEKS,…", help="job-weeks without a fault, by size")
    parser.add_argument("--calibration", type=_sizes, metavar="RANKS,…", help="what comes of larger budgets, by size")
    parser.add_argument("--length", type=float, default=1.0, help="of the calibration; less is shorter and less sure")
    parser.add_argument("--step-s", type=float, default=20.0, help="seconds a step of the clean jobs")
    parser.add_argument("--speed", type=_sizes, metavar="RANKS,…", help="milliseconds a step, by size")
    parser.add_argument("--processes", type=int, default=cpu_count() or 1)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file as well")
    chosen = parser.parse_args()
    others = (chosen.accelerators, chosen.beside, chosen.clean, chosen.calibration, chosen.speed)
    if chosen.generator == "cluster" and any(others):
        parser.error("only faults and clean jobs come from the cluster model: --generator cluster stands alone")
    return chosen


def parts(chosen: argparse.Namespace, pool: ProcessPoolExecutor) -> Iterable[str]:
    """The headings and tables that were asked for."""
    if chosen.generator == "cluster":
        yield from of_cluster_model(chosen, pool)
        return
    if chosen.beside:
        cases = [case for case in in_conditions() if chosen.only in case.name]
        yield "### In jobs with a standing condition\n\n" + table(
            HEAD, _measured(fault_line, cases, chosen.seeds, pool)
        )
        return
    if chosen.accelerators:
        every = on_accelerators((*stragglers(chosen.sizes), *FAULTS))
        cases = [case for case in every if chosen.only in case.name]
        yield "### On accelerators\n\n" + table(HEAD, _measured(fault_line, cases, chosen.seeds, pool))
        return
    if chosen.clean:
        head = ["ranks", "job-weeks", "false incidents", "per job-week", "95 % upper bound", "all incidents"]
        yield "### Clean jobs\n\n" + table(head, false_rates(chosen.clean, chosen.step_s, pool))
    if chosen.calibration:
        lines = calibration(chosen.calibration, chosen.step_s, chosen.length, pool)
        yield "### False incidents per job-week at larger budgets\n\n" + table(["ranks", "kind", *BUDGETS_HEAD], lines)
    if chosen.speed:
        head = ["ranks", "ms a step", "ms a tick", "ns a rank and step"]
        yield "### Speed, one core\n\n" + table(head, map(speed, chosen.speed))
    if not (chosen.clean or chosen.calibration or chosen.speed):
        faults = [case for case in (*stragglers(chosen.sizes), *FAULTS) if chosen.only in case.name]
        silent = [case for case in SILENT if chosen.only in case.name]
        yield "### Injected faults\n\n" + table(HEAD, _measured(fault_line, faults, chosen.seeds, pool))
        yield "### Nothing wrong\n\n" + table(SILENT_HEAD, _measured(silent_line, silent, chosen.seeds, pool))


def of_cluster_model(chosen: argparse.Namespace, pool: ProcessPoolExecutor) -> Iterator[str]:
    """The tables of faults and of clean jobs, from the cluster model."""
    seeds = repeat(range(chosen.seeds))
    faults = [case for case in cluster_faults(chosen.sizes) if chosen.only in case.name]
    clean = [case for case in cluster_clean(chosen.sizes) if chosen.only in case.name]
    yield "### Cluster model: injected faults\n\n" + table(HEAD, _printed(pool.map(fault_line, faults, seeds)))
    yield "### Cluster model: nothing wrong\n\n" + table(SILENT_HEAD, _printed(pool.map(silent_line, clean, seeds)))


def main() -> None:
    """Print the tables that were asked for."""
    chosen = options()
    with ProcessPoolExecutor(chosen.processes) as pool:
        texts = []
        for text in parts(chosen, pool):
            print(text + "\n", flush=True)
            texts.append(text)
    if chosen.markdown:
        chosen.markdown.write_text("\n\n".join(texts) + "\n")


if __name__ == "__main__":
    main()
