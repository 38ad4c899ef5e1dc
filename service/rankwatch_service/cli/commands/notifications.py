"""`rankwatch silences` and `rankwatch receivers`: who is told, and what is muted."""

from __future__ import annotations

from typing import Annotated

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.durations import seconds
from rankwatch_service.cli.options import JSON, LIMIT, TOKEN, URL, connect

silences = typer.Typer(help="List silences, add one, or end one.", invoke_without_command=True)
receivers = typer.Typer(help="List webhook receivers, add one, or remove one.", invoke_without_command=True)


@silences.callback()
def list_silences(
    context: typer.Context, limit: LIMIT = 100, as_json: JSON = False, url: URL = None, token: TOKEN = None
) -> None:
    """List silences, add one, or end one."""
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
        "nothing is silenced",
    )


@silences.command("add")
def add_silence(
    comment: Annotated[str, typer.Option(help="Why; shown to everybody.")],
    lasting: Annotated[str, typer.Option("--for", help="How long: 90s, 30m, 2h, 1d.")] = "1h",
    job: Annotated[str, typer.Option(help="Only this job.")] = "",
    kind: Annotated[str, typer.Option(help="Only this incident kind.")] = "",
    scope: Annotated[str, typer.Option(help="Only this scope, for instance rank:3 or host:node-a.")] = "",
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Mute notifications that match. Incidents open all the same. Prints the silence's id."""
    from rankwatch_service.clock import SystemClock

    ends_unix_ns = SystemClock().unix_ns() + seconds(lasting) * 1_000_000_000
    body = {"job": job, "kind": kind, "scope": scope, "ends_unix_ns": ends_unix_ns, "comment": comment}
    print(connect(url, token).post("/api/v1/silences", body)["id"])


@silences.command("expire")
def expire_silence(
    silence: Annotated[str, typer.Argument(help="Its id.")], url: URL = None, token: TOKEN = None
) -> None:
    """End a silence now."""
    connect(url, token).delete(f"/api/v1/silences/{silence}")
    output.note(f"{silence} ended")


@receivers.callback()
def list_receivers(
    context: typer.Context, limit: LIMIT = 100, as_json: JSON = False, url: URL = None, token: TOKEN = None
) -> None:
    """List webhook receivers, add one, or remove one."""
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
            "enabled": lambda one: output.plain("yes" if one["enabled"] else f"no: {one['disabled_reason']}"),
        },
        "nobody is told: add a receiver with `rankwatch receivers add`",
    )


@receivers.command("add")
def add_receiver(
    name: Annotated[str, typer.Argument(help="What to call it.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The webhook's URL.")],
    kind: Annotated[list[str] | None, typer.Option(help="Only this incident kind; may be repeated.")] = None,
    severity: Annotated[
        list[str] | None, typer.Option(help="Only this severity; may be repeated. Default: critical and warning.")
    ] = None,
    job: Annotated[list[str] | None, typer.Option(help="Only this job; may be repeated.")] = None,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Tell a webhook about incidents. Prints the secret that its messages are signed with, this once."""
    body = {"name": name, "url": target, "kinds": kind or [], "jobs": job or []}
    if severity:
        body["severities"] = severity
    print(connect(url, token).post("/api/v1/receivers", body)["secret"])


@receivers.command("remove")
def remove_receiver(
    name: Annotated[str, typer.Argument(help="Its name.")], url: URL = None, token: TOKEN = None
) -> None:
    """Tell it nothing any more."""
    connect(url, token).delete(f"/api/v1/receivers/{name}")
    output.note(f"{name} removed")
