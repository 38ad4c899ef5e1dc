"""Why an incident was opened, and why not earlier."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel
from sqlalchemy import select

from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.numbers import Number
from rankwatch_service.api.routes.incidents import Reader, find_incident
from rankwatch_service.incidents.explanation import WHY
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import IncidentTransition

router = APIRouter(tags=["incidents"])


class Points(BaseModel):
    """A statistic over time: columns of equal length, the newest last."""

    step: list[int | None]
    at_unix_ns: list[int]
    value: list[Number]
    threshold: list[Number]
    rows: list[int]
    """Rows of the run so far; 0: there was none."""
    size: list[Number | None]
    """How large it was: see `unit`."""
    missing: list[str]
    """What kept it from being reported although beyond the threshold; else empty."""


class EarlierReport(BaseModel):
    """What would have been reported earlier."""

    rows: int
    """Rows after the onset."""
    step: int | None
    """The step of that row; null if the trail does not have it."""
    size: Number | None
    """How large it was."""
    needed: Number | None
    """How large it would have had to be; null: nothing is reported so early, however large."""


class Explanation(BaseModel):
    """Why one finding of the incident was reported."""

    kind: str
    scope: str
    attempt: str
    statistic: str
    label: str
    """What the statistic is."""
    source: str
    """Which of several views of the scope decided, such as wall, cpu or device time."""
    unit: str
    """Of sizes: ratio, to what is usual; value, of the curve; s."""
    onset_step: int | None
    detected_step: int | None
    points: Points
    rows: dict[str, int]
    """Rows of the attempt up to then: judged, and those left out by reason."""
    earlier: list[EarlierReport]
    why: str
    why_not_earlier: str


class Explanations(BaseModel):
    """Explanations of an incident's findings."""

    incident: str
    items: list[Explanation]
    """Oldest first; empty if a version that explained nothing opened the incident, or a rule without a threshold."""


@router.get("/incidents/{incident_id}/why")
def explain_incident(incident_id: str, context: Ctx, identity: Reader) -> Explanations:
    """Why an incident was opened, and why not earlier: its statistics over time against their thresholds, rows left out
    by reason, and what would have had to be larger.
    """
    with read(context.engine) as connection:
        full = find_incident(connection, incident_id, identity)["id"]
        mine = select(IncidentTransition.fields).where(IncidentTransition.incident_id == full)
        told = connection.scalars(mine.order_by(IncidentTransition.number)).all()
    return Explanations(incident=full, items=[one for fields in told for one in fields.get(WHY, ())])
