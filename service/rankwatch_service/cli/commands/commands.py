"""`rankwatch commands`: commands to jobs, and their results."""

from __future__ import annotations

from typing import Annotated

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.options import JOBS, JSON, LIMIT, TOKEN, URL, connect

app = typer.Typer(help="List commands; approve or cancel one.", invoke_without_command=True)

COMMAND = Annotated[str, typer.Argument(help="Id of the command, or a prefix of it.")]


@app.callback()
def list_commands(
    context: typer.Context,
    job: JOBS = None,
    limit: LIMIT = 50,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """List commands, newest first; approve or cancel one."""
    if context.invoked_subcommand is not None:
        return
    output.show(
        connect(url, token).items("/api/v1/commands", limit, job=job),
        as_json,
        {
            "id": lambda one: output.short_id(one["id"]),
            "job": lambda one: output.plain(one["job"]),
            "action": lambda one: output.plain(one["action"]),
            "state": output.command_state,
            "step": lambda one: output.plain(one["applied_step"]),
            "by": lambda one: output.plain(one["requested_by"]),
            "requested": lambda one: output.moment(one["requested_unix_ns"]),
            "reason": lambda one: output.plain(one["reason"]),
            "result": lambda one: output.plain(one["result"]),
        },
        "no commands",
    )


@app.command("approve")
def approve(command: COMMAND, url: URL = None, token: TOKEN = None) -> None:
    """Approve a command that waits for approval."""
    found = connect(url, token).post(f"/api/v1/commands/{command}/approve", {})
    output.note(f"{command} is {found['state']}")


@app.command("cancel")
def cancel(command: COMMAND, url: URL = None, token: TOKEN = None) -> None:
    """Cancel a command that has not been applied."""
    found = connect(url, token).post(f"/api/v1/commands/{command}/cancel", {})
    output.note(f"{command} is {found['state']}")
