"""`rankwatch pause|resume|checkpoint|rollback|relaunch|stop|trace JOB`: commands to a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rankwatch.client.client import FINAL_STATES
from rankwatch_service.cli import output
from rankwatch_service.cli.client import job_path
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import JOB, JSON, TOKEN, URL, connect, offer_checkpoints
from rankwatch_service.cli.views import confirm, show_traces
from rankwatch_service.policy.actions import ACTIONS, TRACE_S, TRACE_STEPS, TRACE_STEPS_MAX, Action
from rankwatch_service.policy.rollback import RollbackMode

if TYPE_CHECKING:
    from rankwatch_service.cli.client import CliClient


LATE_S: Final = 5.0
"""How long after its deadline a trace is waited for, so that the service says which ranks did not answer."""

POLL_S: Final = 0.2
"""How often `--wait` reads the state of the command."""

REASON = Annotated[str, typer.Option(help="Reason, for the audit trail and the dashboard.")]
YES = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask for confirmation. Without a terminal none is asked for.")
]
WAIT = Annotated[
    bool, typer.Option("--wait", help="Wait until the command has ended; exit with 1 if it was not applied.")
]
WAIT_S = Annotated[float, typer.Option("--timeout", help="Longest time to wait, in seconds.")]
CHECKPOINT = Annotated[
    str | None,
    typer.Option(help="Id of the checkpoint. Default: the newest good one.", autocompletion=offer_checkpoints),
]
FROM_SCRATCH = Annotated[
    bool,
    typer.Option(
        "--from-scratch",
        help="Start without a checkpoint of the ledger. The script decides where it begins, usually at step 0.",
    ),
]
RANKS = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Ranks to trace, with commas between them. Default: the rank that an open straggler or slowdown names and "
        "a healthy one, else rank 0.",
    ),
]
STEPS = Annotated[int, typer.Option(min=1, max=TRACE_STEPS_MAX, help="Whole steps to record.")]
MODE = Annotated[
    RollbackMode | None,
    typer.Option(
        help="full: weights, optimizer, schedulers, random states, data and step. relaunch: new "
        "processes. Default: full if the job supports it, else relaunch."
    ),
]


def _plain(action: Action) -> Callable[..., None]:
    def command(
        job: JOB,
        reason: REASON = "",
        wait: WAIT = False,
        wait_s: WAIT_S = 120.0,
        as_json: JSON = False,
        url: URL = None,
        token: TOKEN = None,
    ) -> None:
        request(connect(url, token), job, _body(action, reason), wait_s if wait else None, as_json)

    return command


def _confirmed(
    url: str | None, token: str | None, job: str, body: dict[str, Any], yes: bool, wait_s: float | None, as_json: bool
) -> None:
    client = connect(url, token)
    confirm(client, job, body, asked=not yes)
    request(client, job, body, wait_s, as_json)


def _stop(
    job: JOB,
    reason: REASON = "",
    yes: YES = False,
    wait: WAIT = False,
    wait_s: WAIT_S = 120.0,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    _confirmed(url, token, job, _body("stop", reason), yes, wait_s if wait else None, as_json)


def _relaunch(
    job: JOB,
    from_scratch: FROM_SCRATCH = False,
    reason: REASON = "",
    yes: YES = False,
    wait: WAIT = False,
    wait_s: WAIT_S = 120.0,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    body = _body("relaunch", reason, {"from_scratch": True} if from_scratch else {})
    _confirmed(url, token, job, body, yes, wait_s if wait else None, as_json)


def _rollback(
    job: JOB,
    checkpoint: CHECKPOINT = None,
    mode: MODE = None,
    reason: REASON = "",
    yes: YES = False,
    wait: WAIT = False,
    wait_s: WAIT_S = 120.0,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    chosen = {"checkpoint": checkpoint, "mode": mode}
    params = {name: str(value) for name, value in chosen.items() if value}
    _confirmed(url, token, job, _body("rollback", reason, params), yes, wait_s if wait else None, as_json)


def _trace(
    job: JOB,
    ranks: RANKS = None,
    steps: STEPS = TRACE_STEPS,
    reason: REASON = "",
    wait_s: WAIT_S = TRACE_S,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    params: dict[str, Any] = {"steps": steps} | ({} if ranks is None else {"ranks": _ranks(ranks)})
    client = connect(url, token)
    command = client.post(f"{job_path(job)}/commands", _body("trace", reason, params) | {"expires_s": wait_s})
    show_traces(_ended(client, command, wait_s + LATE_S), as_json)


def _ranks(text: str) -> list[int]:
    try:
        return [int(rank) for rank in text.split(",")]
    except ValueError:
        raise CliError(Status.USAGE, f"--ranks is a list of numbers like 0,3, not {text!r}") from None


def _body(action: str, reason: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {"action": action, "params": params or {}, "reason": reason}


COMMANDS: Final[Mapping[Action, Callable[..., None]]] = {
    Action.ROLLBACK: _rollback,
    Action.RELAUNCH: _relaunch,
    Action.TRACE: _trace,
    Action.STOP: _stop,
}
"""Those with options or questions of their own."""


def add_to(app: typer.Typer, panel: str) -> None:
    """Add a command for each action."""
    for action, traits in ACTIONS.items():
        app.command(str(action), help=traits.help, rich_help_panel=panel)(COMMANDS.get(action) or _plain(action))


def request(client: CliClient, job: str, body: dict[str, Any], wait_s: float | None, as_json: bool) -> None:
    """Request a command and, if `wait_s` is given, wait up to that long for its end.

    Raises:
        CliError: it did not end in time.
        typer.Exit: it ended without being applied.
    """
    command = client.post(f"{job_path(job)}/commands", body)
    if command["approval_required"]:
        output.note(awaited(command))
    if wait_s is not None:
        command = _ended(client, command, wait_s)
    if as_json:
        output.print_json([command])
    else:
        step = f" at step {command['applied_step']}" if command.get("applied_step") is not None else ""
        result = f": {command['result']}" if command.get("result") else ""
        state, short_id = output.command_state(command), output.short_id(command["id"])
        output.note(f"{command['action']} {job}: {state}{step}{result} ({short_id})")
    if wait_s is not None and command["state"] != "applied":
        raise typer.Exit(Status.FINDINGS)


def awaited(command: dict[str, Any]) -> str:
    """Until when a command waits for its approval, and how it is given."""
    until, id_ = output.moment(command["expires_unix_ns"]), output.short_id(command["id"])
    return f"waits until {until} for the approval of another person: rankwatch commands approve {id_}"


def _ended(client: CliClient, command: dict[str, Any], wait_s: float) -> dict[str, Any]:
    deadline_s = time.monotonic() + wait_s
    shown = ""
    while command["state"] not in FINAL_STATES:
        if command["state"] != shown:
            shown = command["state"]
            output.note(f"{command['action']}: {shown}")
        if time.monotonic() > deadline_s:
            raise CliError(Status.FINDINGS, f"{output.short_id(command['id'])} is still {shown} after {wait_s:g} s")
        time.sleep(POLL_S)
        command = client.get(f"/api/v1/commands/{command['id']}")
    return command
