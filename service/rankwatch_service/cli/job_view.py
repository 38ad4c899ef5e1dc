"""A job as `rankwatch jobs show` prints it for people."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.text import Text

from rankwatch_service.cli import output

STANDS: Final[Mapping[str, str]] = {
    "stalled": "no rank has made progress for {age}",
    "paused": "its ranks hold, until `rankwatch resume {name}`",
    "lost": "its agents do not report any more, so it is not known whether it trains",
}
"""States without progress, and what they mean; pace and loss are out of date in them."""
HOSTS_NAMED: Final = 4


def show_job_for_people(
    job: Mapping[str, Any], incidents: Sequence[Mapping[str, Any]], attempts: Sequence[Mapping[str, Any]]
) -> None:
    """Print a job: what is wrong first, then how far it is, where it runs, and what can be done with it.

    Args:
        job: as `/jobs/{job}` gives it.
        incidents: its unresolved incidents, newest first.
        attempts: its newest attempts, newest first.
    """
    saves = job["checkpoints"]
    output.print_fields(
        [
            ("job", output.plain(job["name"])),
            ("state", _state(job)),
            *_incident_rows(incidents, job["incidents"]),
            ("progress", output.plain(_progress(job))),
            ("ranks", output.plain(_ranks(job))),
            ("hosts", output.plain(_hosts(job["topology"].get("ranks", ())))),
            ("can obey", output.plain(can_obey(job))),
            ("goes back to", output.identifier(saves["rollback_to"] or saves["relaunch_from"])),
            ("orders", output.plain("; ".join(f"{one['action']}: {one['phase']}" for one in job["orders"]))),
            ("watched", output.plain(job["topology"].get("watched"))),
            ("changed", output.plain(_changes(job["configuration"]))),
            ("not evaluated", output.plain(", ".join(f"{count:,} {what}" for what, count in job["dropped"].items()))),
            ("same name", output.plain(" and ".join(job["launches_at_once"]))),
            ("project", output.plain(job["project"])),
            ("owner", output.plain(job["owner"])),
            ("first seen", output.moment(job["first_seen_unix_ns"])),
        ]
    )
    columns: output.Columns = {
        "attempt": lambda one: output.identifier(one["attempt"]),
        "steps": lambda one: output.plain(_steps(one)),
        "began": lambda one: output.clock(one["started_unix_ns"]),
        "ended": lambda one: output.clock(one["ended_unix_ns"]),
    }
    print()
    output.show(map(dict, attempts), False, columns, "no attempts")


def _state(job: Mapping[str, Any]) -> Text:
    text = output.state(job["state"])
    meaning = STANDS.get(job["state"], "").format(
        name=job["name"], age=output.age(job["last_progress_unix_ns"] or job["first_seen_unix_ns"])
    )
    return text.append(f": {meaning}", style="default") if meaning else text


def _incident_rows(incidents: Sequence[Mapping[str, Any]], number: int) -> Iterator[tuple[str, Text]]:
    """The sentence of each incident, in its colour, and how to read on."""
    for one in incidents:
        by = f" (acknowledged by {one['acknowledged_by']})" if one["acknowledged_by"] else ""
        style = output.SEVERITY_STYLES.get(one["severity"], "")
        yield one["severity"], Text(output.plain(one["summary"] + by).plain, style=style)
        yield " ", Text(f"rankwatch incidents show {one['short_id']}", style="dim")
    if not number:
        yield "incidents", Text("none is open", style="green")
    elif number > len(incidents):
        yield " ", Text(f"and {number - len(incidents)} more: `rankwatch incidents --job NAME`")


def _progress(job: Mapping[str, Any]) -> str:
    if job["step"] < 0:
        return "no step has ended yet"
    before = " before" if job["state"] in STANDS else ""
    pace = f", {job['step_time_s']:.3g} s a step{before}" if job["step_time_s"] else ""
    loss = "" if job["loss"] is None else f", loss {output.plain(job['loss']).plain}{before}"
    at = job["last_progress_unix_ns"]
    return f"step {job['step']:,}{f' ended {output.age(at)} ago' if at else ''}{pace}{loss}"


def _ranks(job: Mapping[str, Any]) -> str:
    silent = job["world_size"] - job["ranks_reporting"]
    return (
        f"{job['world_size']:,}, all report"
        if not silent
        else f"{job['world_size']:,}, of which {silent:,} do not report"
    )


def _hosts(ranks: Sequence[Mapping[str, Any]]) -> str:
    from rankwatch_detectors.words import listed

    hosts = Counter(one["host"] for one in ranks)
    if not hosts:
        return ""
    each = sorted({*hosts.values()})
    ranks_each = f"{each[0]}" if len(each) == 1 else f"{each[0]} to {each[-1]}"
    names = listed(list(hosts), HOSTS_NAMED)
    return names if len(hosts) == 1 else f"{len(hosts):,} with {ranks_each} ranks each: {names}"


def can_obey(job: Mapping[str, Any]) -> str:
    """Which commands a job obeys now, or why none."""
    from rankwatch_service.policy.actions import Action

    if job["state"] == "ended":
        return "nothing: it has ended"
    actions = [action for action in Action if action in job["can"]]
    if not actions:
        return "nothing: rankwatch can only watch it (docs/sdk.md has what its loop needs)"
    return f"{', '.join(actions)} (`rankwatch {actions[0]} {shlex.quote(job['name'])}`)"


def _changes(changes: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"{one['what']} ({output.moment(one['unix_ns'])})" for one in changes[-3:])


def _steps(attempt: Mapping[str, Any]) -> str:
    first, last = attempt["first_step"], attempt["last_step"]
    return "none" if first is None else f"{first:,} to {last:,}"
