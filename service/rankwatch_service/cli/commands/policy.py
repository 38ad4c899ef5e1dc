"""`rankwatch policy`: what is done about incidents without a person; `rankwatch precision`: how far to trust them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import JSON, LIMIT, TOKEN, URL, connect

app = typer.Typer(help="Print the policy as JSON; replace it.", invoke_without_command=True)

PATH = "/api/v1/policy"
PRECISION_PATH = "/api/v1/precision"

Columns = dict[str, Callable[[dict[str, Any]], output.Cell]]

COUNTS: Final[Columns] = {
    "precision": lambda one: output.plain(_ratio(one)),
    "useful": lambda one: output.plain(one["useful"]),
    "noise": lambda one: output.plain(one["noise"]),
    "duplicate": lambda one: output.plain(one["duplicate"]),
    "unanswered": lambda one: output.plain(one["unanswered"]),
}
NO_INCIDENTS: Final = "no incidents in the last 30 days"


@app.callback()
def show_policy(context: typer.Context, url: URL = None, token: TOKEN = None) -> None:
    """Print the policy as JSON; replace it."""
    if context.invoked_subcommand is None:
        print(json.dumps(connect(url, token).get(PATH), indent=2))


@app.command("set")
def set_policy(
    document: Annotated[typer.FileText, typer.Argument(metavar="FILE", help="The policy as JSON; -: standard input.")],
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Replace the whole policy with a JSON document, as `rankwatch policy` prints it. Requires scope admin."""
    try:
        wanted: Any = json.load(document)
    except ValueError as error:
        raise CliError(Status.USAGE, f"{document.name} is not JSON: {error}") from error
    if not isinstance(wanted, dict):
        raise CliError(Status.USAGE, f"{document.name} is not a JSON object")
    connect(url, token).put(PATH, wanted)
    output.note("the policy is replaced")


def precision(
    by_job: Annotated[bool, typer.Option("--by-job", help="By kind and job.")] = False,
    limit: LIMIT = 100,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Show how many incidents of the last 30 days people found useful, by kind or by kind and job."""
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
    """The precision with the range in which it lies, since 1 of 1 says little."""
    if one["ratio"] is None:
        return ""
    return f"{one['ratio']:.0%} ({one['low']:.0%} to {one['high']:.0%})"
