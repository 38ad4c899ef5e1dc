"""`rankwatch silences` and `rankwatch receivers`: who is notified, and what is muted."""

from __future__ import annotations

from typing import Annotated

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.durations import seconds
from rankwatch_service.cli.options import JSON, LIMIT, PROJECTS, TOKEN, URL, connect

silences = typer.Typer(help="List silences; add or end one.", invoke_without_command=True)
receivers = typer.Typer(help="List receivers of notifications; add or remove one.", invoke_without_command=True)


@silences.callback()
def list_silences(
    context: typer.Context, limit: LIMIT = 100, as_json: JSON = False, url: URL = None, token: TOKEN = None
) -> None:
    """List silences; add or end one."""
    if context.invoked_subcommand is not None:
        return
    output.show(
        connect(url, token).items("/api/v1/silences", limit),
        as_json,
        {
            "id": lambda one: output.short_id(one["id"]),
            "job": lambda one: output.plain(one["job"]),
            "kind": lambda one: output.plain(one["kind"]),
            "scope": lambda one: output.plain(one["scope"]),
            "until": lambda one: output.moment(one["ends_unix_ns"]),
            "by": lambda one: output.plain(one["created_by"]),
            "comment": lambda one: output.plain(one["comment"]),
        },
        "no silences",
    )


@silences.command("add")
def add_silence(
    comment: Annotated[str, typer.Option(help="Reason, shown to everybody.")],
    lasting: Annotated[str, typer.Option("--for", help="Duration, such as 90s, 30m, 2h or 1d.")] = "1h",
    job: Annotated[str, typer.Option(help="Only this job.")] = "",
    kind: Annotated[str, typer.Option(help="Only this incident kind.")] = "",
    scope: Annotated[str, typer.Option(help="Only this scope, such as rank:3 or host:node-a.")] = "",
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Mute matching notifications. Incidents still open. Prints the id of the silence."""
    from rankwatch_service.clock import SystemClock

    ends_unix_ns = SystemClock().unix_ns() + seconds(lasting) * 1_000_000_000
    body = {"job": job, "kind": kind, "scope": scope, "ends_unix_ns": ends_unix_ns, "comment": comment}
    print(output.short_id(connect(url, token).post("/api/v1/silences", body)["id"]))


@silences.command("expire")
def expire_silence(
    silence: Annotated[str, typer.Argument(help="Id of the silence, or a prefix of it.")],
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """End a silence now."""
    connect(url, token).delete(f"/api/v1/silences/{silence}")
    output.note(f"{silence} ended")


@receivers.callback()
def list_receivers(
    context: typer.Context, limit: LIMIT = 100, as_json: JSON = False, url: URL = None, token: TOKEN = None
) -> None:
    """List receivers of notifications; add or remove one."""
    if context.invoked_subcommand is not None:
        return
    output.show(
        connect(url, token).items("/api/v1/receivers", limit),
        as_json,
        {
            "name": lambda one: output.plain(one["name"]),
            "url": lambda one: output.plain(one["url"]),
            "kinds": lambda one: output.plain(one["kinds"] or "all"),
            "severities": lambda one: output.plain(one["severities"] or "all"),
            "jobs": lambda one: output.plain(one["jobs"] or "all"),
            "projects": lambda one: output.plain(one["projects"] or "all"),
            "enabled": lambda one: output.plain("yes" if one["enabled"] else f"no: {one['disabled_reason']}"),
        },
        "no receivers, so nobody is notified; add one with `rankwatch receivers add`",
    )


@receivers.command("add")
def add_receiver(
    name: Annotated[str, typer.Argument(help="Name of the receiver.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="URL of the webhook.")],
    kind: Annotated[list[str] | None, typer.Option(help="Only this incident kind; may be repeated.")] = None,
    severity: Annotated[
        list[str] | None, typer.Option(help="Only this severity; may be repeated. Default: critical and warning.")
    ] = None,
    job: Annotated[list[str] | None, typer.Option(help="Only this job; may be repeated.")] = None,
    project: PROJECTS = None,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Send notifications about incidents to a webhook. Prints the secret that signs them; it cannot be shown again."""
    body = {"name": name, "url": target, "kinds": kind or [], "jobs": job or [], "projects": project or []}
    if severity:
        body["severities"] = severity
    print(connect(url, token).post("/api/v1/receivers", body)["secret"])


@receivers.command("remove")
def remove_receiver(
    name: Annotated[str, typer.Argument(help="Name of the receiver.")], url: URL = None, token: TOKEN = None
) -> None:
    """Remove a receiver. Its undelivered notifications are given up."""
    connect(url, token).delete(f"/api/v1/receivers/{name}")
    output.note(f"{name} removed")
