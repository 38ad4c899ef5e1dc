"""`rankwatch run` and `rankwatch follow`, for the list of commands and their help.

`rankwatch_service.cli.main` starts them before it imports typer, which training hosts need not have.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

JOB = Annotated[str, typer.Option(help="Name of the job. Default: RANKWATCH_JOB, or the name of the script or log.")]


def run(
    command: Annotated[list[str], typer.Argument(help="Such as: torchrun --nproc-per-node=4 train.py")],
    job: JOB = "",
) -> None:
    """Start a training command and watch its ranks; its script needs no line for it."""
    from rankwatch.run.command import main

    sys.exit(main([*_job(job), "--", *command], os.environ))


def follow(
    path: Annotated[Path, typer.Argument(metavar="FILE|DIR", help="A log, or the folder in which it is or will be.")],
    job: JOB = "",
    form: Annotated[str, typer.Option("--format", help="Format of the log. Default: as it shows.")] = "",
) -> None:
    """Watch a job by the log that it writes: lines of trainers, TensorBoard or CSV."""
    from rankwatch.follow.command import main

    sys.exit(main([str(path), *_job(job), *(["--format", form] if form else [])], os.environ))


def _job(name: str) -> list[str]:
    return ["--job", name] if name else []
