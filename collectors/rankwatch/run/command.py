"""`rankwatch run [--job NAME] -- COMMAND`.

The command takes the place of this process, so that signals and the exit status are its own, and nothing is left over.
What is added is in its environment: a folder with a `sitecustomize`, the job's name, and its service.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rankwatch.identity import JOB_VARIABLE
from rankwatch.notices import say
from rankwatch.run import RUN_VARIABLE
from rankwatch.run.job_token import NoTokenError, job_access

SITE: Final = Path(__file__).with_name("site")
"""The folder on the path of the command's Python processes: there is only the `sitecustomize` in it."""
USAGE: Final = 2
NOT_FOUND: Final = 127
"""Exit status of shells for a command that does not exist."""
NOT_EXECUTABLE: Final = 126


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Become the command; returns only if it cannot be started, with the exit status of a shell."""
    parser = argparse.ArgumentParser(
        prog="rankwatch run",
        usage="rankwatch run [--job NAME] [--] COMMAND ...",
        description="Start a training command and watch its ranks. Its script needs no line for it.",
    )
    parser.add_argument("--job", help="name of the job; else RANKWATCH_JOB, the scheduler's, or that of the script")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="such as: torchrun ... train.py")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.print_usage()
        return USAGE
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        say(f"run: there is no command {command[0]!r}")
        return NOT_FOUND
    try:
        os.execve(program, command, added(environment, options.job or job_name(command, environment)))  # noqa: S606
    except OSError as error:
        say(f"run: {program}: {error.strerror}")
    return NOT_EXECUTABLE


def added(environment: Mapping[str, str], job: str) -> dict[str, str]:
    """The environment of the command."""
    path = environment.get("PYTHONPATH")
    variables = {
        RUN_VARIABLE: "1",
        JOB_VARIABLE: job,
        "PYTHONPATH": f"{SITE}{os.pathsep}{path}" if path else str(SITE),
    }
    try:
        variables |= job_access(job, environment)
    except NoTokenError as error:
        say(f"job {job!r}: {error}")
    return {**environment, **variables}


def job_name(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The job's name: as the environment has it, else the name of the command's script, or of its program."""
    named = environment.get(JOB_VARIABLE) or environment.get("SLURM_JOB_NAME")
    script = next((word for word in command if word.endswith(".py")), command[0])
    return named or Path(script).stem
