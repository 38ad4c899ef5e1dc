"""`rankwatch checkpoints`: the checkpoint ledger of one job."""

from __future__ import annotations

from typing import Any

from rankwatch_service.cli import output
from rankwatch_service.cli.arguments import JOB
from rankwatch_service.cli.endpoint import job_path
from rankwatch_service.cli.options import JSON, LIMIT, TOKEN, URL, connect


def checkpoints(
    job: JOB,
    limit: LIMIT = 50,
    as_json: JSON = False,
    url: URL = None,
    token: TOKEN = None,
) -> None:
    """List the checkpoints of a job with their verdicts, newest first."""
    output.show(
        connect(url, token).items(f"{job_path(job)}/checkpoints", limit),
        as_json,
        {
            "id": lambda one: output.identifier(one["id"]),
            "step": lambda one: output.plain(one["step"]),
            "tier": lambda one: output.plain(one["tier"]),
            "verdict": lambda one: output.state(one["verdict"]),
            "why": lambda one: output.plain(one["verdict_reason"]),
            "location": lambda one: output.plain(_location(one)),
            "shards": lambda one: output.plain(f"{len(one['shards'])}/{one['shards_expected']}"),
            "MB": lambda one: output.plain(one["bytes"] / 1e6 if one["bytes"] else None),
            "seconds": lambda one: output.plain(one["seconds"]),
            "saved": lambda one: output.moment(one["saved_unix_ns"]),
        },
        "this job has no checkpoints",
    )


def _location(checkpoint: dict[str, Any]) -> str:
    if not checkpoint["location"]:
        return ""
    return str(checkpoint["location"]) + ("" if checkpoint["verified"] else " (unverified)")
