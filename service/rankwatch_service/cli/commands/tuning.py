"""`rankwatch tuning`: how readily detectors tell of something, by job, changed while jobs run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import JOB, JSON, LIMIT, TOKEN, URL, connect

app = typer.Typer(help="Show, set, reset and preview the settings of detectors by job.", no_args_is_help=True)

PATH = "/api/v1/tuning"

FILE = Annotated[
    typer.FileText,
    typer.Argument(metavar="FILE", help="Tunings as JSON, as `rankwatch tuning show` prints them; -: standard input."),
]


@app.command("show")
def show(url: URL = None, token: TOKEN = None) -> None:
    """Print the tunings in force as JSON, with their version."""
    found = connect(url, token).get(PATH)
    print(json.dumps({"version": found["version"], "tunings": found["tunings"]}, indent=2))


@app.command("set")
def set_tunings(document: FILE, url: URL = None, token: TOKEN = None) -> None:
    """Replace all tunings; running jobs have them at once, and learn nothing anew. Requires scope admin.

    With a version in FILE, it is refused if another one is in force.
    """
    found = connect(url, token).put(PATH, _read(document))
    output.note(f"version {found['version']} is in force")


@app.command("reset")
def reset(url: URL = None, token: TOKEN = None) -> None:
    """Remove all tunings: every setting has its default again. Requires scope admin."""
    found = connect(url, token).delete(PATH)
    output.note(f"version {found['version']} is in force: every setting has its default")


@app.command("settings")
def settings(as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """List the settings that a tuning may have, with their ranges and their values in the profiles."""
    found = connect(url, token).get(f"{PATH}/settings")["items"]
    columns = {
        "setting": lambda one: output.plain(one["name"]),
        "from": lambda one: output.plain(one["low"]),
        "to": lambda one: output.plain(one["high"]),
        "quiet": lambda one: output.plain(one["profiles"]["quiet"]),
        "standard": lambda one: output.plain(one["profiles"]["standard"]),
        "sensitive": lambda one: output.plain(one["profiles"]["sensitive"]),
        "unit": lambda one: output.plain(one["unit"]),
        "meaning": lambda one: output.plain(one["meaning"]),
    }
    output.show(found, as_json, columns, "there are no settings")


@app.command("versions")
def versions(limit: LIMIT = 100, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """List earlier and present tunings, newest first."""
    found = connect(url, token).items(f"{PATH}/versions", limit)
    columns = {
        "version": lambda one: output.plain(one["version"]),
        "set": lambda one: output.moment(one["at_unix_ns"]),
        "by": lambda one: output.plain(one["actor"]),
        "tunings": lambda one: output.plain(json.dumps(one["tunings"])),
    }
    output.show(found, as_json, columns, "nobody has set any tuning")


@app.command("preview")
def preview(
    job: JOB,
    document: FILE,
    from_step: Annotated[int | None, typer.Option(min=0, help="First step.")] = None,
    to_step: Annotated[int | None, typer.Option(min=0, help="Last step.")] = None,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Show what tunings would have told of a job's stored telemetry, in place of those in force. Changes nothing."""
    from rankwatch.client.connection import LONG_S

    steps = {name: step for name, step in (("from_step", from_step), ("to_step", to_step)) if step is not None}
    wanted = {"job": job, "tunings": _read(document).get("tunings", []), **steps}
    found = connect(url, token).post(f"{PATH}/preview", wanted, LONG_S)
    if as_json:
        output.print_json([found])
        return
    output.print_fields(
        [
            ("steps", output.plain(f"{found['first_step']} to {found['last_step']}, {found['rows']:,} rows")),
            ("incidents with both", output.plain(str(found["both"]))),
            ("cannot be previewed", output.plain(", ".join(found["not_previewed"]))),
        ]
    )
    for name in found["settings_not_previewed"]:
        output.note(f"{name} cannot be previewed")
    columns = {
        "with these tunings": lambda one: output.plain(one["change"]),
        "severity": lambda one: output.severity(one["severity"]),
        "kind": lambda one: output.plain(one["kind"]),
        "from step": lambda one: output.plain(one["onset_step"]),
        "ranks": lambda one: output.plain(one["ranks"]),
        "summary": lambda one: output.plain(one["summary"]),
    }
    changes = [
        {**one, "change": change}
        for change, name in (("opens", "opens"), ("does not open", "does_not_open"))
        for one in found[name]
    ]
    output.show(changes, False, columns, "the same incidents open")


def _read(document: typer.FileText) -> dict[str, Any]:
    """The object in a file of JSON.

    Raises:
        CliError: it is none.
    """
    try:
        wanted: Any = json.load(document)
    except ValueError as error:
        raise CliError(Status.USAGE, f"{document.name} is not JSON: {error}") from error
    if not isinstance(wanted, dict):
        raise CliError(Status.USAGE, f"{document.name} is not a JSON object")
    return wanted
