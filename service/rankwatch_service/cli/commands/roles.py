"""Commands that run a role of rankwatch in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import typer

from rankwatch_service.cli.configuration import configured_settings
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import DATA, DATABASE_URL, KAFKA

PASS_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
"""The agent parses its arguments itself."""

HOST = Annotated[str | None, typer.Option(help="Address to listen on.")]
PORT = Annotated[int | None, typer.Option(min=0, max=65_535, help="Port to listen on.")]


@contextmanager
def _private_files() -> Iterator[None]:
    """Let nobody else read what a role creates: SQLite takes the mode of its files from the umask."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def up(
    data: DATA = None,
    host: HOST = None,
    port: PORT = None,
    database_url: DATABASE_URL = None,
    kafka: KAFKA = None,
) -> None:
    """Run the whole service: API, dashboard, stream and notifier. Needs no configuration; uses SQLite by default."""
    from rankwatch_service.cli.extras import require
    from rankwatch_service.up import UpError, run

    configured = configured_settings(data_dir=data, host=host, port=port, database_url=database_url, kafka=kafka)
    if configured.kafka:
        require("kafka")
    try:
        with _private_files():
            run(configured)
    except UpError as error:
        raise CliError(Status.USAGE, str(error)) from error


def api(
    data: DATA = None,
    host: HOST = None,
    port: PORT = None,
    database_url: DATABASE_URL = None,
    kafka: KAFKA = None,
) -> None:
    """Run only the API and the dashboard."""
    from rankwatch_service.api.serve import run

    configured = configured_settings(data_dir=data, host=host, port=port, database_url=database_url, kafka=kafka)
    with _private_files():
        run(configured)


def stream(data: DATA = None, database_url: DATABASE_URL = None, kafka: KAFKA = None) -> None:
    """Run only the stream: it reads telemetry and opens incidents."""
    from rankwatch_service.stream.serve import run

    configured = configured_settings(data_dir=data, database_url=database_url, kafka=kafka)
    with _private_files():
        run(configured)


def notify(data: DATA = None, database_url: DATABASE_URL = None, kafka: KAFKA = None) -> None:
    """Run only the notifier: it sends notifications from the outbox."""
    from rankwatch_service.notify.serve import run

    configured = configured_settings(data_dir=data, database_url=database_url, kafka=kafka)
    with _private_files():
        run(configured)


def agent(context: typer.Context) -> None:
    """Run the agent of this host as a daemon. Without one, ranks start it themselves."""
    os.execv(sys.executable, [sys.executable, "-m", "rankwatch.agent", *context.args])  # noqa: S606


def demo(
    no_faults: Annotated[bool, typer.Option("--no-faults", help="Train without faults; no incident may open.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the service running at the end.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port of the dashboard; 0: any free port.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train, including repeated ones.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of training and faults.")] = 1,
    kafka: Annotated[bool, typer.Option("--kafka", help="Use Kafka and PostgreSQL; both are started here.")] = False,
    broker: Annotated[str, typer.Argument(metavar="HOST:PORT", help="With --kafka: a running Kafka to use.")] = "",
    database_url: DATABASE_URL = None,
) -> None:
    """Train a small GPT on 4 ranks, inject five faults, and show how they are detected and recovered from."""
    from rankwatch_service.cli.extras import require
    from rankwatch_service.demo.run import STEPS, DemoOptions, run
    from rankwatch_service.demo.services.backing import OWN, Backing

    require("torch")
    if broker and not kafka:
        raise CliError(Status.USAGE, f"unexpected argument {broker!r}: use --kafka HOST:PORT to name a running Kafka")
    backing = Backing((broker or OWN) if kafka else "", database_url or (OWN if kafka else ""))
    raise typer.Exit(run(DemoOptions(not no_faults, keep, port, steps or STEPS, seed, backing)))
