"""`rankwatch policy`, `precision`, `rules` and `tuning`: what finds incidents, what is done, how far to trust them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rankwatch.client.connection import LONG_S
from rankwatch.terminal import json_line, printable
from rankwatch_service.cli import output
from rankwatch_service.cli.client import job_path
from rankwatch_service.cli.commands.directives import awaited
from rankwatch_service.cli.configuration import read_rules
from rankwatch_service.cli.errors import read_json
from rankwatch_service.cli.options import JOB, JSON, LIMIT, TOKEN, URL, connect, offer_rules

policy = typer.Typer(help="Print the policy as JSON; replace it.", invoke_without_command=True)

POLICY_PATH: Final = "/api/v1/policy"
PRECISION_PATH: Final = "/api/v1/precision"

Columns = dict[str, Callable[[dict[str, Any]], output.Cell]]

COUNTS: Final[Columns] = {
    "precision": lambda one: output.plain(_ratio(one)),
    "useful": lambda one: output.plain(one["useful"]),
    "noise": lambda one: output.plain(one["noise"]),
    "duplicate": lambda one: output.plain(one["duplicate"]),
    "unanswered": lambda one: output.plain(one["unanswered"]),
}
NO_INCIDENTS: Final = "no incidents in the last 30 days"


@policy.callback()
def show_policy(context: typer.Context, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Print the policy as JSON; replace it."""
    if context.invoked_subcommand is None:
        _print_document(connect(url, token).get(POLICY_PATH), as_json)


def _print_document(document: Mapping[str, Any], as_json: bool) -> None:
    """Print what a command reads again: JSON in both cases, for people on several lines."""
    print(json.dumps(document, indent=None if as_json else 2))


@policy.command("set")
def set_policy(
    document: Annotated[typer.FileText, typer.Argument(metavar="FILE", help="The policy as JSON; -: standard input.")],
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Replace the whole policy with a JSON document, as `rankwatch policy` prints it. Requires scope admin."""
    wanted = read_json(document.read(), document.name)
    output.done("the policy is replaced", connect(url, token).put(POLICY_PATH, wanted), as_json)


@policy.command("approvals")
def set_approvals(
    two_people: Annotated[
        bool,
        typer.Option("--two-people/--one-person", help="Whether costly commands need the approval of a second person."),
    ],
    approval_ranks: Annotated[
        int | None, typer.Option(min=0, help="Only of jobs with more ranks than this. Default: unchanged.")
    ] = None,
    reason: Annotated[str, typer.Option(help="Reason, shown to the approver and in the audit trail.")] = "",
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Set which commands need the approval of a second person. Fewer need an approval too. Requires scope admin."""
    wanted = {"two_people": two_people, "approval_ranks": approval_ranks, "reason": reason}
    found = connect(url, token).put(f"{POLICY_PATH}/approvals", wanted)
    output.done(awaited(found) if found.get("approval_required") else "the approvals are set", found, as_json)


def precision(
    by_job: Annotated[bool, typer.Option("--by-job", help="By kind and job.")] = False,
    limit: LIMIT = 100,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Show how many incidents of the last 30 days people rated as useful, by kind or by kind and job."""
    client = connect(url, token)
    kind: Columns = {"kind": lambda one: output.plain(one["kind"])}
    if by_job:
        job: Columns = {"job": lambda one: output.plain(one["job"])}
        jobs = client.items(f"{PRECISION_PATH}/jobs", limit)
        output.show(jobs, as_json, kind | job | COUNTS, NO_INCIDENTS)
        return
    found = client.get(PRECISION_PATH)
    proposed: Columns = {"proposed for demotion": lambda one: output.plain(one["demotion"])}
    output.show(found["kinds"], as_json, kind | COUNTS | proposed, NO_INCIDENTS)
    if not as_json:
        output.note(_false_actions(found["actions"]))


def _false_actions(actions: Mapping[str, Any]) -> str:
    """How many actions of the policy were on noise."""
    done = sum(actions[answer] for answer in ("useful", "noise", "duplicate", "unanswered"))
    if not done:
        return "the policy has not acted in the last 30 days"
    share = (
        f"{actions['noise']} on noise ({actions['false_ratio']:.0%}), {actions['unanswered']} on unanswered incidents"
    )
    return f"actions of the policy in the last 30 days: {done}, of which {share}"


def _ratio(one: Mapping[str, Any]) -> str:
    """The precision with its confidence interval, since 1 of 1 proves little."""
    if one["ratio"] is None:
        return ""
    return f"{one['ratio']:.0%} ({one['low']:.0%} to {one['high']:.0%})"


rules = typer.Typer(
    help="List rules on the metrics of jobs; preview, apply or delete them.", invoke_without_command=True
)
RULES_PATH: Final = "/api/v1/rules"

FILE_HELP: Final = "Rules in TOML: tables [\\[rule]], with name, metric, when, value, hold_s."
RULES_FILE = Annotated[Path, typer.Argument(metavar="FILE", help=FILE_HELP, readable=False)]


@rules.callback()
def list_rules(context: typer.Context, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """List rules on the metrics of jobs; preview, apply or delete them."""
    if context.invoked_subcommand is not None:
        return
    output.show(
        connect(url, token).get(RULES_PATH)["items"],
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


@rules.command("apply")
def apply_rules(document: RULES_FILE, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Replace the service's rules by those of a file. Requires scope operate."""
    rules = read_rules(document)
    client = connect(url, token)
    before = {one["name"]: one for one in client.get(RULES_PATH)["items"]}
    wanted = {rule.name: rule.model_dump(mode="json") for rule in rules}
    client.put(RULES_PATH, {"rules": list(wanted.values())})
    same = {name for name, rule in wanted.items() if name in before and before[name] | rule == before[name]}
    counts = {
        "added": len(wanted.keys() - before.keys()),
        "changed": len(wanted.keys() & before.keys() - same),
        "deleted": len(before.keys() - wanted.keys()),
        "unchanged": len(same),
    }
    output.done(", ".join(f"{count} {what}" for what, count in counts.items()), counts, as_json)


@rules.command("delete")
def delete_rule(
    name: Annotated[str, typer.Argument(help="Name of the rule.", autocompletion=offer_rules)],
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Delete a rule; incidents that it opened end. Requires scope operate."""
    connect(url, token).delete(f"{RULES_PATH}/{name}")
    output.done(f"{name} deleted", {"rule": name, "deleted": True}, as_json)


@rules.command("preview")
def preview_rules(document: RULES_FILE, job: JOB, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Show what each rule of a file would have found in a job's stored telemetry."""
    client = connect(url, token)
    for rule in read_rules(document):
        with output.progress(f"replaying {output.plain(job)} with {output.plain(rule.name)}"):
            found = client.post(f"{job_path(job)}/rules/preview", rule.model_dump(mode="json"), LONG_S)
        if as_json:
            sys.stdout.write(json_line({"rule": rule.name, **found}))
            continue
        incidents = found["opens"]
        opened = f"{len(incidents)} incident{'s' * (len(incidents) != 1)}"
        print(printable(f"{rule.name}: {opened} in {found['steps']:,} steps"))
        for one in incidents:
            ended = "would be open still" if one["is_open"] else f"over in step {one['resolved_step']}"
            print(printable(f"  step {one['detected_step']}: {one['summary']} {ended}"))


def _condition(rule: dict[str, Any]) -> str:
    value = "" if rule["value"] is None else f" {rule['value']:g}"
    direction = "" if rule["direction"] == "both" else f" {rule['direction']}"
    return f"{rule['when']}{value}{direction}{' on each rank' if rule['each_rank'] else ''}"


tuning = typer.Typer(help="Show, set, reset and preview the settings of detectors by job.", no_args_is_help=True)

TUNING_PATH: Final = "/api/v1/tuning"

TUNING_FILE = Annotated[
    typer.FileText,
    typer.Argument(metavar="FILE", help="Tunings as JSON, as `rankwatch tuning show` prints them; -: standard input."),
]


@tuning.command("show")
def show(as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Print the tunings in force as JSON, with their version."""
    found = connect(url, token).get(TUNING_PATH)
    _print_document({"version": found["version"], "tunings": found["tunings"]}, as_json)


@tuning.command("set")
def set_tunings(document: TUNING_FILE, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Replace all tunings; running jobs have them at once, and learn nothing anew. Requires scope admin.

    With a version in FILE, it is refused if another one is in force.
    """
    found = connect(url, token).put(TUNING_PATH, read_json(document.read(), document.name))
    output.done(f"version {found['version']} is in force", found, as_json)


@tuning.command("reset")
def reset(as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Remove all tunings: every setting has its default again. Requires scope admin."""
    found = connect(url, token).delete(TUNING_PATH)
    output.done(f"version {found['version']} is in force: every setting has its default", found, as_json)


@tuning.command("settings")
def settings(as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """List the settings that a tuning may have, with their ranges and their values in the profiles."""
    found = connect(url, token).get(f"{TUNING_PATH}/settings")["items"]
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


@tuning.command("versions")
def versions(limit: LIMIT = 100, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """List earlier and present tunings, newest first."""
    found = connect(url, token).items(f"{TUNING_PATH}/versions", limit)
    columns = {
        "version": lambda one: output.plain(one["version"]),
        "set": lambda one: output.moment(one["at_unix_ns"]),
        "by": lambda one: output.plain(one["actor"]),
        "tunings": lambda one: output.plain(json.dumps(one["tunings"])),
    }
    output.show(found, as_json, columns, "nobody has set any tuning")


@tuning.command("preview")
def preview(
    job: JOB,
    document: TUNING_FILE,
    from_step: Annotated[int | None, typer.Option(min=0, help="First step.")] = None,
    to_step: Annotated[int | None, typer.Option(min=0, help="Last step.")] = None,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Show what other tunings would have reported for a job's stored telemetry. Changes nothing."""
    steps = {name: step for name, step in (("from_step", from_step), ("to_step", to_step)) if step is not None}
    wanted = {"job": job, "tunings": read_json(document.read(), document.name).get("tunings", []), **steps}
    with output.progress(f"replaying {output.plain(job)}"):
        found = connect(url, token).post(f"{TUNING_PATH}/preview", wanted, LONG_S)
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
