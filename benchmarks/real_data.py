"""How the detectors do on recorded telemetry of real jobs, by the labels that lie beside it.

    python benchmarks/real_data.py FOLDER [--family NAME] [--list]

FOLDER holds one folder for each family, each with a labels.json. Every series goes through `replay` as it is, at the
detectors' defaults. A `must` event is found when a finding of its own kind is told inside its window; an incident that
opens outside all windows, after the start-up, is false: a page where it ever was a warning or critical, else for
information, which nobody is notified of. Families whose files are not rows of steps are turned into what
an agent would have sent: see `FAMILIES`.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rankwatch_detectors.base import AttemptStart, Finding, Kind, Presence, Tick, Topology
from rankwatch_detectors.progress.hang import HangDetector
from rankwatch_detectors.progress.progress_timeout import HangConfig
from rankwatch_detectors.scope import IncidentScope
from suite.recorded import ANSWERS, LabelledEvent, ScoredSeries, curve, faults, listen, metric, steps_and_power

FAR = 10**6
"""Collectives entered by a rank that lags in no group; dumps show only differences."""
EARLY_ROWS = 10
"""A straggler reported so shortly before its label's window (a running median over five rows) is the one that is
meant."""


# ---- families of ranks ---------------------------------------------------------------------------------------------


def stage(folder: Path, name: str, labels: dict[str, Any]) -> ScoredSeries:
    """Times by operation, rank and step: a whole stage is long, and no rank of it is at fault."""
    mapping = {"stage": "pp", "dp_rank": "dp", "forward_compute_s": "forward_s", "backward_compute_s": "backward_s"}
    has_reported = listen(folder / f"rank_step-{name}.csv.gz", mapping)
    published = labels["published_labels"][0]
    series = ScoredSeries(name, has_reported.points, incidents=len(has_reported.opened))
    slow = published.get("slow_stage")
    if slow is not None:
        event = LabelledEvent("stage", "slow_stage", 0, 0, must=True)
        named = [f for f in has_reported.findings if f.scope == IncidentScope.of_stage(slow)]
        series.found.append((event, 0 if named else None))
    if published.get("persistent_single_worker_straggler") is False:
        of_ranks = [one for one in has_reported.opened if one.kind is Kind.STRAGGLER]
        series.accuse(one for one in of_ranks if f"stage {slow}" not in one.summary)
    return series


def workers(folder: Path, name: str, labels: dict[str, Any]) -> ScoredSeries:
    """Mini-batch times of the ten workers of a job, each counting for itself."""
    if "workers" not in labels:
        return ScoredSeries(name, notes="no times by worker")
    counts: dict[str, int] = {}
    starts: dict[tuple[str, int], int] = {}
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as out, gzip.open(folder / labels["file"], "rt") as file:
        out.write("step,rank,busy_s\n")
        rows = []
        for row in csv.DictReader(file):
            step = counts[row["worker"]] = counts.get(row["worker"], -1) + 1
            starts[(row["worker"], int(row["time"]))] = step
            rows.append((step, int(row["worker"]), float(row["mini_batch_time_norm"]) / 1000))
        out.writelines(f"{step},{rank},{busy_s}\n" for step, rank, busy_s in sorted(rows))
        out.flush()
        has_reported = listen(Path(out.name), {})
    series = ScoredSeries(name, has_reported.points, incidents=len(has_reported.opened))
    slow = set()
    for event in labels["visible_events"]:
        rank = event["worker"]
        slow.add(rank)
        start = min(
            step for (worker, time), step in starts.items() if worker == str(rank) and time >= event["start_time"]
        )
        label = LabelledEvent("worker", f"worker {rank}", start, 10**9, must=True)
        steps = [f.detected_step for f in has_reported.findings if rank in f.ranks and f.kind is Kind.STRAGGLER]
        # One that is named already, some rows before the label's own rule, is not named again.
        delays = [max(step - start, 0) for step in steps if step is not None and step >= start - EARLY_ROWS]
        series.found.append((label, min(delays) if delays else None))
    series.accuse(one for one in has_reported.opened if not set(one.ranks) & slow)
    return series


def recorder(folder: Path, name: str, labels: dict[str, Any]) -> ScoredSeries:
    """Flight-recorder dumps of hung ranks: each rank's sequence number of the collective that the others wait in."""
    with gzip.open(folder / labels["file"], "rt") as file:
        dumps = json.load(file)
    ranks = len(dumps)
    status = [dumps[str(rank)]["pg_status"] for rank in range(ranks)]
    groups = [group["ranks"] for dump in dumps.values() for group in dump["pg_config"].values()]
    series = ScoredSeries(name, len(groups))
    sequence = waited_for(dumps, status)
    named = missing_ranks(ranks, sequence)
    published = labels["published_labels"][0]
    event = LabelledEvent("hang", published["fault_type"], 0, 0, must=True)
    series.found.append((event, 0 if set(named) & set(published["injected_fault_ranks"]) else None))
    series.incidents = 1
    series.notes = f"named {named}, injected {published['injected_fault_ranks']}"
    return series


def waited_for(dumps: dict[str, Any], status: list[dict[str, Any]]) -> list[int]:
    """Each rank's collectives entered, as a count: how far it lags behind in the group where it lags most."""
    entered = []
    for rank, groups in enumerate(status):
        lag = 0
        for number, group in groups.items():
            members = json.loads(dumps[str(rank)]["pg_config"].get(number, {"ranks": "[]"})["ranks"])
            theirs = [status[peer][number]["last_enqueued_collective"] for peer in members if number in status[peer]]
            lag = max(lag, max(theirs, default=0) - group["last_enqueued_collective"])
        entered.append(FAR - lag)
    return entered


def missing_ranks(ranks: int, sequence: list[int]) -> list[int]:
    """Whom the hang detector names for ranks that stand still with these sequence numbers."""
    zeros = np.zeros(ranks, dtype=np.int64)
    topology = Topology(ranks, ("",) * ranks, ("",) * ranks, np.arange(ranks), zeros, zeros, zeros, zeros)
    detector = HangDetector(HangConfig())
    detector.observe(AttemptStart("dump.0", topology, 0.0))
    findings: list[Finding] = []
    for second in range(1, 400):
        step = min(second, 30)
        standing = float(max(second - 30, 0))
        presence = Presence(
            attempt="dump.0",
            has_reported=np.ones(ranks, dtype=np.bool_),
            received_s=np.full(ranks, float(second)),
            sent_s=np.full(ranks, float(second)),
            step=np.full(ranks, step, dtype=np.int64),
            phase=("collective",) * ranks,
            phase_age_s=np.full(ranks, standing),
            step_age_s=np.full(ranks, standing),
            collective_seq=np.asarray(sequence if standing else [step] * ranks, dtype=np.int64),
            state=("running",) * ranks,
            os_state=("S",) * ranks,
            cpu_s=np.zeros(ranks),
            outside_s=np.full(ranks, -1.0),
            doing=("",) * ranks,
        )
        findings += detector.observe(Tick(float(second), presence))
    return list(findings[0].ranks) if findings else []


# ---- others --------------------------------------------------------------------------------------------------------


def incident_lines(folder: Path, name: str, labels: dict[str, Any]) -> ScoredSeries:
    """A few log lines around an incident, after a made-up calm history with the usual noise of such runs."""
    with gzip.open(folder / "incident_lines.csv.gz", "rt") as file:
        lines = [row for row in csv.DictReader(file) if row["incident"] == name]
    first, interval = lines[0], int(lines[1]["iteration"]) - int(lines[0]["iteration"])
    random = np.random.default_rng(0)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as out:
        out.write("step,step_time_s,loss,grad_norm\n")
        normal = 300
        for before in range(normal, 0, -1):
            step = int(first["iteration"]) - before * interval
            loss, norm = float(first["lm_loss"]), float(first["grad_norm"])
            # 2 % between log lines, norms a tenth: what the calm stretches of the same chronicles show.
            cells = (loss * math.exp(0.02 * random.standard_normal()), norm * math.exp(0.1 * random.standard_normal()))
            out.write(f"{step},{first['step_time_s']},{cells[0]},{cells[1]}\n")
        out.writelines(f"{r['iteration']},{r['step_time_s']},{r['lm_loss']},{r['grad_norm']}\n" for r in lines)
        out.flush()
        has_reported = listen(Path(out.name), {})
    series = ScoredSeries(name, has_reported.points, incidents=len(has_reported.opened))
    label = labels["published_labels"][0]
    onset = label.get("onset_iteration")
    if onset is not None:
        event = LabelledEvent("loss", label["kind"], onset, int(lines[-1]["iteration"]), must=True)
        steps = [
            f.detected_step for f in has_reported.findings if f.kind in ANSWERS["loss"] and f.detected_step is not None
        ]
        inside = [(step - onset) // interval for step in steps if onset <= step <= event.end]
        series.found.append((event, min(inside) if inside else None))
    series.accuse(one for one in has_reported.opened if onset is None or one.step < onset)
    return series


FAMILIES: dict[str, Callable[[Path, str, dict[str, Any]], ScoredSeries]] = {
    "mlperf51_training": curve({"row": "step", "t_s": "time_s"}),
    "megatron_ci_runs": curve({}),
    "nanogpt_speedrun": curve({"train_loss": "loss", "train_time_s": "time_s"}),
    "algoperf_instability": curve({"global_step": "step", "t_s": "time_s"}),
    "bytedance_stragglers": stage,
    "pai_minibatch": workers,
    "nvrx_flight_recorder": recorder,
    "bloom_incidents": incident_lines,
    "mlperf40_node_power": steps_and_power,
    "infinitehbd_faults": faults,
    "nab": metric,
}


HEAD = (
    "family", "series", "points", "must events found", "median delay (points)", "false pages", "false, for information",
    "clean points", "false pages in them (per 1,000)", "false, for information, in them (per 1,000)",
)  # fmt: skip


def score(folder: Path, families: list[str]) -> Iterator[tuple[str, ScoredSeries]]:
    """Every series of the families that the folder has."""
    for family in families:
        path = folder / family / "labels.json"
        if path.is_file():
            for name, labels in json.loads(path.read_text())["series"].items():
                yield family, FAMILIES[family](path.parent, name, labels)


def line(family: str, listed: list[ScoredSeries]) -> list[str]:
    """The cells of a family's line; clean are the series in which there is nothing to find."""
    found = [delay for series in listed for _, delay in series.found]
    delays = [delay for delay in found if delay is not None]
    cells = [family, str(len(listed)), str(sum(series.points for series in listed)), f"{len(delays)}/{len(found)}"]
    cells.append(f"{np.median(delays):.0f}" if delays else "-")
    cells += [str(sum(len(series.false) for series in listed)), str(sum(len(series.informed) for series in listed))]
    clean = [series for series in listed if not series.found]
    points = sum(series.points for series in clean)
    counts = (sum(len(series.false) for series in clean), sum(len(series.informed) for series in clean))
    if not points:
        return [*cells, "-", "-", "-"]
    return [*cells, str(points), *(f"{count} ({1000 * count / points:.3f})" for count in counts)]


def main() -> None:
    """Score all families and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", action="append", choices=FAMILIES)
    parser.add_argument("--list", action="store_true", help="say of each series what was missed, and what was false")
    options = parser.parse_args()
    results: dict[str, list[ScoredSeries]] = {}
    for family, series in score(options.folder, options.family or list(FAMILIES)):
        results.setdefault(family, []).append(series)
        if options.list:
            for event, delay in series.found:
                print(f"{family} {series.name}: {event} {'MISSED' if delay is None else delay}", file=sys.stderr)
            for text in series.false:
                print(f"{family} {series.name}: FALSE PAGE {text}", file=sys.stderr)
            for text in series.informed:
                print(f"{family} {series.name}: FALSE, FOR INFORMATION {text}", file=sys.stderr)
    print("| " + " | ".join(HEAD) + " |\n" + "| --- " * len(HEAD) + "|")
    for family, listed in results.items():
        print("| " + " | ".join(line(family, listed)) + " |")


if __name__ == "__main__":
    main()
