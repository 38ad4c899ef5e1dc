"""`rankwatch routes`: checks a file of routes, tells whom an incident would go to, and puts routes in force."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import JSON, TOKEN, URL, connect

if TYPE_CHECKING:
    from rankwatch_service.routing.route import Routing

app = typer.Typer(help="Check and try a file of routes, offline; show and apply routes.", no_args_is_help=True)

RECEIVERS_MAX: Final = 10_000
"""Receivers of the service that are compared with those of a file."""
FILE = Annotated[Path, typer.Argument(metavar="FILE", help="Routes in TOML.", readable=False)]


@app.command("check")
def check(
    document: FILE,
    receivers: Annotated[
        bool, typer.Option("--receivers", help="Also ask the service whether it has the receivers.")
    ] = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Check a file of routes; the exit status is 2 if something is wrong with it."""
    routing = _read(document)
    named = routing.receivers()
    if receivers:
        known = {one["name"] for one in connect(url, token).items("/api/v1/receivers", RECEIVERS_MAX)}
        if unknown := sorted(named - known):
            raise CliError(Status.USAGE, f"{document}: the service has no receiver {', '.join(map(repr, unknown))}")
    count = len(list(routing.root.walk()))
    output.note(f"{document}: {count} route{'s' if count > 1 else ''} to {', '.join(sorted(named)) or 'nobody'}")
    if named and not receivers:
        output.note("whether the service has these receivers was not checked; --receivers asks it")


@app.command("test")
def tried(
    document: FILE,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A label of the incident; may be repeated.")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Tell whom an incident with these labels would go to, in which group, by which route and when."""
    from rankwatch_service.routing.route_trial import tried_routes

    labels = dict(map(_label, label or ()))
    found = tried_routes(_read(document), labels)
    output.show(
        found,
        as_json,
        {
            "receiver": lambda one: output.plain(one["receiver"] or "(nobody)"),
            "group": lambda one: output.plain(one["group"]),
            "wait": lambda one: output.plain(f"{one['group_wait_s']:g} s"),
            "interval": lambda one: output.plain(f"{one['group_interval_s']:g} s"),
            "repeat": lambda one: output.plain(f"{one['repeat_interval_s']:g} s"),
            "escalates to": lambda one: output.plain(
                ", ".join(f"{step['receiver']} after {step['after_s']:g} s" for step in one["escalations"])
            ),
            "muted in": lambda one: output.plain(", ".join(one["mute_time_intervals"])),
            "active in": lambda one: output.plain(", ".join(one["active_time_intervals"])),
        },
        "no route",
    )


@app.command("show")
def show(url: URL = None, token: TOKEN = None) -> None:
    """Print the routes in force, as TOML; nothing if there are none."""
    found = connect(url, token).get("/api/v1/routes")
    print(found["text"], end="")
    if found["error"]:
        output.note(f"newer routes are not in force: {found['error']}")


@app.command("apply")
def apply(document: FILE, url: URL = None, token: TOKEN = None) -> None:
    """Replace the routes of the service by those of a file; an empty one removes them."""
    try:
        text = document.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CliError(Status.USAGE, f"{document}: {error}") from error
    connect(url, token).put("/api/v1/routes", {"text": text})
    output.note("the routes are in force within 5 s")


def _label(text: str) -> tuple[str, str]:
    from rankwatch_service.labels.incident_labels import LABEL_NAMES

    name, equals, value = text.partition("=")
    if not equals:
        raise CliError(Status.USAGE, f"{text!r} is not a label such as kind=hang")
    if name not in LABEL_NAMES:
        raise CliError(Status.USAGE, f"incidents have no label {name!r}; they have {', '.join(LABEL_NAMES)}")
    return name, value


def _read(path: Path) -> Routing:
    from rankwatch_service.routing.written_routes import read_routes

    try:
        return read_routes(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CliError(Status.USAGE, f"{path}: {error}") from error
