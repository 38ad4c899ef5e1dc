"""`rankwatch jobs`: list jobs, show one, export it, edit it, delete it; and `rankwatch checkpoints`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from rankwatch_service.cli import output
from rankwatch_service.cli.client import job_path
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.job_view import STANDS, show_job_for_people
from rankwatch_service.cli.options import JOB, JSON, LIMIT, PROJECTS, TOKEN, URL, connect
from rankwatch_service.cli.views import show_judged

NOTICE_NS: Final = 24 * 3_600 * 10**9
"""Age up to which a notice is shown. Older ones were left by agents that were killed."""

INCIDENTS_SHOWN: Final = 10
ATTEMPTS_SHOWN: Final = 5

app = typer.Typer(help="List jobs; show, export, edit or delete one.", invoke_without_command=True)


@app.callback()
def list_jobs(
    context: typer.Context,
    limit: LIMIT = 100,
    project: PROJECTS = None,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """List jobs, last seen first; show, export, edit or delete one."""
    if context.invoked_subcommand is not None:
        return
    jobs = list(connect(url, token).items("/api/v1/jobs", limit, project=project))
    output.show(
        jobs,
        as_json,
        {
            "job": lambda job: output.plain(job["name"]),
            "state": lambda job: output.state(job["state"]),
            "incidents": _incidents,
            "step": lambda job: output.plain(job["step"] if job["step"] >= 0 else None),
            "s/step": lambda job: _rate(job, "step_time_s"),
            "loss": lambda job: _rate(job, "loss"),
            "ranks": lambda job: output.plain(f"{job['ranks_reporting']}/{job['world_size']}"),
            "last step": lambda job: output.clock(job["last_progress_unix_ns"]),
            "project": lambda job: output.plain(job["project"]),
            "owner": lambda job: output.plain(job["owner"]),
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
    _print_notices()


@app.command("show")
def show_job(job: JOB, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Show how a job is: state, open incidents, progress, ranks and hosts, what it can obey, and its attempts."""
    client = connect(url, token)
    found = client.get(job_path(job))
    if as_json:
        output.print_json([found])
        return
    incidents = list(client.items("/api/v1/incidents", INCIDENTS_SHOWN, job=[job], state="unresolved"))
    attempts = list(client.items(f"{job_path(job)}/attempts", ATTEMPTS_SHOWN, topology=False))
    show_job_for_people(found, incidents, attempts)


@app.command("why")
def why_silent(job: JOB, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Show what is judged of a job: rows by kind, and the smallest fault that would be reported today."""
    found = connect(url, token).get(f"{job_path(job)}/judged")
    if as_json:
        output.print_json([found])
        return
    show_judged(found)


@app.command("export")
def export_job(
    job: JOB,
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Parquet file to write; it must not exist.")],
    from_step: Annotated[int | None, typer.Option(min=0, help="First step.")] = None,
    to_step: Annotated[int | None, typer.Option(min=0, help="Last step.")] = None,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Write what the ranks of a job have reported to a file that `rankwatch replay` reads."""
    client = connect(url, token)
    with output.progress(f"writing {path}") as show:
        written = client.save(
            f"{job_path(job)}/telemetry",
            path,
            lambda done: show(done, output.megabytes(done)),
            from_step=from_step,
            to_step=to_step,
        )
    output.done(f"{path}: {written:,} bytes", {"file": str(path), "bytes": written}, as_json)


@app.command("edit")
def edit_job(
    job: JOB,
    project: Annotated[str | None, typer.Option(help="Project of the job; an empty text for none.")] = None,
    owner: Annotated[str | None, typer.Option(help="The person to ask about it; an empty text removes it.")] = None,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """Set the project or the owner of a job."""
    wanted = {name: text for name, text in (("project", project), ("owner", owner)) if text is not None}
    if not wanted:
        raise CliError(Status.USAGE, "nothing to set: give --project, --owner or both")
    edited = connect(url, token).patch(job_path(job), wanted)
    project, owner = edited["project"] or "none", edited["owner"] or "nobody"
    said = f"{output.plain(job)}: project {output.plain(project)}, owner {output.plain(owner)}"
    output.done(said, edited, as_json)


@app.command("delete")
def delete_job(job: JOB, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """Delete a job with its incidents, checkpoints and series. It must have reported nothing for 5 minutes.

    Asks for the name of the job, which may also come on stdin: `echo JOB | rankwatch jobs delete JOB`.
    """
    client = connect(url, token)
    found = client.get(job_path(job))
    if why := found["in_use"]:
        raise CliError(Status.USAGE, why)
    number = found["incidents"]
    unresolved = "1 incident that is not resolved" if number == 1 else f"{number} incidents that are not resolved"
    output.note(
        f"{output.plain(job)} will be deleted for good{f', with {unresolved}' if number else ''}; "
        "the audit trail and checkpoint files stay"
    )
    if typer.prompt("Type the name of the job to delete it", err=True) != job:
        raise CliError(Status.USAGE, "that is not its name: nothing was deleted")
    gone = client.delete(job_path(job))["deleted"]
    said = f"deleted {output.plain(job)}" if gone else f"{output.plain(job)} is deleted as soon as stream runs"
    output.done(said, {"job": job, "deleted": gone}, as_json)


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
    if job["state"] in STANDS:
        text.stylize("dim")
    return text


def _incidents(job: dict[str, Any]) -> Text:
    """How many incidents are not resolved, in the colour of the worst."""
    number, worst = job["incidents"], job["worst_severity"]
    if not number:
        return output.plain(None)
    said = worst if number == 1 else f"{number}, {worst}"
    return Text(said, style=output.SEVERITY_STYLES.get(worst, ""))


def checkpoints(job: JOB, limit: LIMIT = 50, as_json: JSON = False, url: URL = None, token: TOKEN = None) -> None:
    """List the checkpoints of a job with their verdicts, newest first."""
    client = connect(url, token)
    client.get(job_path(job))  # of a job that does not exist the list is empty
    output.show(
        client.items(f"{job_path(job)}/checkpoints", limit),
        as_json,
        {
            "id": lambda one: output.identifier(one["id"]),
            "step": lambda one: output.plain(one["step"]),
            "tier": lambda one: output.plain(one["tier"]),
            "verdict": lambda one: output.state(one["verdict"]),
            "why": lambda one: output.plain(one["verdict_reason"]),
            "location": lambda one: output.plain(one["location"]),
            "shards": lambda one: output.plain(f"{len(one['shards'])}/{one['shards_expected']}"),
            "MB": lambda one: output.plain(one["bytes"] / 1e6 if one["bytes"] else None),
            "seconds": lambda one: output.plain(one["seconds"]),
            "saved": lambda one: output.moment(one["saved_unix_ns"]),
        },
        "this job has no checkpoints",
    )
