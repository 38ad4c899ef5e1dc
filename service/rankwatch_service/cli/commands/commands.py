"""`rankwatch commands`: commands to jobs, and their results."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.options import COMMAND, JOBS, JSON, LIMIT, TOKEN, URL, connect
from rankwatch_service.cli.views import show_traces

app = typer.Typer(help="List commands; approve, refuse or cancel one, or show a trace.", invoke_without_command=True)

COLUMNS: Final[output.Columns] = {
    "id": lambda one: output.short_id(one["id"]),
    "job": lambda one: output.plain(one["job"]),
    "action": lambda one: output.plain(one["action"]),
    "state": output.command_state,
    "step": lambda one: output.plain(one["applied_step"]),
    "by": lambda one: output.plain(one["requested_by"]),
    "approved by": lambda one: output.plain(one.get("approved_by")),
    "requested": lambda one: output.moment(one["requested_unix_ns"]),
    "reason": lambda one: output.plain(one["reason"]),
    "result": lambda one: output.plain(one["result"]),
}
WAITING: Final[output.Columns] = {
    "id": lambda one: output.short_id(one["id"]),
    "job": lambda one: output.plain(one["job"]),
    "action": lambda one: output.plain(one["action"]),
    "ranks": lambda one: output.plain(one["world_size"] or None),
    "by": lambda one: output.plain(one["requested_by"]),
    "expires": lambda one: output.moment(one["expires_unix_ns"]),
    "reason": lambda one: output.plain(one["reason"]),
}


@app.callback()
def list_commands(
    context: typer.Context,
    job: JOBS = None,
    waiting: Annotated[bool, typer.Option("--waiting", help="Only commands that wait for an approval.")] = False,
    limit: LIMIT = 50,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """List commands, newest first; approve, refuse or cancel one."""
    if context.invoked_subcommand is not None:
        return
    found = connect(url, token).items("/api/v1/commands", limit, job=job, waiting=waiting or None)
    if waiting:
        output.show(found, as_json, WAITING, "no command waits for an approval")
    else:
        output.show(found, as_json, COLUMNS, "no commands")


@app.command("trace")
def trace(command: COMMAND, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Show what the ranks recorded for a trace."""
    show_traces(connect(url, token).get(f"/api/v1/commands/{command}"), as_json)


@app.command("approve")
def approve(command: COMMAND, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Approve a command that waits for approval, unless you requested it."""
    found = connect(url, token).post(f"/api/v1/commands/{command}/approve", {})
    output.done(f"{output.short_id(found['id'])} is {found['state']}", found, as_json)


@app.command("refuse")
def refuse(
    command: COMMAND,
    reason: Annotated[str, typer.Option(help="Reason, shown to the requester and in the audit trail.")],
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Refuse a command that waits for approval, unless you requested it."""
    found = connect(url, token).post(f"/api/v1/commands/{command}/refuse", {"reason": reason})
    output.done(f"{output.short_id(found['id'])} is {found['state']}", found, as_json)


@app.command("cancel")
def cancel(command: COMMAND, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Cancel a command that has not been applied."""
    found = connect(url, token).post(f"/api/v1/commands/{command}/cancel", {})
    output.done(f"{output.short_id(found['id'])} is {found['state']}", found, as_json)
