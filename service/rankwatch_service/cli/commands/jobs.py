"""`rankwatch jobs`: list jobs and show one."""

from __future__ import annotations

import os
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from rankwatch_service.cli import output
from rankwatch_service.cli.endpoint import job_path
from rankwatch_service.cli.options import JSON, LIMIT, TOKEN, URL, connect

NOTICE_NS: Final = 24 * 3_600 * 10**9
"""Age up to which a notice is shown. Older ones were left by agents that were killed."""

NOT_MOVING: Final = ("stalled", "paused", "lost")

app = typer.Typer(help="List jobs; show one.", invoke_without_command=True)


@app.callback()
def list_jobs(
    context: typer.Context, limit: LIMIT = 100, as_json: JSON = False, url: URL = None, token: TOKEN = None
) -> None:
    """List jobs, last seen first; show one."""
    if context.invoked_subcommand is not None:
        return
    _print_notices()
    jobs = list(connect(url, token).items("/api/v1/jobs", limit))
    output.show(
        jobs,
        as_json,
        {
            "job": lambda job: output.plain(job["name"]),
            "state": lambda job: output.state(job["state"]),
            "step": lambda job: output.plain(job["step"]),
            "s/step": lambda job: _rate(job, "step_time_s"),
            "loss": lambda job: _rate(job, "loss"),
            "ranks": lambda job: output.plain(f"{job['ranks_reporting']}/{job['world_size']}"),
            "attempt": lambda job: output.plain(job["attempt"]),
            "last step": lambda job: output.moment(job["last_progress_unix_ns"]),
        },
        "no jobs",
    )
    for job in jobs:
        if job["launches_at_once"]:
            launches = " and ".join(job["launches_at_once"])
            output.note(
                f"{job['name']}: launches {launches} run under the same name; give each its own job name, "
                "or, if they are ranks of one job, call rankwatch.start after torch.distributed.init_process_group"
            )


@app.command("show")
def show_job(
    job: Annotated[str, typer.Argument(help="Name of the job.")],
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Show one job and its attempts."""
    client = connect(url, token)
    found = client.get(job_path(job))
    if as_json:
        output.print_json([found])
        return
    output.print_fields((name.removesuffix("_unix_ns"), _value(name, value)) for name, value in found.items())
    output.show(
        client.items(f"{job_path(job)}/attempts", 20),
        False,
        {
            "attempt": lambda attempt: output.plain(attempt["attempt"]),
            "steps": lambda attempt: output.plain(f"{attempt['first_step']} to {attempt['last_step']}"),
            "began": lambda attempt: output.moment(attempt["started_unix_ns"]),
            "ended": lambda attempt: output.moment(attempt["ended_unix_ns"]),
        },
        "no attempts",
    )


def _print_notices() -> None:
    """Print the notices of agents on this machine: jobs whose telemetry does not reach the service, and why."""
    from rankwatch.notices import notices_here
    from rankwatch_service.clock import SystemClock

    now = SystemClock().unix_ns()
    for notice in notices_here(os.environ, os.getuid()):
        if now - notice.unix_ns < NOTICE_NS:
            output.note(f"job {output.plain(notice.job)} on this machine: {output.plain(notice.text)}")


def _rate(job: dict[str, Any], name: str) -> Text:
    """A value of the newest steps; dim if the job makes no progress, since it is out of date then."""
    text = output.plain(job[name])
    if job["state"] in NOT_MOVING:
        text.stylize("dim")
    return text


def _value(name: str, value: Any) -> output.Cell:
    if name.endswith("_unix_ns"):
        return output.moment(value)
    if isinstance(value, dict):
        return output.plain(", ".join(f"{key} {_size_or_value(held)}" for key, held in value.items()))
    return output.state(value) if name == "state" else output.plain(value)


def _size_or_value(value: Any) -> str:
    return str(len(value)) if isinstance(value, list) else output.plain(value).plain
