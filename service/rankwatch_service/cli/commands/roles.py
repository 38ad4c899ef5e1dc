"""Commands that run a role of rankwatch in this process, or a training script with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rankwatch.children import python_module
from rankwatch_service.cli.configuration import configured_settings
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import DATA, DATABASE_URL, INSECURE, KAFKA

if TYPE_CHECKING:
    from rankwatch_service.settings import Settings

HOST = Annotated[str | None, typer.Option(help="Address to listen on.")]
TLS_CERT = Annotated[
    str | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate of the api, which then speaks https.")
]
TLS_KEY = Annotated[str | None, typer.Option("--tls-key", metavar="FILE", help="Key of the certificate.")]
PORT = Annotated[int | None, typer.Option(min=0, max=65_535, help="Port to listen on.")]


def _not_started(why: Exception) -> CliError:
    return CliError(Status.USAGE, f"rankwatch has not started: {why}")


@contextmanager
def _secrets_kept() -> Iterator[None]:
    """Restrict the umask for all that a role creates, SQLite's files included; report an unusable secret key."""
    from rankwatch_service.access.secret_key import SecretKeyError

    before = os.umask(0o077)
    try:
        yield
    except SecretKeyError as error:
        raise _not_started(error) from error
    finally:
        os.umask(before)


_LISTENING: Final = ("data_dir", "host", "port", "tls_cert", "tls_key", "insecure", "database_url", "kafka")


def _listening(*options: Any) -> Settings:
    """The settings of what listens, from its options in the order of `_LISTENING`.

    Raises:
        CliError: others would reach it without TLS, or its certificate cannot be used.
    """
    from rankwatch_service.certificate import CertificateError, ServedCertificate

    configured = configured_settings(**dict(zip(_LISTENING, options, strict=True)))
    if configured.exposed:
        raise CliError(
            Status.USAGE,
            f"other machines would reach the api at {configured.host} without TLS: set --tls-cert and --tls-key, or"
            " listen on 127.0.0.1 behind a reverse proxy with TLS, or use --insecure in a network that you trust",
        )
    try:
        if configured.tls_cert and configured.tls_key:
            ServedCertificate(configured.tls_cert, configured.tls_key)
    except CertificateError as error:
        raise _not_started(error) from error
    return configured


def up(
    data: DATA = None,
    host: HOST = None,
    port: PORT = None,
    tls_cert: TLS_CERT = None,
    tls_key: TLS_KEY = None,
    insecure: INSECURE = False,
    database_url: DATABASE_URL = None,
    kafka: KAFKA = None,
) -> None:
    """Run the whole service: API, dashboard, stream and notifier. Needs no configuration; uses SQLite by default."""
    from rankwatch_service.cli.errors import require
    from rankwatch_service.up import UpError, run

    configured = _listening(data, host, port, tls_cert, tls_key, insecure or None, database_url, kafka)
    if configured.kafka:
        require("kafka")
    try:
        with _secrets_kept():
            run(configured)
    except UpError as error:
        raise _not_started(error) from error


def api(
    data: DATA = None,
    host: HOST = None,
    port: PORT = None,
    tls_cert: TLS_CERT = None,
    tls_key: TLS_KEY = None,
    insecure: INSECURE = False,
    database_url: DATABASE_URL = None,
    kafka: KAFKA = None,
) -> None:
    """Run only the API and the dashboard."""
    from rankwatch_service.api.serve import run

    configured = _listening(data, host, port, tls_cert, tls_key, insecure or None, database_url, kafka)
    with _secrets_kept():
        run(configured)


def stream(data: DATA = None, database_url: DATABASE_URL = None, kafka: KAFKA = None) -> None:
    """Run only the stream: it reads telemetry and opens incidents."""
    from rankwatch_service.stream.serve import run

    configured = configured_settings(data_dir=data, database_url=database_url, kafka=kafka)
    with _secrets_kept():
        run(configured)


def notify(data: DATA = None, database_url: DATABASE_URL = None, kafka: KAFKA = None) -> None:
    """Run only the notifier: it sends notifications from the outbox."""
    from rankwatch_service.notify.serve import run

    configured = configured_settings(data_dir=data, database_url=database_url, kafka=kafka)
    with _secrets_kept():
        run(configured)


class AgentTask(StrEnum):
    """What an agent does besides serving jobs."""

    DRAIN = "drain"


def agent(
    task: Annotated[AgentTask | None, typer.Argument(help="drain: send what earlier jobs left on this host.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder of the recorders. Default: the first that this user has.")
    ] = None,
    job: Annotated[str, typer.Option(help="Serve this job only, and end with it. Default: all jobs.")] = "",
    url: Annotated[str, typer.Option(help="URL of the service.")] = "",
    token_file: Annotated[Path | None, typer.Option(help="File with a token of scope ingest.")] = None,
    kafka: KAFKA = None,
    insecure: INSECURE = False,
) -> None:
    """Run the agent of this host as a daemon. Without one, ranks start it themselves."""
    given = {"dir": folder, "job": job, "url": url, "token-file": token_file, "kafka": kafka}
    options = [f"--{name}={value}" for name, value in given.items() if value]
    options += ["--insecure"] if insecure else []
    os.execv(sys.executable, python_module("rankwatch.agent", *filter(None, [task]), *options))  # noqa: S606


def demo(
    no_faults: Annotated[bool, typer.Option("--no-faults", help="Train without faults; no incident may open.")] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the service and a job running at the end, to try commands on.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port of the dashboard; 0: any free port.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train, including repeated ones.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of training and faults.")] = 1,
) -> None:
    """Train a small GPT on 4 ranks, inject six faults, and show how they are detected and recovered from."""
    from rankwatch_service.cli.errors import require
    from rankwatch_service.demo.scenario import STEPS, DemoOptions, run

    require("torch")
    raise typer.Exit(run(DemoOptions(not no_faults, keep, port, steps or STEPS, seed)))


JOB = Annotated[str, typer.Option(help="Name of the job. Default: RANKWATCH_JOB, or the name of the script or log.")]


def run(
    command: Annotated[list[str], typer.Argument(help="Such as: torchrun --nproc-per-node=4 train.py")], job: JOB = ""
) -> None:
    """Start a training command and watch its ranks; the script needs no change."""
    from rankwatch.run.command import main

    sys.exit(main([*_job(job), "--", *command], os.environ))


def follow(
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="A log, or the folder in which it is or will be.")],
    job: JOB = "",
    form: Annotated[str, typer.Option("--format", help="Kind of file. Default: as its name shows.")] = "",
    step: Annotated[str, typer.Option(help="Name of the step in the log. Default: detected.")] = "",
    loss: Annotated[str, typer.Option(help="What it calls the loss.")] = "",
    time: Annotated[str, typer.Option(help="Name of the step time in the log. Default: detected.")] = "",
    pattern: Annotated[str, typer.Option(help="Regular expression for its lines, with groups step, loss, time.")] = "",
) -> None:
    """Watch a job by its log, in any format: the step, the loss and the step time are detected."""
    from rankwatch.follow.command import main

    given = {"format": form, "step": step, "loss": loss, "time": time, "pattern": pattern}
    options = [f"--{name}={value}" for name, value in given.items() if value]
    sys.exit(main([str(path), *_job(job), *options], os.environ))


def _job(name: str) -> list[str]:
    return ["--job", name] if name else []
