"""`rankwatch incidents`: list, watch, show, acknowledge, resolve, comment on incidents, or judge them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from rankwatch_service.cli import output
from rankwatch_service.cli.client import job_path
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.job_view import can_obey
from rankwatch_service.cli.options import (
    INCIDENT,
    JOBS,
    JSON,
    KINDS,
    LIMIT,
    PROJECTS,
    SEVERITIES,
    TOKEN,
    URL,
    connect,
    offer,
)
from rankwatch_service.cli.views import evidence_rows, show_explanations
from rankwatch_service.incidents.lost_time import HOUR_NS, cost_unit

if TYPE_CHECKING:
    from rankwatch_service.cli.client import CliClient

PATH: Final = "/api/v1/incidents"
RETRY_S: Final = 2.0
"""Pause before a connection that broke is opened again."""

LIST_EVERY_S: Final = 0.5
"""Shortest time between two readings of the list, however many incidents change."""

PLACES_NAMED: Final = 12

Wanted = Mapping[str, Sequence[str] | None]


def watch(client: CliClient, wanted: Wanted, columns: output.Columns, limit: int, *, as_json: bool) -> None:
    """Show unresolved incidents and their changes, until Ctrl-C.

    Args:
        client: of the service.
        wanted: jobs, kinds and severities to show; None for all.
        columns: of the list.
        limit: most incidents of the list.
        as_json: a line of JSON for each change, also at a terminal.

    Raises:
        CliError: the service refuses. While it is unreachable, a note is printed.
    """
    client.require_jobs(wanted.get("job"))
    try:
        if sys.stdout.isatty() and not as_json:
            _keep_list(client, wanted, columns, limit)
        else:
            _print_changes(client, wanted, as_json)
    except KeyboardInterrupt:
        output.note("ended")


def _keep_list(client: CliClient, wanted: Wanted, columns: output.Columns, limit: int) -> None:
    with Live(auto_refresh=False) as live:
        for topic, _ in _changes(client, on_break=lambda why: live.update(Text(why), refresh=True)):
            if topic in ("hello", "reset", "incident"):
                found = client.get(PATH, state="unresolved", limit=limit, **wanted)["items"]
                live.update(Group(_totals(client), _table(found, columns)), refresh=True)
                time.sleep(LIST_EVERY_S)


def _print_changes(client: CliClient, wanted: Wanted, as_json: bool) -> None:
    for topic, change in _changes(client, on_break=output.note):
        if topic != "incident":
            continue
        one = client.get(f"{PATH}/{change['id']}")
        if any(values and one[name] not in values for name, values in wanted.items()):
            continue
        if as_json:
            output.print_json([{"what": change["what"], "at_unix_ns": change["at_unix_ns"], "incident": one}])
        else:
            at = output.moment(change["at_unix_ns"])
            said = output.plain(f"{one['job']}: {one['summary']}")
            print(at, change["what"], change["severity"], output.short_id(one["id"]), said)
        sys.stdout.flush()


def _changes(client: CliClient, on_break: Callable[[str], None]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Topic and data of each change; after a connection that broke those that were missed follow.

    An outage is printed once, with its first reason, and so is its end.
    """
    after: int | None = None
    away = False
    while True:
        try:
            for topic, at, data in client.events(after):
                if away:
                    on_break("the service answers again")
                after, away = at, False
                yield topic, data
        except CliError as error:
            if error.status != Status.UNREACHABLE or after is None:
                raise
            if not away:
                on_break(f"{error}; trying again")
            away = True
        time.sleep(RETRY_S)


def _totals(client: CliClient) -> Text:
    totals = client.get(f"{PATH}/totals")
    count = {name: totals["open"][name] + totals["acknowledged"][name] for name in ("critical", "warning", "info")}
    lost = f"{totals['impact_gpu_hours_per_hour']:.3g} {cost_unit(totals['accelerated'])} lost per hour"
    said = " · ".join([*(f"{number} {name}" for name, number in count.items()), lost])
    return Text(said, style="bold")


def _table(found: Sequence[dict[str, Any]], columns: output.Columns) -> Any:
    rows = ([cell(one) for cell in columns.values()] for one in found)
    return output.new_table(columns, rows) if found else Text("no unresolved incidents", style="dim")


COLUMNS: Final[output.Columns] = {
    "id": lambda one: output.short_id(one["id"]),
    "severity": lambda one: output.severity(one["severity"]),
    "state": output.incident_state,
    "job": lambda one: output.plain(one["job"]),
    "since": lambda one: output.clock(one["onset_unix_ns"]),
    "summary": lambda one: output.plain(one["summary"]),
}

app = typer.Typer(
    help="List or watch incidents; show, acknowledge, resolve, comment on or give feedback on one.",
    invoke_without_command=True,
)


@app.callback()
def list_incidents(
    context: typer.Context,
    job: JOBS = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            help="open, acknowledged, resolved or unresolved; may be repeated. Default: all, unresolved ones first.",
            autocompletion=offer("open", "acknowledged", "resolved", "unresolved"),
        ),
    ] = None,
    kind: KINDS = None,
    severity: SEVERITIES = None,
    project: PROJECTS = None,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if any is listed.")] = False,
    limit: LIMIT = 100,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """List incidents, unresolved ones first, then newest first; watch, show, acknowledge or resolve one."""
    if context.invoked_subcommand is not None:
        return
    client = connect(url, token)
    wanted: dict[str, Any] = {"job": job, "kind": kind, "severity": severity, "project": project}
    found = list(client.items(PATH, limit, **wanted, state=state or ["unresolved"]))
    if not state and len(found) < limit:
        found += client.items(PATH, limit - len(found), len(found), **wanted, state=["resolved"])
    output.show(found, as_json, COLUMNS, "no incidents")
    if exit_code and found:
        raise typer.Exit(Status.FINDINGS)


@app.command("watch")
def watch_incidents(
    job: JOBS = None,
    kind: KINDS = None,
    severity: SEVERITIES = None,
    limit: LIMIT = 20,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Show unresolved incidents, and each change of one as it happens, until Ctrl-C.

    At a terminal the list is kept up to date; elsewhere, and with --json, each change is a line.
    """
    watch(connect(url, token), {"job": job, "kind": kind, "severity": severity}, COLUMNS, limit, as_json=as_json)


@app.command("show")
def show_incident(
    incident: INCIDENT,
    why: Annotated[bool, typer.Option("--why", help="Also why it was opened, and why not earlier.")] = False,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Show one incident: summary, location, evidence, and what to do."""
    client = connect(url, token)
    found = client.get(_path(incident))
    reasons = client.get(f"{_path(incident)}/why")["items"] if why else []
    if why:
        found["why"] = reasons
    receivers = client.get(f"{_path(incident)}/receivers")["items"]
    found["receivers"] = receivers
    if as_json:
        output.print_json([found])
        return
    notified = [_receiver(one) for one in receivers]
    output.print_fields(
        [
            ("incident", _headline(found)),
            *_to_do(found["first_steps"]),
            ("job", output.plain(f"{found['job']}, attempt {found['attempt']}")),
            ("where", output.plain(_where(found))),
            ("since", output.plain(_since(found))),
            ("impact", output.plain(found["impact"])),
            ("cost", output.plain(_cost(found))),
            ("likely cause", output.plain(found["cause_words"])),
            ("changed", output.plain(found["changed"])),
            ("confidence", output.plain(found["confidence_words"])),
            *(("consequence", output.plain(one["summary"])) for one in found["consequences"]),
            ("can obey", output.plain(can_obey(client.get(job_path(found["job"]))))),
            ("checkpoint", output.plain(found["checkpoint"])),
            *(notified or [("notified", output.plain("nobody: no receiver is set up (`rankwatch receivers add`)"))]),
            ("feedback", output.plain([f"{one['answer']} ({one['name']})" for one in found["feedback"]])),
            ("normal", output.plain(found["normal"])),
            ("kind", output.plain(f"{found['kind']} (docs/incidents/{found['kind']}.md)")),
        ]
    )
    print("\nmeasured")
    output.print_fields(evidence_rows(found["evidence"]))
    if why:
        print()
        show_explanations(reasons)


@app.command("ack")
def acknowledge(incident: INCIDENT, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Acknowledge an incident: you work on it, also if somebody else had acknowledged it before."""
    _act(incident, "acknowledge", {}, as_json, url, token)


@app.command("unack")
def unacknowledge(incident: INCIDENT, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Withdraw an acknowledgement: nobody works on the incident."""
    _act(incident, "unacknowledge", {}, as_json, url, token)


@app.command("resolve")
def resolve(
    incident: INCIDENT,
    reason: Annotated[str, typer.Option(help="Why it is resolved.")],
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Resolve an incident. If the fault continues, its present level is accepted as normal."""
    _act(incident, "resolve", {"text": reason}, as_json, url, token)


@app.command("comment")
def comment(
    incident: INCIDENT,
    text: Annotated[str, typer.Argument(help="Text of the comment.")],
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Add a comment to the history of an incident."""
    _act(incident, "comment", {"text": text}, as_json, url, token)


@app.command("feedback")
def feedback(
    incident: INCIDENT,
    answer: Annotated[
        str,
        typer.Argument(
            metavar="useful|noise|duplicate|none",
            help="none: withdraw your answer.",
            autocompletion=offer("useful", "noise", "duplicate", "none"),
        ),
    ],
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Rate an incident as useful, noise, or a duplicate of another one."""
    path = f"{_path(incident)}/feedback"
    if answer == "none":
        connect(url, token).delete(path)
        output.done(f"{incident}: your answer is withdrawn", {"incident": incident, "answer": None}, as_json)
    else:
        connect(url, token).put(path, {"answer": answer})
        output.done(f"{incident}: {answer}", {"incident": incident, "answer": answer}, as_json)


def _act(incident: str, action: str, body: dict[str, str], as_json: bool, url: str | None, token: str | None) -> None:
    found = connect(url, token).post(f"{_path(incident)}/{action}", body)
    output.done(f"{incident} is {found.get('state', 'updated')}", found, as_json)


def _path(incident: str) -> str:
    return f"/api/v1/incidents/{quote(incident, safe='')}"


def _receiver(reason: dict[str, Any]) -> tuple[str, Text]:
    """Why a receiver was notified of a transition, or why not."""
    which = "" if reason["transition"] is None else f" (change {reason['transition']})"
    return (f"  to {reason['receiver'] or '(nobody)'}{which}", output.plain(reason["why"]))


def _headline(incident: dict[str, Any]) -> Text:
    """Severity, state and sentence."""
    by = f" by {incident['acknowledged_by']}" if incident["acknowledged_by"] else ""
    text = output.severity(incident["severity"])
    state = f", {output.incident_state(incident).plain}{output.plain(by).plain if by else ''}: "
    return text.append(f"{state}{output.plain(incident['summary']).plain}", style="default")


def _to_do(steps: Sequence[str]) -> list[tuple[str, Text]]:
    """Rows of the first steps."""
    return [("next" if number else "do this first", output.plain(step)) for number, step in enumerate(steps)]


def _where(incident: dict[str, Any]) -> str:
    """Ranks and hosts, the first of many."""
    from rankwatch_detectors.words import listed

    ranks, hosts = (listed(incident[name], PLACES_NAMED) if incident[name] else "" for name in ("ranks", "hosts"))
    said = f"{'ranks' if len(incident['ranks']) > 1 else 'rank'} {ranks}" if ranks else ""
    return f"{said} on {hosts}" if said and hosts else said or hosts


def _since(incident: dict[str, Any]) -> str:
    """When it began and was found, and by which step."""
    onset, detected = incident["onset_step"], incident["detected_step"]
    found = f", found in step {detected}" if detected not in (None, onset) else ""
    step = "" if onset is None else f", step {onset}"
    lasts = "" if incident["resolved_unix_ns"] else f" ({output.age(incident['onset_unix_ns'])} ago)"
    return f"{output.moment(incident['onset_unix_ns']).plain}{lasts}{step}{found}"


def _cost(incident: dict[str, Any]) -> str:
    """What it costs while it lasts; of one that is over, what it has cost."""
    from rankwatch_service.policy.what_now import hours

    rate, until_unix_ns = incident["impact_gpu_hours_per_hour"], incident["resolved_unix_ns"]
    if rate <= 0:
        return ""
    if until_unix_ns is None:
        return f"{hours(rate, incident['accelerated'])} every hour"
    whole = rate * max(until_unix_ns - incident["onset_unix_ns"], 0) / HOUR_NS
    return f"{hours(whole, incident['accelerated'])} in all"
