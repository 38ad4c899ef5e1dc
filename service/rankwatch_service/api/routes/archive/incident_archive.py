"""The incident archive: all that is known of an incident in one ZIP file."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Response
from sqlalchemy import Connection, select
from starlette.requests import Request

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Context, Ctx
from rankwatch_service.api.routes.charts.explanations import explain_incident
from rankwatch_service.api.routes.commands import Command
from rankwatch_service.api.routes.incidents.incidents import Reader, find_incident, incident_detail
from rankwatch_service.api.routes.system.audit_trail import AuditLine
from rankwatch_service.incident_archive.contents import contents
from rankwatch_service.incident_archive.packing import packed
from rankwatch_service.series.query import Reduce, Segment, metrics, series
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Audit as AuditRow
from rankwatch_service.store.models import Command as CommandRow

router = APIRouter(prefix="/incidents", tags=["incidents"])

MEDIA_TYPE: Final = "application/zip"
BEFORE_STEPS: Final = 120
AFTER_STEPS: Final = 80
"""Steps of the series before the onset, and after the detection: those that the incident's page shows."""
RANKS_MAX: Final = 16
"""Ranks of the incident with a line of their own in each series."""
METRICS_MAX: Final = 64
COMMANDS_MAX: Final = 500
NO_AUDIT: Final = "audit.jsonl: the token has no scope admin over all jobs"
NO_STEP: Final = "series: no step is known at which training felt it"


def _sees_audit(request: Request) -> bool:
    """Whether whoever asks may read the audit trail."""
    identity: Identity | None = request.scope.get("identity")
    admin = identity and identity.within(Scope.ADMIN)
    return admin is not None and admin.jobs.every


@router.get(
    "/{incident_id}/archive",
    response_class=Response,
    responses={200: {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}},
)
def download_archive(
    incident_id: str, context: Ctx, identity: Reader, sees_audit: Annotated[bool, Depends(_sees_audit)]
) -> Response:
    """All that is known of an incident, as a ZIP file: a page for people, the incident and its commands as JSON, the
    series around the onset as CSV, stacks as text, for admins its lines of the audit trail, and a manifest with the
    SHA-256 of each file. The manifest says what was left out, and why.
    """
    with read(context.engine) as connection:
        row = find_incident(connection, incident_id, identity)
        detail = incident_detail(connection, row)
        chosen = select(CommandRow.__table__).where(CommandRow.incident_id == detail.id)
        found = connection.execute(chosen.order_by(CommandRow.requested_unix_ns).limit(COMMANDS_MAX)).mappings()
        commands = [Command.model_validate(dict(one)).model_dump(mode="json") for one in found]
        targets = [detail.id, *(one["id"] for one in commands)]
        audit = _audit(connection, targets) if sees_audit else None
    why = explain_incident(detail.id, context, identity).model_dump(mode="json")["items"]
    incident = {**detail.model_dump(mode="json"), "why": why}
    steps = _steps(incident)
    measured = _series(context, incident, steps) if steps else {}
    left_out = [*([] if sees_audit else [NO_AUDIT]), *([] if steps else [NO_STEP])]
    files = contents(incident, commands, measured, audit)
    data = packed(files, context.clock.unix_ns(), version("rankwatch"), left_out)
    name = f"rankwatch-incident-{detail.short_id}.zip"
    headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
    return Response(data, media_type=MEDIA_TYPE, headers=headers)


def _audit(connection: Connection, targets: list[str]) -> list[dict[str, Any]]:
    lines = connection.execute(select(AuditRow.__table__).where(AuditRow.target.in_(targets)).order_by(AuditRow.id))
    return [AuditLine.model_validate(dict(line)).model_dump(mode="json") for line in lines.mappings()]


def _steps(incident: dict[str, Any]) -> tuple[int, int] | None:
    """First and last step of the series; None if training felt it at no known step."""
    felt = [one["step"] for one in incident["consequences"] if isinstance(one.get("step"), int)]
    onset = incident["onset_step"] if incident["onset_step"] is not None else next(iter(felt), None)
    if onset is None:
        return None
    return max(0, onset - BEFORE_STEPS), max(onset, incident["detected_step"] or 0) + AFTER_STEPS


def _series(context: Context, incident: dict[str, Any], steps: tuple[int, int]) -> dict[str, list[Segment]]:
    """Lines over all ranks, and those of the incident's ranks, in its attempt."""
    job, ranks, (first, last) = incident["job"], incident["ranks"][:RANKS_MAX], steps
    points = last - first + 1
    found = {}
    for metric in metrics(context.engine, job)[:METRICS_MAX]:
        segments = series(context.engine, job, metric, first, last, (), Reduce.FAN, points)
        if ranks:
            segments += series(context.engine, job, metric, first, last, ranks, Reduce.NONE, points)
        mine = [segment for segment in segments if segment.attempt == incident["attempt"]]
        if mine:
            found[metric] = mine
    return found
