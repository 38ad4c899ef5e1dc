"""`rankwatch silences`, `receivers`, `notifications` and `alerts`: what is muted, who is notified, what became of it,
and what a Prometheus has sent that no incident has.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.configuration import seconds
from rankwatch_service.cli.errors import Status
from rankwatch_service.cli.options import JSON, LIMIT, PROJECTS, RECEIVER, TOKEN, URL, connect, offer_silences
from rankwatch_service.notify.receiver_types.base import ReceiverType

TRIED_S: Final = 30.0
"""How long to wait for the reply about a notification that was sent by hand: the service waits 20 s for the try."""

silences = typer.Typer(help="List silences; add or end one.", invoke_without_command=True)
receivers = typer.Typer(help="List receivers of notifications; add, try or remove one.", invoke_without_command=True)
notifications = typer.Typer(help="List notifications; send one again.", invoke_without_command=True)


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
            "matchers": lambda one: output.plain(", ".join(one.get("matchers", ()))),
            "until": lambda one: output.moment(one["ends_unix_ns"]),
            "by": lambda one: output.plain(one["created_by"]),
            "comment": lambda one: output.plain(one["comment"]),
        },
        "no silences",
    )


@silences.command("add")
def add_silence(
    comment: Annotated[str, typer.Option(help="Reason, shown to everybody.")],
    matcher: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MATCHER]...", help='On labels, such as host=node-a or severity!="critical".'),
    ] = None,
    lasting: Annotated[str, typer.Option("--for", help="Duration, such as 90s, 30m, 2h or 1d.")] = "1h",
    job: Annotated[str, typer.Option(help="Only this job.")] = "",
    kind: Annotated[str, typer.Option(help="Only this incident kind.")] = "",
    scope: Annotated[str, typer.Option(help="Only this scope, such as rank:3 or host:node-a.")] = "",
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Mute notifications that match everything given. Incidents still open. Prints the id of the silence."""
    from rankwatch_service.clock import SystemClock

    ends_unix_ns = SystemClock().unix_ns() + seconds(lasting) * 1_000_000_000
    body: dict[str, Any] = {"job": job, "kind": kind, "scope": scope, "comment": comment}
    body |= {"matchers": matcher or [], "ends_unix_ns": ends_unix_ns}
    silence = connect(url, token).post("/api/v1/silences", body)
    if as_json:
        output.print_json([silence])
    else:
        print(output.short_id(silence["id"]))


@silences.command("expire")
def expire_silence(
    silence: Annotated[
        str, typer.Argument(help="Id of the silence, or a prefix of it.", autocompletion=offer_silences)
    ],
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """End a silence now."""
    connect(url, token).delete(f"/api/v1/silences/{silence}")
    output.done(f"{silence} ended", {"silence": silence, "ended": True}, as_json)


@receivers.callback()
def list_receivers(
    context: typer.Context, limit: LIMIT = 100, as_json: JSON = False, url: URL = None, token: TOKEN = None
) -> None:
    """List receivers of notifications; add, try or remove one."""
    if context.invoked_subcommand is not None:
        return
    output.show(
        connect(url, token).items("/api/v1/receivers", limit),
        as_json,
        {
            "name": lambda one: output.plain(one["name"]),
            "type": lambda one: output.plain(one.get("type", "webhook")),
            "url": lambda one: output.plain(one["url"]),
            "kinds": lambda one: output.plain(one["kinds"] or "all"),
            "severities": lambda one: output.plain(one["severities"] or "all"),
            "jobs": lambda one: output.plain(one["jobs"] or "all"),
            "projects": lambda one: output.plain(one["projects"] or "all"),
            "matchers": lambda one: output.plain(", ".join(one["matchers"])),
            "after": lambda one: output.plain(f"{one['after_s']} s" if one["after_s"] else ""),
            "enabled": lambda one: output.plain("yes" if one["enabled"] else f"no: {one['disabled_reason']}"),
        },
        "no receivers, so nobody is notified; add one with `rankwatch receivers add`",
    )


@receivers.command("add")
def add_receiver(
    name: Annotated[str, typer.Argument(help="Name of the receiver.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="URL, or mailto:ADDRESS for e-mail.")],
    receiver_type: Annotated[
        str | None,
        typer.Option("--type", help=f"One of {', '.join(ReceiverType)}. Default: webhook, or email for mailto:."),
    ] = None,
    secret_file: Annotated[
        typer.FileText | None,
        typer.Option(
            help="File with the integration key of PagerDuty or the token of a Slack bot; - is standard input."
        ),
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Only this incident kind; may be repeated.")] = None,
    severity: Annotated[
        list[str] | None, typer.Option(help="Only this severity; may be repeated. Default: critical and warning.")
    ] = None,
    job: Annotated[list[str] | None, typer.Option(help="Only this job; may be repeated.")] = None,
    project: PROJECTS = None,
    match: Annotated[
        list[str] | None, typer.Option(help="Only these labels, such as host=node-a; may be repeated.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(help="Only if nobody has acknowledged the incident by then, such as 15m.")
    ] = None,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Send notifications about incidents to a receiver.

    Prints the secret that signs the messages to a webhook; it cannot be shown again.
    """
    body: dict[str, Any] = {"name": name, "url": target, "kinds": kind or [], "jobs": job or []}
    body |= {"projects": project or [], "matchers": match or [], "after_s": seconds(after) if after else 0}
    if severity:
        body["severities"] = severity
    if chosen := receiver_type or ("email" if target.startswith("mailto:") else None):
        body["type"] = chosen
    if secret_file:
        body["secret"] = secret_file.read().strip()
    added = connect(url, token).post("/api/v1/receivers", body)
    if added["secret"] and not as_json:
        print(added["secret"])
    output.done(f"{name} added; `rankwatch receivers test {name}` sends a message to try it", added, as_json)


@receivers.command("test")
def try_receiver(name: RECEIVER, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Send a test message to a receiver, and print the outcome. Exits with 1 if it did not arrive."""
    _report(connect(url, token).post(f"/api/v1/receivers/{name}/test", timeout_s=TRIED_S), name, as_json)


@notifications.callback()
def list_notifications(
    context: typer.Context,
    state: Annotated[
        list[str] | None, typer.Option(help="waiting, delivered, failed, silenced, held or unneeded; may be repeated.")
    ] = None,
    receiver: Annotated[list[str] | None, typer.Option(help="Only to this receiver; may be repeated.")] = None,
    limit: LIMIT = 100,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """List notifications, newest first; send one again."""
    if context.invoked_subcommand is not None:
        return
    output.show(
        connect(url, token).items("/api/v1/notifications", limit, state=state, receiver=receiver),
        as_json,
        {
            "id": lambda one: output.plain(one["id"]),
            "receiver": lambda one: output.plain(one["receiver"]),
            "incident": lambda one: output.plain(one["incident_id"] and output.short_id(one["incident_id"])),
            "created": lambda one: output.moment(one["created_unix_ns"]),
            "state": lambda one: output.plain(one["state"]),
            "tries": lambda one: output.plain(one["tries"]),
            "error": lambda one: output.plain(one["error"]),
        },
        "no notifications",
    )


@notifications.command("resend")
def resend(
    notification: Annotated[str, typer.Argument(help="Id of the notification.")],
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Send a failed notification again. Exits with 1 if it did not arrive."""
    found = connect(url, token).post(f"/api/v1/notifications/{notification}/resend", timeout_s=TRIED_S)
    _report(found, found["receiver"], as_json)


def _report(found: dict[str, Any], receiver: str, as_json: bool) -> None:
    """Print the outcome of a notification that a person sends.

    Raises:
        typer.Exit: it has not arrived.
    """
    if found["state"] == "delivered":
        output.done(f"{receiver} has it", found, as_json)
        return
    what = "it will be tried again" if found["state"] == "waiting" else "it is given up"
    error = found["error"] or "no try has ended yet; does the role notify run?"
    output.done(f"{receiver} does not have it: {error}; {what}", found, as_json)
    raise typer.Exit(Status.FINDINGS)


@receivers.command("remove")
def remove_receiver(name: RECEIVER, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Remove a receiver. Its undelivered notifications are discarded."""
    connect(url, token).delete(f"/api/v1/receivers/{name}")
    output.done(f"{name} removed", {"receiver": name, "removed": True}, as_json)


def alerts(limit: LIMIT = 100, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """List the alerts of a Prometheus that belong to no incident, newest first, with the reason."""
    output.show(
        connect(url, token).items("/api/v1/alerts/waiting", limit),
        as_json,
        {
            "alert": lambda one: output.plain(one["name"]),
            "severity": lambda one: output.plain(one["severity"]),
            "since": lambda one: output.moment(one["starts_unix_ns"]),
            "why it waits": lambda one: output.plain(one["why"]),
            "labels": lambda one: output.plain(
                ", ".join(f"{name}={value}" for name, value in one["labels"].items() if name != "alertname")
            ),
        },
        "no alert waits: every firing one belongs to an incident",
    )
