"""`rankwatch simulate`: a synthetic job with scripted faults, to a file, or live into a service."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import TOKEN, URL

if TYPE_CHECKING:
    from rankwatch_service.simulate.job import Job
    from rankwatch_service.simulate.live import LiveConnection, SendStatus

STEP_S_MAX: Final = 3_600.0
RANKS_MIN: Final = 8
RANKS_MAX: Final = 100_000
TELL_EVERY_S: Final = 5.0


def _no_nan(value: float) -> float:
    """Refuse NaN, which passes every check of bounds."""
    if math.isnan(value):
        raise typer.BadParameter("nan is not a number")
    return value


FILE: Final = "Output to a file"
LIVE: Final = "Output to a service"
FAULT_OPTIONS: Final = "Faults"
JOB: Final = "Job"

OUTPUT = Annotated[
    Path | None, typer.Option("-o", "--output", rich_help_panel=FILE, help="FILE.parquet, .csv or .csv.gz.")
]
FAULT = Annotated[
    list[str] | None,
    typer.Option(
        "--fault", metavar="SPEC", rich_help_panel=FAULT_OPTIONS, help="Such as hang:rank=3,at=500; may be repeated."
    ),
]
LIST = Annotated[bool, typer.Option("--list-faults", rich_help_panel=FAULT_OPTIONS, help="List all faults and exit.")]
RANKS = Annotated[int, typer.Option("--ranks", min=RANKS_MIN, max=RANKS_MAX, rich_help_panel=JOB, help="World size.")]
STEPS = Annotated[int, typer.Option("--steps", min=1, rich_help_panel=JOB, help="Number of steps.")]
SEED = Annotated[int, typer.Option("--seed", min=0, rich_help_panel=JOB, help="The same seed gives the same job.")]
STEP_S = Annotated[
    float,
    typer.Option(
        "--step-s", min=0.001, max=STEP_S_MAX, callback=_no_nan, rich_help_panel=JOB, help="Seconds per step."
    ),
]
NOISE = Annotated[
    float,
    typer.Option(
        "--noise",
        min=0,
        max=1,
        callback=_no_nan,
        rich_help_panel=JOB,
        help="Standard deviation of a rank's step time, as a share.",
    ),
]
TP = Annotated[int, typer.Option("--tp", min=1, rich_help_panel=JOB, help="Tensor-parallel ranks.")]
PP = Annotated[int, typer.Option("--pp", min=1, rich_help_panel=JOB, help="Pipeline stages.")]
ACCELERATOR = Annotated[
    bool,
    typer.Option(
        "--accelerator",
        rich_help_panel=JOB,
        help="As on accelerators: CPU time of launches, times that devices measure, values that arrive a step late.",
    ),
]
NAME = Annotated[str, typer.Option("--job", rich_help_panel=JOB, help="Name of the job.")]
KAFKA = Annotated[
    str | None,
    typer.Option(
        "--kafka",
        metavar="HOST:PORT",
        rich_help_panel=LIVE,
        help="Send to Kafka, as agents do. Default: RANKWATCH_KAFKA.",
    ),
]
AS_LIVE = Annotated[
    bool, typer.Option("--live", rich_help_panel=LIVE, help="Send the job to the service as it happens.")
]
SPEED = Annotated[
    float,
    typer.Option(
        "--speed",
        min=0,
        callback=_no_nan,
        rich_help_panel=LIVE,
        help="1: real time; 10: ten times as fast; 0: as fast as possible.",
    ),
]


def simulate(
    output: OUTPUT = None,
    live: AS_LIVE = False,
    fault: FAULT = None,
    list_faults: LIST = False,
    ranks: RANKS = 64,
    steps: STEPS = 600,
    seed: SEED = 0,
    step_s: STEP_S = 1.0,
    noise: NOISE = 0.02,
    tp: TP = 1,
    pp: PP = 1,
    accelerator: ACCELERATOR = False,
    job: NAME = "simulated",
    speed: SPEED = 1.0,
    url: URL = None,
    token: TOKEN = None,
    kafka: KAFKA = None,
) -> None:
    """Simulate a job with scripted faults: as a file for `rankwatch replay`, or live in a running service.

    NAME.labels.json, written next to the file, lists the injected faults, which
    should be detected. `--list-faults` lists all faults with their parameters,
    and harmless events, which should not be detected.

    [bold]Examples[/bold]

      rankwatch simulate --fault straggler:rank=17,at=500 -o job.parquet
      rankwatch simulate --fault hang:rank=3,at=500 --fault gc -o job.csv.gz
      rankwatch simulate --accelerator --fault straggler:rank=2,at=300 -o job.parquet
      rankwatch simulate --live --speed 10 --fault nonfinite:rank=3,at=90
    """
    from rankwatch_service.simulate.job import Job, Noise, RankPlacement

    if list_faults:
        _list_faults()
        return
    if live == (output is not None):
        raise CliError(Status.USAGE, "choose one: -o FILE for a file, or --live for a running service")
    placement = RankPlacement(tp, pp, launch_cpu=accelerator, device_times=accelerator)
    plain = Job(ranks, steps, seed, step_s=step_s, noise=Noise(noise), placement=placement, late_values=accelerator)
    world = _with_faults(plain, fault or [])
    if output is not None:
        _write(world, output, job)
    else:
        with _connections(kafka, url, token) as connect:
            _send(world, job, speed, connect)


def _list_faults() -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from rankwatch_service.simulate.script import FAULTS, HARMLESS, usage

    console = Console()
    if not console.is_terminal:
        for name, spec in (FAULTS | HARMLESS).items():
            print(f"{usage(name)}\t{spec.summary}")
        return
    for title, specs in (("Faults, which should be detected", FAULTS), ("Harmless events, which should not", HARMLESS)):
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, spec in specs.items():
            table.add_row(f"[bold]{name}[/]", spec.summary)
            table.add_row("", escape(usage(name)))
            for called, parameter in spec.parameters.items():
                table.add_row("", f"[dim]  {called}: {escape(parameter.help)}[/]")
        console.print(table)
        console.print()


def _with_faults(job: Job, faults: Iterable[str]) -> Job:
    from rankwatch_service.simulate.script import apply

    try:
        job.topology()
        for text in faults:
            job = apply(text, job)
    except ValueError as error:
        raise CliError(Status.USAGE, str(error)) from error
    return job


def _write(world: Job, output: Path, name: str) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from rankwatch_service.simulate.files import SimulateError, labels_of, labels_path, write_job

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("writing", total=world.world_size * world.steps)
        try:
            rows = write_job(world, output, name, lambda rows: progress.update(task, completed=rows))
        except SimulateError as error:
            raise CliError(Status.USAGE, str(error)) from error
        except OSError as error:
            raise CliError(Status.USAGE, f"{output}: {error.strerror or error}") from error
    labels = labels_of(world, name)
    size_mb, faults = output.stat().st_size / 1e6, len(labels["faults"])
    print(f"{output}: {rows:,} rows, {size_mb:,.1f} MB", file=sys.stderr)
    print(f"{labels_path(output)}: {faults} fault{'s' * (faults != 1)} to find", file=sys.stderr)
    if hidden := sorted({label["kind"] for label in labels["not_in_file"]}):
        print(f"not to be found in a file, which lacks the data: {', '.join(hidden)}", file=sys.stderr)


@contextmanager
def _connections(kafka: str | None, url: str | None, token: str | None) -> Iterator[Callable[[], LiveConnection]]:
    """Opens connections to the service: Kafka where it is named, otherwise HTTP."""
    import os

    from rankwatch.client.connection import user_places
    from rankwatch.kafka.settings import from_environment
    from rankwatch_service.cli.client import find_endpoint
    from rankwatch_service.simulate.live import HttpConnection

    try:
        settings = from_environment(os.environ, kafka or "")
    except ValueError as error:
        raise CliError(Status.USAGE, str(error)) from error
    if settings is None:
        endpoint = find_endpoint(url, token, os.environ, user_places(os.environ))
        try:
            HttpConnection(endpoint.url, endpoint.token, endpoint.trust).close()
        except ValueError as error:
            raise CliError(Status.USAGE, str(error)) from error
        yield lambda: HttpConnection(endpoint.url, endpoint.token, endpoint.trust)
        return
    from rankwatch_service.simulate.live_kafka import kafka_connections

    with kafka_connections(settings) as connect:
        yield connect


def _send(world: Job, name: str, speed: float, connect: Callable[[], LiveConnection]) -> None:
    from rankwatch_service.clock import SystemClock
    from rankwatch_service.simulate.live import Pace, send_job

    clock = SystemClock()
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: asked.append(number))
    last_s = [clock.monotonic_s()]

    def tell(sent: SendStatus) -> None:
        if clock.monotonic_s() - last_s[0] >= TELL_EVERY_S:
            last_s[0] = clock.monotonic_s()
            print(_status(sent), file=sys.stderr, flush=True)

    sent = send_job(world, name, connect, Pace(speed, clock), lambda: bool(asked), tell)
    print(_status(sent), file=sys.stderr)
    if sent.failure:
        raise CliError(Status.UNREACHABLE, f"the job was not sent completely: {sent.failure}")


def _status(sent: SendStatus) -> str:
    behind = f", {sent.behind_s:.1f} s behind" if sent.behind_s > 1 else ""
    why = f"; retrying: {sent.retry_reason}" if sent.retry_reason and not sent.failure else ""
    return f"{sent.batches:,} batches, {sent.rank_steps:,} rank-steps, {sent.bytes / 1e6:,.1f} MB sent{behind}{why}"
