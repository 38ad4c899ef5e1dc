"""Asks a person before a command that costs progress, with what it costs. Programs are not asked."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.endpoint import job_path
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.incidents.lost_time import cost_unit

if TYPE_CHECKING:
    from rankwatch_service.cli.client import CliClient

BACK: Final = ("rollback", "relaunch")
"""Commands after which a job trains on from a checkpoint."""
CHECKPOINTS: Final = 200
"""How many of the newest checkpoints are looked at."""


def confirm(client: CliClient, job: str, body: Mapping[str, Any], *, asked: bool) -> None:
    """Ask whether a command should be requested. Only at a terminal, and unless `asked` is false.

    Raises:
        CliError: the answer is no.
    """
    if not asked or not sys.stdin.isatty():
        return
    found = client.get(job_path(job))
    entries = list(client.items(f"{job_path(job)}/checkpoints", CHECKPOINTS)) if body["action"] in BACK else []
    output.note(cost(found, entries, body))
    if not typer.confirm("Continue?", err=True):
        raise CliError(Status.USAGE, "nothing was requested")


def cost(job: Mapping[str, Any], checkpoints: Sequence[Mapping[str, Any]], body: Mapping[str, Any]) -> str:
    """What a command costs, as one sentence.

    Args:
        job: as `/jobs/{job}` gives it.
        checkpoints: its checkpoints, newest first.
        body: the request of the command.
    """
    about = f"{body['action']} {job['name']}: {job['world_size']:,} ranks"
    if body["action"] not in BACK:
        return f"{about} end their training at step {_number(job['step'])} or just after it."
    target = None if body["params"].get("from_scratch") else _target(checkpoints, body["params"].get("checkpoint"))
    if target is None:
        return f"{about} begin again as the script says: no checkpoint is known to go back to."
    step = max((job["step"] or 0) - target["step"], 0)
    at_s = job["step_time_s"]
    hours = "" if not at_s else f", about {step * at_s * job['world_size'] / 3600:.3g} {cost_unit(job['accelerated'])}"
    return (
        f"{about} go from step {_number(job['step'])} back to step {target['step']:,}, saved "
        f"{output.moment(target['saved_unix_ns'])}: {step:,} steps are done again{hours}."
    )


def _target(checkpoints: Sequence[Mapping[str, Any]], chosen: str | None) -> Mapping[str, Any] | None:
    fit = (one for one in checkpoints if (one["id"] == chosen if chosen else one["verdict"] == "good"))
    return next(fit, None)


def _number(step: int | None) -> str:
    return "none" if step is None else f"{step:,}"
