"""`rankwatch pause|resume|checkpoint|rollback|relaunch|stop JOB`: what a job is told to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.endpoint import job_path
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import JSON, TOKEN, URL, connect
from rankwatch_service.policy.rollback import RollbackMode

if TYPE_CHECKING:
    from rankwatch_service.cli.client import Client

FINAL_STATES: Final = frozenset({"applied", "refused", "expired", "failed", "cancelled"})

LOOK_S: Final = 0.2
"""How often `--wait` asks for the command's state."""

NAME = Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")]
REASON = Annotated[str, typer.Option(help="Why; it stands in the audit and on the dashboard.")]
WAIT = Annotated[bool, typer.Option("--wait", help="Wait until it is applied; exit with 1 if it is not.")]
WAIT_S = Annotated[float, typer.Option("--timeout", help="Seconds to wait at most.")]
CHECKPOINT = Annotated[str | None, typer.Option(help="Its id; else the newest good one.")]
MODE = Annotated[
    RollbackMode | None,
    typer.Option(
        help="full: weights, optimizer, schedulers, random states, data and step. weights: the registered objects "
        "alone. relaunch: new processes. Else in full where the job can, and by a relaunch where it cannot."
    ),
]


@dataclass(frozen=True, slots=True)
class Action:
    """One command of the command line."""

    name: str
    help: str
    command: Callable[..., None]


def _plain(name: str, text: str) -> Action:
    def command(
        job: NAME,
        reason: REASON = "",
        wait: WAIT = False,
        wait_s: WAIT_S = 120.0,
        as_json: JSON = False,
        url: URL = None,
        token: TOKEN = None,
    ) -> None:
        request(connect(url, token), job, name, {}, reason, wait_s if wait else None, as_json)

    return Action(name, text, command)


def _rollback(
    job: NAME,
    checkpoint: CHECKPOINT = None,
    mode: MODE = None,
    reason: REASON = "",
    wait: WAIT = False,
    wait_s: WAIT_S = 120.0,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    params = {"checkpoint": checkpoint, "mode": mode}
    params = {name: str(value) for name, value in params.items() if value}
    request(connect(url, token), job, "rollback", params, reason, wait_s if wait else None, as_json)


ACTIONS: Final = (
    _plain("pause", "Hold all ranks of a job at the same step until they are resumed."),
    _plain("resume", "Let a paused job go on."),
    _plain("checkpoint", "Have a job save a checkpoint now."),
    Action("rollback", "Take a job back to a checkpoint, inside its processes where it can.", _rollback),
    _plain("relaunch", "End a job's processes; its launcher starts them again from the newest good checkpoint."),
    _plain("stop", "End a job's training loop, on all ranks at the same step."),
)


def request(
    client: Client, job: str, action: str, params: dict[str, Any], reason: str, wait_s: float | None, as_json: bool
) -> None:
    """Request a command and, if `wait_s` is given, wait so long for its end.

    Raises:
        CliError: it ended otherwise than applied, or not in time.
    """
    command = client.post(f"{job_path(job)}/commands", {"action": action, "params": params, "reason": reason})
    if wait_s is not None:
        command = _ended(client, command, wait_s)
    if as_json:
        output.print_json([command])
    else:
        step = f" at step {command['applied_step']}" if command.get("applied_step") is not None else ""
        told = f": {command['result']}" if command.get("result") else ""
        output.note(f"{action} {job}: {output.command_state(command)}{step}{told} ({command['id']})")
    if wait_s is not None and command["state"] != "applied":
        raise typer.Exit(Status.FINDINGS)


def _ended(client: Client, command: dict[str, Any], wait_s: float) -> dict[str, Any]:
    deadline_s = time.monotonic() + wait_s
    told = ""
    while command["state"] not in FINAL_STATES:
        if command["state"] != told:
            told = command["state"]
            output.note(f"{command['action']}: {told}")
        if time.monotonic() > deadline_s:
            raise CliError(Status.FINDINGS, f"{command['id']} is still {told} after {wait_s:g} s")
        time.sleep(LOOK_S)
        command = client.get(f"/api/v1/commands/{command['id']}")
    return command
