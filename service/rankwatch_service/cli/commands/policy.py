"""`rankwatch policy`: what is done about incidents without a person, and which commands need two people."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import TOKEN, URL, connect

app = typer.Typer(help="Print the policy as JSON; replace it.", invoke_without_command=True)

PATH = "/api/v1/policy"


@app.callback()
def show_policy(context: typer.Context, url: URL = None, token: TOKEN = None) -> None:
    """Print the policy as JSON; replace it."""
    if context.invoked_subcommand is None:
        print(json.dumps(connect(url, token).get(PATH), indent=2))


@app.command("set")
def set_policy(
    document: Annotated[typer.FileText, typer.Argument(metavar="FILE", help="The policy as JSON; -: standard input.")],
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Replace the whole policy with a JSON document, as `rankwatch policy` prints it. Requires scope admin."""
    try:
        wanted: Any = json.load(document)
    except ValueError as error:
        raise CliError(Status.USAGE, f"{document.name} is not JSON: {error}") from error
    if not isinstance(wanted, dict):
        raise CliError(Status.USAGE, f"{document.name} is not a JSON object")
    connect(url, token).put(PATH, wanted)
    output.note("the policy is replaced")
