"""`rankwatch rules`: rules on metrics that jobs log, and what they would have found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.commands.replay import FILES, MAP, describe, played
from rankwatch_service.cli.configuration import read_rules
from rankwatch_service.cli.options import JOB, JSON, TOKEN, URL, connect

if TYPE_CHECKING:
    from rankwatch_service.incidents.model import Incident

app = typer.Typer(help="List rules on metrics that jobs log; try, apply or delete them.", invoke_without_command=True)
PATH: Final = "/api/v1/rules"

FILE_HELP: Final = "Rules in TOML: tables [\\[rule]], with name, metric, when, value, hold_s."
FILE = Annotated[Path, typer.Argument(metavar="FILE", help=FILE_HELP, readable=False)]


@app.callback()
def list_rules(context: typer.Context, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """List rules on metrics that jobs log; try, apply or delete them."""
    if context.invoked_subcommand is not None:
        return
    output.show(
        connect(url, token).get(PATH)["items"],
        as_json,
        {
            "name": lambda one: output.plain(one["name"]),
            "metric": lambda one: output.plain(one["metric"]),
            "when": lambda one: output.plain(_condition(one)),
            "hold": lambda one: output.plain(f"{one['hold_s']:g} s" if one["hold_s"] else ""),
            "severity": lambda one: output.severity(one["severity"]),
            "jobs": lambda one: output.plain(", ".join(one["jobs"]) or "all"),
            "by": lambda one: output.plain(one["updated_by"]),
        },
        "no rules",
    )


@app.command("apply")
def apply_rules(document: FILE, url: URL = None, token: TOKEN = None) -> None:
    """Make the rules of a file those of the service: rules that it lacks are deleted. Requires scope operate."""
    rules = read_rules(document)
    client = connect(url, token)
    before = {one["name"]: one for one in client.get(PATH)["items"]}
    wanted = {rule.name: rule.model_dump(mode="json") for rule in rules}
    client.put(PATH, {"rules": list(wanted.values())})
    same = {name for name, rule in wanted.items() if name in before and before[name] | rule == before[name]}
    counts = {
        "added": len(wanted.keys() - before.keys()),
        "changed": len(wanted.keys() & before.keys() - same),
        "deleted": len(before.keys() - wanted.keys()),
        "unchanged": len(same),
    }
    output.note(", ".join(f"{count} {what}" for what, count in counts.items()))


@app.command("delete")
def delete_rule(
    name: Annotated[str, typer.Argument(help="Name of the rule.")], url: URL = None, token: TOKEN = None
) -> None:
    """Delete a rule; incidents that it opened end. Requires scope operate."""
    connect(url, token).delete(f"{PATH}/{name}")
    output.note(f"{name} deleted")


@app.command("preview")
def preview_rules(
    document: FILE,
    job: JOB,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Show what each rule of a file would have found in a job's own past, as the service has stored it."""
    client = connect(url, token)
    for rule in read_rules(document):
        found = client.post(f"/api/v1/jobs/{quote(job, safe='')}/rules/preview", rule.model_dump(mode="json"))
        if as_json:
            print(json.dumps({"rule": rule.name, **found}))
            continue
        incidents = found["opens"]
        print(f"{rule.name}: {len(incidents)} incident{'s' * (len(incidents) != 1)} in {found['steps']:,} steps")
        for one in incidents:
            ended = "would be open still" if one["is_open"] else f"over in step {one['resolved_step']}"
            print(f"  step {one['detected_step']}: {one['summary']} {ended}")


def _condition(rule: dict[str, Any]) -> str:
    value = "" if rule["value"] is None else f" {rule['value']:g}"
    direction = "" if rule["direction"] == "both" else f" {rule['direction']}"
    return f"{rule['when']}{value}{direction}{' on each rank' if rule['each_rank'] else ''}"


@app.command("test")
def tried(document: FILE, files: FILES, mapping: MAP = None, as_json: JSON = False) -> None:
    """Replay recorded telemetry, offline: what each rule of a file would have found. As `rankwatch replay --rules`,
    but only incidents of rules are printed.
    """
    from rich.console import Console

    from rankwatch_detectors.base import Kind
    from rankwatch_detectors.catalogue import CatalogueConfig
    from rankwatch_service.replay.report import as_json as incident_as_json

    rules = read_rules(document)
    outcome = played(files, mapping, [CatalogueConfig()], "test", None, [rule.rule() for rule in rules])
    found: dict[str, list[Incident]] = {rule.name: [] for rule in rules}
    for incident in outcome.incidents[0]:
        if incident.kind is Kind.METRIC:
            found[incident.evidence["rule"]].append(incident)
    if as_json:
        for name, incidents in found.items():
            told: list[dict[str, Any]] = [incident_as_json(incident, outcome.named) for incident in incidents]
            print(json.dumps({"rule": name, "incidents": told}))
        return
    console = Console(highlight=False)
    for rule in rules:
        opened = found[rule.name]
        seen = "" if rule.metric in outcome.metrics else f" ({rule.metric} is not in the files)"
        console.print(f"{rule.name}: {len(opened)} incident{'s' * (len(opened) != 1)}{seen}", markup=False)
        for incident in opened:
            describe(console, incident, outcome)
