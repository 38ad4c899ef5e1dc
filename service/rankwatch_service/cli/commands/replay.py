"""`rankwatch replay`: runs the detectors on recorded telemetry."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rankwatch.terminal import json_line, printable
from rankwatch_detectors.metrics import COLUMNS
from rankwatch_service.cli import output
from rankwatch_service.cli.configuration import read_rules
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import JSON

if TYPE_CHECKING:
    from rankwatch_detectors.catalogue import CatalogueConfig
    from rankwatch_detectors.metric_rule import MetricRule
    from rankwatch_service.incidents.model import Incident
    from rankwatch_service.replay.run import ReplayResult

FILES_HELP: Final = "CSV (also .gz), Parquet or TensorBoard event files of one job."
# Unreadable files are reported when they are opened, like all other problems with files.
FILES = Annotated[list[Path], typer.Argument(help=FILES_HELP, readable=False)]
NAME = Annotated[str, typer.Option("--job", help="Name of the job.")]
MAP = Annotated[
    list[str] | None, typer.Option("--map", metavar="A=B,…", help="Read column A of the files as the known column B.")
]
UNTIL = Annotated[int | None, typer.Option("--until-step", min=0, help="Stop after this step.")]
CONFIG_HELP: Final = (
    "Settings of detectors: quiet, standard or sensitive, a .toml or .json file, or DETECTOR.SETTING=VALUE,…"
)
CONFIG = Annotated[str, typer.Option("--tuning", "--detector-config", metavar="SETTINGS", help=CONFIG_HELP)]
COMPARE_HELP: Final = "Print only incidents that differ between these settings and --tuning."
COMPARE = Annotated[str | None, typer.Option("--compare", metavar="SETTINGS", help=COMPARE_HELP)]
RULES_HELP: Final = "Rules on metrics: a .toml file, as of `rankwatch rules apply`. They apply whatever jobs they name."
RULES = Annotated[Path | None, typer.Option("--rules", metavar="FILE", help=RULES_HELP, readable=False)]


def replay(
    files: FILES,
    job: NAME = "replay",
    mapping: MAP = None,
    as_json: JSON = False,
    until_step: UNTIL = None,
    tuning: CONFIG = "default",
    compare: COMPARE = None,
    rules: RULES = None,
) -> None:
    """Run the detectors on recorded telemetry, offline: which incidents would have opened, and when.

    Files have one row for each rank and step, or for each step of a job,
    in the order of steps: all ranks of a step, then those of the next.
    [bold]step[/bold] is required. Known columns (others become metrics):

      time_s rank host switch device_type device_uuid dp tp pp cp ep
      attempt
      kind (train, eval, checkpoint)
      {metrics}
      nonfinite fingerprint

    An empty field means not measured; nan and inf are values.

    [bold]Examples[/bold]

      rankwatch simulate --fault hang:rank=3,at=500 -o job.parquet
      rankwatch replay job.parquet
      rankwatch replay log.csv --map global_step=step,train/loss=loss
      rankwatch replay rank-*.csv.gz --json
      rankwatch replay job.parquet --compare straggler.budget=0.1
      rankwatch replay job.parquet --tuning quiet --compare tuning.json

    Exit status: 0, with or without incidents; 1, a file is malformed (the
    rows before the error are analysed and printed); 2, wrong usage.
    """
    from rankwatch_service.replay.configure import read_config

    try:
        configs = [read_config(text, job) for text in (tuning, compare) if text is not None]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    written = [] if rules is None else read_rules(rules)
    began = time.perf_counter()
    outcome = _played(files, mapping, configs, job, until_step, [rule.rule() for rule in written])
    seconds = time.perf_counter() - began
    names = (tuning, compare or "")
    _print_json(outcome, seconds, names) if as_json else _print(outcome, seconds, names)
    if outcome.broken is not None:
        raise CliError(Status.FINDINGS, str(outcome.broken))


replay.__doc__ = (replay.__doc__ or "").format(metrics=fill(" ".join(COLUMNS), 66, subsequent_indent=" " * 6))


def _played(
    files: Sequence[Path],
    mapping: Sequence[str] | None,
    configs: Sequence[CatalogueConfig],
    job: str,
    until_step: int | None,
    rules: Sequence[MetricRule],
) -> ReplayResult:
    """Replay files, with a progress bar.

    Raises:
        CliError: a file cannot be read.
        typer.BadParameter: the mapping is wrong.
    """
    from rankwatch_service.foreign_files import ForeignReader
    from rankwatch_service.replay.layout import ReplayError, parse_mapping

    try:
        columns = parse_mapping(",".join(mapping or []))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        with ForeignReader("rankwatch_service.replay.foreign") as reader:
            from rankwatch_service.replay.foreign import ForeignFile  # meanwhile the reader starts
            from rankwatch_service.replay.run import replay as run

            sources = [ForeignFile(reader, path, columns) for path in files]
            began_s = time.monotonic()
            with output.progress("judging", max(sum(source.total for source in sources), 1)) as show:

                def progress(done: int, steps: int) -> None:
                    show(done, f"{steps / (time.monotonic() - began_s):,.0f} steps/s")

                return run(sources, columns, configs, job=job, until_step=until_step, progress=progress, rules=rules)
    except ReplayError as error:
        raise CliError(Status.FINDINGS, str(error)) from error


def _lists(outcome: ReplayResult, names: tuple[str, str]) -> list[tuple[str, list[Incident]]]:
    """The lists of incidents to print; with two settings, each with the settings it belongs to."""
    from rankwatch_service.replay.report import unshared

    if len(outcome.incidents) == 1:
        return [("", outcome.incidents[0])]
    return [(f"only with {name}", list(only)) for name, only in zip(names, unshared(*outcome.incidents), strict=True)]


def _print_json(outcome: ReplayResult, seconds: float, names: tuple[str, str]) -> None:
    from rankwatch_service.replay.report import as_json, summary

    def line(thing: dict[str, Any]) -> None:
        sys.stdout.write(json_line(thing))

    for which, incidents in _lists(outcome, names):
        for incident in incidents:
            line(as_json(incident, outcome.named) | ({"found": which} if which else {}))
    line({"summary": summary(outcome, seconds)})


def _print(outcome: ReplayResult, seconds: float, names: tuple[str, str]) -> None:
    from rich.console import Console

    from rankwatch_service.replay.report import LEFT_OUT, NOT_IN_FILES, missing, what_was_read

    console = Console(highlight=False)
    if outcome.rows or outcome.broken is None:
        console.print(printable(what_was_read(outcome, seconds)), markup=False)
    lists = _lists(outcome, names)
    if len(lists) > 1:
        shared = len(outcome.incidents[0]) - len(lists[0][1])
        console.print(f"\nFound with both settings: {shared} incident{'s' * (shared != 1)}.")
    for which, incidents in lists:
        head = "No incident" if not incidents else f"{len(incidents)} incident{'s' * (len(incidents) != 1)}"
        console.print(f"\n[bold]{head}[/bold]{' ' + which if which else ''}{':' if incidents else '.'}")
        for incident in incidents:
            _describe(console, incident, outcome)
    notes = [f"{kind}: needs {words}" for kind, words in missing(outcome)]
    notes = ["Not detected, since columns are missing:", *(f"  {note}" for note in notes)] if notes else []
    notes.append(f"Never detected in files, which lack the data: {', '.join(NOT_IN_FILES)}")
    notes += [
        f"Skipped: {count:,} {LEFT_OUT.get(reason, reason)}" for reason, count in sorted(outcome.left_out.items())
    ]
    if outcome.left_out_columns:
        notes.append(f"Skipped columns of text: {', '.join(outcome.left_out_columns)}")
    console.print()
    for note in notes:
        console.print(printable(note), style="dim", markup=False)
    for failure in outcome.failures:
        console.print(f"A detector failed: {printable(failure)}", style="red", markup=False)


def _describe(console: Any, incident: Incident, outcome: ReplayResult) -> None:
    """Print one incident in a few lines."""
    from rich.padding import Padding

    from rankwatch_service.cli.output import plain, severity
    from rankwatch_service.incidents.kinds import KINDS
    from rankwatch_service.replay.report import FIRST_STEP, cost, culprits, duration

    line = severity(str(incident.severity))
    line.append("  ")
    line.append(str(incident.kind), style="bold")
    line.append(f"  {culprits(incident)}" if outcome.named else "")
    console.print()
    console.print(line)
    price = cost(incident, accelerated=outcome.accelerated)
    lines = [duration(incident), incident.summary, price, *_consequences(incident)]
    first = FIRST_STEP.get(incident.kind, KINDS[incident.kind].first_steps[0])
    lines += [f"first: {first}", f"more: docs/incidents/{incident.kind}.md"]
    for text in filter(None, lines):
        console.print(Padding(plain(text), (0, 0, 0, 2), expand=False))


def _consequences(incident: Incident) -> Iterator[str]:
    for part in incident.parts[1:4]:
        yield f"consequence: {part.summary}"
    if incident.parts_total > 4:
        yield f"and {incident.parts_total - 4} more consequences"
