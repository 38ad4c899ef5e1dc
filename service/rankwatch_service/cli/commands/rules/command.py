"""`rankwatch rules`: rules on metrics that jobs log, and what they would have found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rankwatch_service.cli.commands.replay import FILES, MAP, describe, played
from rankwatch_service.cli.options import JSON
from rankwatch_service.cli.rule_files import read_rules

if TYPE_CHECKING:
    from rankwatch_service.incidents.model import Incident

app = typer.Typer(help="List, apply, delete and test rules on metrics that jobs log.")

FILE_HELP: Final = "Rules in TOML: tables [[rule]]."
FILE = Annotated[Path, typer.Argument(metavar="FILE", help=FILE_HELP, readable=False)]


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
            describe(console, incident, outcome.named)
