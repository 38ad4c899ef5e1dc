"""Arguments that many commands share, with what a shell offers for them."""

from __future__ import annotations

from typing import Annotated

import typer

from rankwatch_service.cli import completion

JOB = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.", autocompletion=completion.jobs)]
INCIDENT = Annotated[
    str, typer.Argument(help="Id of the incident, or a prefix of it.", autocompletion=completion.incidents)
]
COMMAND = Annotated[
    str, typer.Argument(help="Id of the command, or a prefix of it.", autocompletion=completion.commands)
]
