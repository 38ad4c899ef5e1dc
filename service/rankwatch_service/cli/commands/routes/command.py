"""`rankwatch routes`: checks a file of routes, and tells whom an incident would go to. Offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import JSON

if TYPE_CHECKING:
    from rankwatch_service.routing.route import Routing

app = typer.Typer(help="Check and try a file of routes, offline.", no_args_is_help=True)

FILE = Annotated[Path, typer.Argument(metavar="FILE", help="Routes in TOML.", readable=False)]


@app.command("check")
def check(document: FILE) -> None:
    """Check a file of routes; the exit status is 2 if something is wrong with it."""
    routing = _read(document)
    receivers = ", ".join(sorted(routing.receivers())) or "nobody"
    output.note(f"{document}: {len(list(routing.root.walk()))} routes to {receivers}")


@app.command("test")
def tried(
    document: FILE,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A label of the incident; may be repeated.")
    ] = None,
    as_json: JSON = False,
) -> None:
    """Tell whom an incident with these labels would go to, in which group, by which route and when."""
    labels = dict(map(_label, label or ()))
    found = [
        {
            "receiver": route.receiver,
            "group": route.group_key(labels),
            "route": route.key,
            "group_wait_s": route.group_wait_s,
            "group_interval_s": route.group_interval_s,
            "repeat_interval_s": route.repeat_interval_s,
            "escalations": [{"after_s": one.after_s, "receiver": one.receiver} for one in route.escalations],
            "mute_time_intervals": list(route.mute_time_intervals),
            "active_time_intervals": list(route.active_time_intervals),
        }
        for route in _read(document).root.matching(labels)
    ]
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
