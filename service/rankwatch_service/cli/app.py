"""All commands, in the order of the help. Heavy modules are imported only when a command runs."""

from __future__ import annotations

from importlib.metadata import version as version_of
from typing import Annotated, Final

import typer

from rankwatch_service.cli.commands import (
    access,
    commands,
    database,
    directives,
    incidents,
    jobs,
    notifications,
    policy,
    replay,
    roles,
    simulate,
)
from rankwatch_service.cli.commands.doctor import doctor, health

app: Final = typer.Typer(
    name="rankwatch",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Watches every rank of a distributed training job, names the one that fails, and recovers the training.",
    epilog="Start with [bold]rankwatch demo[/bold] or [bold]rankwatch up[/bold].",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rankwatch {version_of('rankwatch')}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of the command line itself."""


RUN: Final = "Run"
WATCH: Final = "Inspect"
STEER: Final = "Control"
KEEP: Final = "Administer"

app.command("up", rich_help_panel=RUN)(roles.up)
app.command("demo", rich_help_panel=RUN)(roles.demo)
app.command("simulate", rich_help_panel=RUN)(simulate.simulate)
app.command("api", rich_help_panel=RUN)(roles.api)
app.command("stream", rich_help_panel=RUN)(roles.stream)
app.command("notify", rich_help_panel=RUN)(roles.notify)
app.command("run", rich_help_panel=RUN)(roles.run)
app.command("follow", rich_help_panel=RUN)(roles.follow)
app.command("agent", rich_help_panel=RUN)(roles.agent)

app.command("health", rich_help_panel=WATCH)(health)
app.add_typer(jobs.app, name="jobs", rich_help_panel=WATCH)
app.add_typer(incidents.app, name="incidents", rich_help_panel=WATCH)
app.command("alerts", rich_help_panel=WATCH)(notifications.alerts)
app.command("precision", rich_help_panel=WATCH)(policy.precision)
app.command("checkpoints", rich_help_panel=WATCH)(jobs.checkpoints)
app.command("replay", rich_help_panel=WATCH)(replay.replay)

directives.add_to(app, STEER)
app.add_typer(commands.app, name="commands", rich_help_panel=STEER)

app.add_typer(policy.policy, name="policy", rich_help_panel=KEEP)
app.add_typer(policy.rules, name="rules", rich_help_panel=KEEP)
app.add_typer(policy.tuning, name="tuning", rich_help_panel=KEEP)
app.add_typer(notifications.silences, name="silences", rich_help_panel=KEEP)
app.add_typer(notifications.receivers, name="receivers", rich_help_panel=KEEP)
app.add_typer(notifications.notifications, name="notifications", rich_help_panel=KEEP)
app.command("login", rich_help_panel=KEEP)(access.login)
app.add_typer(access.token, name="token", rich_help_panel=KEEP)
app.add_typer(database.app, name="db", rich_help_panel=KEEP)
app.command("doctor", rich_help_panel=KEEP)(doctor)
