"""`rankwatch run [--job NAME] -- COMMAND`.

The command takes the place of this process, so that signals and the exit status are its own, and nothing is left over.
What is added is in its environment: a folder with a `sitecustomize`, the job's name, and its service.

The token with which the agents of a job report, made by the login of whoever starts the job.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rankwatch.agent.endpoint import login_endpoint
from rankwatch.agent.service_connection import ServiceConnection, Unreachable
from rankwatch.identity import JOB_VARIABLE
from rankwatch.notices import say
from rankwatch.run import RUN_VARIABLE

EXPIRES_S: Final = 86_400.0
"""Lifetime of the token. While agents report with it, the service renews it."""


class NoTokenError(Exception):
    """No token could be made; the message says why, and what to do."""


def job_access(job: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which the agents of a job find their service: RANKWATCH_URL and RANKWATCH_TOKEN.

    Empty if there is nothing to add: a token is set already, or the user has not logged in, so that agents find the
    service of `rankwatch up` by themselves.

    Raises:
        NoTokenError: there is a login, and it yields no token.
    """
    if environment.get("RANKWATCH_TOKEN"):
        return {}
    try:
        login = login_endpoint(environment)
    except (OSError, ValueError) as error:
        raise NoTokenError(f"the login cannot be used: {error}") from error
    wanted = environment.get("RANKWATCH_URL", "").rstrip("/")
    if login is None or wanted not in ("", login.url):
        return {}
    asked = {"name": f"agents of {job}", "scopes": ["ingest"], "job": job, "expires_s": EXPIRES_S}
    try:
        connection = ServiceConnection(lambda: login)
        try:
            reply = connection.post("/api/v1/tokens", json.dumps(asked).encode(), "application/json")
        finally:
            connection.close()
        answer = json.loads(reply.body)
        if reply.status == 201:
            return {"RANKWATCH_URL": login.url, "RANKWATCH_TOKEN": str(answer["token"])}
        raise NoTokenError(
            f"{login.url} makes no token for this login ({reply.status}: {answer.get('title', '')}); "
            f"set RANKWATCH_TOKEN to what `rankwatch token job {job}` prints there"
        )
    except (Unreachable, ValueError, KeyError, TypeError) as error:
        raise NoTokenError(f"{login.url} did not make a token for the job: {error}") from error


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
    program = shutil.which(command[0], path=environment.get("PATH"))  # noqa: TID251 - as their shell does
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
    variables = {RUN_VARIABLE: "1", JOB_VARIABLE: job, "PYTHONPATH": f"{SITE}{os.pathsep}{path}" if path else str(SITE)}
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
