"""Why an incident was opened and why not earlier, and what is judged of a job of which nothing is reported."""

from __future__ import annotations

from threading import Lock
from typing import Final

from fastapi import APIRouter
from sqlalchemy import select

from rankwatch_detectors.explanation import RULES
from rankwatch_service.api.dependencies import Ctx
from rankwatch_service.api.http.paging import Number
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.incidents import Reader, find_incident
from rankwatch_service.api.routes.jobs import find_job
from rankwatch_service.incidents.correlator import WHY
from rankwatch_service.job.detection import JUDGED
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import IncidentTransition
from rankwatch_service.stream.saved import newest_of

router = APIRouter()
_ONE_AT_A_TIME: Final = Lock()
"""A snapshot of 16,384 ranks takes 100 MB while it is read."""


class StatisticPoints(ApiReply):
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


class EarlierReport(ApiReply):
    """What would have been reported earlier."""

    rows: int
    """Rows after the onset."""
    step: int | None
    """The step of that row; null if the history does not have it."""
    size: Number | None
    """How large it was."""
    needed: Number | None
    """How large it would have had to be; null: nothing is reported so early, however large."""


class Explanation(ApiReply):
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
    points: StatisticPoints
    rows: dict[str, int]
    """Rows of the attempt up to then: judged, and those left out by reason."""
    earlier: list[EarlierReport]
    why: str
    why_not_earlier: str


class Explanations(ApiReply):
    """Explanations of an incident's findings."""

    incident: str
    items: list[Explanation]
    """Oldest first; empty if a version that explained nothing opened the incident, or a rule without a threshold."""


class SmallestFault(ApiReply):
    """The smallest fault that would be reported a number of rows after its onset."""

    rows: int
    size: Number | None
    """See `unit`; null: none is reported so early, however large."""


class DetectableFault(ApiReply):
    """A sort of fault, and how small it may be to be reported today."""

    fault: str
    unit: str
    """ratio: to what is usual; value: of the curve."""
    noise: Number
    """Standard deviation of one row: as a share of what is usual, or of the curve's value or logarithm."""
    sizes: list[SmallestFault]


class JudgedKind(ApiReply):
    """What one detector has judged in the running attempt."""

    kind: str
    detector: str
    judged: bool
    why_not: str
    """Why no row was judged; empty if any was."""
    rows: int
    left_out: dict[str, int]
    """Rows that were not judged, by reason."""
    smallest: list[DetectableFault]


class KindRule(ApiReply):
    """A kind that is judged without a statistic of rows."""

    kind: str
    rule: str


class JudgedJob(ApiReply):
    """What is judged of a job."""

    job: str
    at_unix_ns: int | None
    """As of this time, at most a minute ago while the job sends; null: it is idle, or has just begun."""
    items: list[JudgedKind]
    rules: list[KindRule]


@router.get("/jobs/{job}/judged", tags=["jobs"])
def show_judged(job: str, context: Ctx, _identity: Reader) -> JudgedJob:
    """What is judged of a job: by kind the rows, those left out by reason, and the smallest fault that would be
    reported today, given its own noise and length. The answer comes from the newest snapshot of the job.
    """
    with read(context.engine) as connection:
        find_job(connection, job)
    with _ONE_AT_A_TIME:
        found = newest_of(context.engine, job)
        items = [] if found is None else found[0].get(JUDGED, [])
    rules = [KindRule(kind=kind, rule=rule) for kind, rule in RULES.items()]
    return JudgedJob(job=job, at_unix_ns=None if found is None else found[1], items=items, rules=rules)


@router.get("/incidents/{incident_id}/why", tags=["incidents"])
def explain_incident(incident_id: str, context: Ctx, identity: Reader) -> Explanations:
    """Why an incident was opened, and why not earlier: its statistics over time against their thresholds, rows left out
    by reason, and what would have had to be larger.
    """
    with read(context.engine) as connection:
        full = find_incident(connection, incident_id, identity)["id"]
        mine = select(IncidentTransition.fields).where(IncidentTransition.incident_id == full)
        reported = connection.scalars(mine.order_by(IncidentTransition.number)).all()
    return Explanations(incident=full, items=[one for fields in reported for one in fields.get(WHY, ())])
