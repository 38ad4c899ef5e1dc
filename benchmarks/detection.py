"""How well the detectors find injected faults, and how rarely they find what is not there.

    python benchmarks/detection.py [--seeds 5] [--clean-steps 20000] [--sizes 8,64,1024] [--markdown FILE]
                                   [--only TEXT] [--peers]

Every line is a synthetic job of `rankwatch_service.simulate` with labels, judged by the whole catalogue at its
defaults. A finding counts as right if its kind and its ranks are the label's; anything else that opens, other than
what the fault itself brings about (a slow rank slows the job), is a false incident. Delays are in steps after the
injection; "bound" is Lorden's: log(ranks x steps per week / budget) / KL, the best that any test can do on average.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from overheard import overheard, roster_of

from rankwatch_detectors.base import Change, Finding, Frame, Kind, Severity
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.simulate.scenario import Job
from rankwatch_service.stream.incidents import Moment

WEEK_STEPS = 604_800
"""At one step a second."""
BRINGS = {
    Kind.STRAGGLER: {Kind.SLOWDOWN},
    Kind.RANK_LOST: {Kind.TELEMETRY_LOST},
    Kind.NONFINITE: {Kind.CORRUPTION},
    Kind.LOSS_DIVERGENCE: {Kind.LOSS_SPIKE},
}
ABSENCES = {Kind.HANG, Kind.TELEMETRY_LOST}
"""Kinds whose delay is counted in seconds."""


@dataclass(frozen=True)
class Case:
    """One line of the table: a name, and a job for each seed."""

    name: str
    job: Callable[[int], Job]
    ratio: float = 0.0
    """Size of a slow rank's shift, for the bound; 0 = none."""


def slow(ranks: int, ratio: float, noise: float = 0.02, steps: int = 300) -> Case:
    """One slow rank from step 200 on."""
    name = f"straggler +{(ratio - 1) * 100:.0f} %, noise {noise * 100:.0f} %, {ranks} ranks"
    return Case(name, lambda seed: Job(ranks, steps, seed, noise=noise).slow(seed % ranks, 200, ratio), ratio)


def cases(largest: int) -> list[Case]:
    """The faults. `largest` is the greatest number of ranks to try."""
    sizes = [size for size in (8, 64, 1024, 16_384) if size <= largest]
    lines = [slow(size, ratio) for size in sizes for ratio in (1.05, 1.10, 1.30)]
    lines += [slow(256, 1.05, 0.05, 420), slow(256, 1.03, 0.02, 360)]
    lines += [
        Case("straggler x2 by CPU time, 4 ranks on 2 cores", lambda s: shared(s).slow(s % 4, 200, 2.0), 2.0),
        Case("two at once, +10 %", lambda s: Job(64, 300, s).slow(3, 200, 1.1).slow(40, 200, 1.1), 1.1),
        Case("whole host, +10 %", lambda s: Job(64, 300, s, tp=2).slow(tuple(range(8, 16)), 200, 1.1), 1.1),
        Case("every second step, x1.2", lambda s: Job(64, 400, s).slow(5, 200, 1.2, every=2)),
        Case("staircase, 5 x 3 %", staircase),
        Case("for 300 steps, +10 %", lambda s: Job(64, 700, s).slow(5, 200, 1.1, until_step=500), 1.1),
        Case("with a loss spike at once, +10 %", lambda s: Job(64, 400, s).slow(5, 200, 1.1).loss_spike(205, 3.0), 1.1),
        Case("from the first step, +30 %", lambda s: Job(64, 100, s).slow(5, 0, 1.3)),
        Case("waits for data, +30 %", lambda s: Job(64, 300, s).slow(5, 200, 1.3, data_wait=True), 1.3),
        Case("uneven sequences, +10 %", lambda s: Job(64, 300, s, tp=2, pp=4).uneven(0.15).slow(5, 200, 1.1), 1.1),
        Case("uniform slowdown, +7 %", lambda s: Job(64, 400, s).slow_all(300, 1.07)),
        Case("hang", lambda s: Job(16, 120, s).hang(s % 16, 100, 30)),
        Case("stopped rank, 10 steps a second", lambda s: Job(16, 400, s, step_s=0.1).hang(3, 300, 30, stopped=True)),
        Case("NaN in local gradients", lambda s: Job(16, 120, s).nonfinite(s % 16, 100)),
        Case("flipped bit, fingerprints every 10", lambda s: Job(16, 130, s).flip(s % 16, 101 + s % 9)),
        Case("local gradient norm x1.5", lambda s: Job(64, 300, s).gradient(5, 200, 1.5)),
        Case("loss x3, one point", lambda s: Job(8, 900, s).loss_spike(800, 3.0)),
        Case("loss x1.2, ten points", lambda s: Job(8, 900, s).loss_spike(800, 1.2, 10)),
        Case("loss +0.5 % a point", lambda s: Job(8, 900, s).diverge(800, 0.005)),
        Case("loss diverges, +5 % a point", lambda s: Job(8, 900, s).diverge(800, 0.05)),
        Case("gradient norm x50", lambda s: Job(8, 400, s).norm_spike(300, 50.0, 2)),
        Case("rank killed", lambda s: Job(16, 120, s).kill(s % 16, 100)),
        Case("host silent", lambda s: Job(16, 150, s).silence("host-1", 100, 140)),
    ]
    return lines


NEGATIVES = [
    Case("no fault: clean", lambda s: Job(64, 400, s)),
    Case("no fault: one rank half again as fast", lambda s: Job(64, 400, s).slow(7, 200, 1 / 1.5)),
    Case("no fault: uneven sequences", lambda s: Job(64, 400, s, tp=2, pp=4).uneven(0.15)),
    Case("no fault: garbage collection, bursts", lambda s: Job(64, 400, s).hiccups(0.01, 0.5).bursts(1e-4)),
    Case("no fault: heavy stage", lambda s: Job(64, 400, s, pp=4).heavy_stage(3, 1.6)),
    Case("no fault: evaluations", lambda s: Job(64, 400, s).standstill(100, 60.0, "eval")),
]
"""Jobs in which nothing is wrong, for the comparison with other rules."""
SILENT_STEPS = 100


def shared(seed: int) -> Job:
    """Four CPU ranks on two cores, ten steps a second."""
    return Job(4, 300, seed, step_s=0.1, noise=0.04, accelerated=False, contention=0.3)


def staircase(seed: int) -> Job:
    """Five small steps up, each too small to see for long, one fault together."""
    job = Job(64, 700, seed)
    for stair in range(5):
        job.slow(5, 200 + 50 * stair, 1.03)
    del job.labels[1:]
    return job


def clean(ranks: int, steps: int, seed: int) -> Job:
    """No fault, and all the rest that a job goes through."""
    job = Job(ranks, steps, seed, silicon=0.02).hiccups(0.001, 0.5).bursts(1e-5).daily_wave(0.02)
    return job.standstill(1000, 60.0, "eval").standstill(1700, 20.0, "checkpoint_save").scaler_skip(500)


def findings_of(job: Job) -> Iterable[Finding]:
    """What the whole catalogue says."""
    bank = detectors()
    for observation in job.observations():
        for detector in bank:
            yield from detector.observe(observation)


def judged(job: Job) -> tuple[list[Finding], int]:
    """What the whole catalogue opened or updated, and how often that was told to a receiver, ends not counted."""
    findings: list[Finding] = []
    judge, roster, told = overheard(findings), roster_of(job.topology()), 0
    for observation in job.observations():
        news = judge.observe(observation, roster)[0]
        told += sum(one.what in (Moment.OPENED, Moment.UPDATED) for one in news)
    return findings, told


def measure(case: Case, seeds: int) -> list[str]:
    """Run one case over all seeds; returns the cells of its line."""
    found, right, false, labels, notifications, causes = 0, 0, 0, 0, 0, 0
    kinds: set[Kind] = set()
    delays: list[float] = []
    bound = math.nan
    for seed in range(seeds):
        job = case.job(seed)
        if case.ratio:
            kl = math.log(case.ratio) ** 2 / (2 * job.noise**2)
            bound = math.log(job.world_size * WEEK_STEPS / job.step_s) / kl
        told, notified = judged(job)
        notifications += notified
        causes += len(job.labels)
        kinds = {label.kind for label in job.labels}
        brought = set().union(*(BRINGS.get(kind, set()) for kind in kinds))
        culprits = {rank for label in job.labels for rank in label.ranks}
        for label in job.labels:
            # A label of several ranks is one thing to find for each of them.
            subjects: list[tuple[int, ...]] = [(rank,) for rank in label.ranks]
            for ranks in subjects or [()]:
                labels += 1
                of_kind = [f for f in told if f.kind is label.kind and _after(f, label.at_step)]
                named = [f for f in of_kind if f.ranks == ranks or not ranks]
                found += bool(of_kind)
                right += bool(named)
                if named:
                    delays.append(_delay(named[0], label.at_step))
        opened = [f for f in told if f.change is Change.OPEN]
        false += sum(f.kind not in kinds | brought or not set(f.ranks) <= culprits for f in opened)
    typical = statistics.median(delays) if delays else math.nan
    times = f"{typical / bound:.1f}" if bound >= 1 else "-"
    unit = " s" if kinds & ABSENCES else ""
    worst = f"{max(delays):.0f}{unit}" if delays else "-"
    told_per_cause = f"{notifications / causes:.1f}"
    return [
        case.name,
        f"{found}/{labels}",
        f"{right}/{labels}",
        f"{typical:.0f}{unit}",
        worst,
        times,
        str(false),
        told_per_cause,
    ]


def _after(finding: Finding, at_step: int) -> bool:
    return finding.kind in ABSENCES or (finding.detected_step or 0) >= at_step


def _delay(finding: Finding, at_step: int) -> float:
    """Steps until it was told, the step itself not counted; seconds where it is steps that are missing."""
    if finding.kind in ABSENCES:
        return finding.detected_time_s - finding.onset_time_s
    return (finding.detected_step or 0) - at_step


def of_peers(seeds: int, only: str) -> list[list[str]]:
    """The same lines for other projects' rules and for ours: found, rightly named, and what else was said."""
    from peer_rules import rules

    kinds = {"rankwatch": frozenset(Kind), **{rule.name: rule.kinds for rule in rules()}}
    score = {name: [0, 0, 0, 0] for name in kinds}
    lines = []
    for case in [case for case in (*cases(64), *NEGATIVES) if only in case.name]:
        cells: dict[str, list[int]] = {name: [0, 0, 0, 0] for name in kinds}
        for seed in range(seeds):
            job = case.job(seed)
            for name, said in _all_said(job).items():
                for index, count in enumerate(_counts(job, said, kinds[name])):
                    cells[name][index] += count
                    score[name][index] += count
        for name, (labels, found, named, false) in cells.items():
            if labels or false:
                lines.append([case.name, name, f"{found}/{labels}", f"{named}/{labels}", str(false)])
    totals = [["all lines that it can answer", n, f"{f}/{t}", f"{r}/{t}", str(w)] for n, (t, f, r, w) in score.items()]
    return [*lines, *totals]


def _all_said(job: Job) -> dict[str, list[tuple[Kind, int | None, int]]]:
    """By rule: each kind and rank it named, with the step, once for as long as it goes on saying so."""
    from peer_rules import rules

    bank, others = detectors(), rules()
    said: dict[str, list[tuple[Kind, int | None, int]]] = {"rankwatch": [], **{rule.name: [] for rule in others}}
    last: dict[tuple[str, Kind, int | None], int] = {}
    labelled = {label.kind for label in job.labels}
    step = 0
    for observation in job.observations():
        step = observation.step if isinstance(observation, Frame) else step
        for detector in bank:
            for finding in detector.observe(observation):
                # What is said for information disturbs nobody: it can be right and not false.
                disturbs = finding.severity is not Severity.INFO or finding.kind in labelled
                if finding.change is Change.OPEN and disturbs:
                    said["rankwatch"] += [(finding.kind, rank, step) for rank in finding.ranks or (None,)]
        for rule in others:
            for kind, rank in rule.observe(observation):
                key = (rule.name, kind, rank)
                # A report each minute about the same rank is one incident.
                if step - last.get(key, -SILENT_STEPS) >= SILENT_STEPS:
                    said[rule.name].append((kind, rank, step))
                last[key] = step
    return said


def _counts(job: Job, said: list[tuple[Kind, int | None, int]], answers: frozenset[Kind]) -> tuple[int, int, int, int]:
    """Labels of the kinds that a rule answers, those found, those rightly named, and incidents that answer no label."""
    labels = [(label, rank) for label in job.labels for rank in (label.ranks or (None,)) if label.kind in answers]
    of_loss = {Kind.LOSS_SPIKE, Kind.LOSS_DIVERGENCE}
    found = named = 0
    for label, rank in labels:
        kinds = of_loss if label.kind in of_loss else {label.kind}
        # A step that hangs is never finished: the newest one is the one before.
        inside = [who for kind, who, step in said if kind in kinds and step >= label.at_step - 1]
        found += bool(inside)
        named += rank in inside
    kinds = {label.kind for label in job.labels}
    kinds |= set().union(*(BRINGS.get(kind, set()) for kind in kinds)) | (of_loss if kinds & of_loss else set())
    culprits = {rank for label in job.labels for rank in label.ranks}
    before = min((label.at_step - 1 for label in job.labels), default=job.steps)
    false = sum(k not in kinds or step < before or (w is not None and w not in culprits) for k, w, step in said)
    return len(labels), found, named, false


def false_incidents(ranks: int, steps: int, seeds: int) -> list[str]:
    """Clean jobs: incidents opened, and what that says about a week."""
    opened = [f for seed in range(seeds) for f in findings_of(clean(ranks, steps, seed)) if f.change is Change.OPEN]
    weeks = seeds * steps / WEEK_STEPS
    # Seeing none in so many weeks excludes rates above 3 / weeks at 95 %.
    upper = (len(opened) + 3) / weeks
    kinds = ", ".join(sorted({f.kind.value for f in opened})) or "-"
    return [str(ranks), f"{weeks:.2f}", str(len(opened)), kinds, f"{upper:.1f}"]


def speed(ranks: int, steps: int) -> list[str]:
    """Milliseconds of one core for each step, all detectors, 16 metrics."""
    observations = list(Job(ranks, steps, 1, ends=False).observations())
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
    return [str(ranks), f"{middle:.2f}", f"{tick:.2f}", f"{middle * 1e6 / ranks:.0f}"]


def table(head: list[str], lines: Iterable[list[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    """Run everything and print three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--clean-steps", type=int, default=20_000)
    parser.add_argument(
        "--sizes", default="8,64,1024", help="ranks of the clean jobs; the largest also bounds the faults"
    )
    parser.add_argument("--only", default="", help="only the faults with this in their name, and nothing else")
    parser.add_argument("--peers", action="store_true", help="compare with other projects' rules instead")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file as well")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    if options.peers:
        lines = of_peers(options.seeds, options.only)
        _write(table(["line", "rule", "found", "named", "false incidents"], lines), options.markdown)
        return
    lines = []
    for case in [case for case in cases(max(sizes)) if options.only in case.name]:
        lines.append(measure(case, options.seeds))
        print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
    head = ["fault", "found", "named", "delay, median (steps)", "worst", "x bound", "false incidents", "told per cause"]
    if options.only:
        _write(table(head, lines), options.markdown)
        return
    parts = ["### Injected faults", table(head, lines), "### Clean jobs"]
    cleans = [false_incidents(size, max(options.clean_steps * 8 // max(size, 8), 3000), 2) for size in sizes]
    parts.append(table(["ranks", "job-weeks", "false incidents", "kinds", "95 % upper bound per job-week"], cleans))
    parts.append("### Speed, one core")
    parts.append(table(["ranks", "ms a step", "ms a tick", "ns a rank and step"], [speed(size, 120) for size in sizes]))
    _write("\n\n".join(parts), options.markdown)


def _write(text: str, path: Path | None) -> None:
    print(text)
    if path:
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
