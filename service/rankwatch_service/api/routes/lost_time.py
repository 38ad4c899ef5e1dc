"""What a job has lost to incidents, by kind, and its goodput."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Final

from fastapi import APIRouter, Depends
from sqlalchemy import select

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.numbers import Number
from rankwatch_service.api.http.paging import Time
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.jobs import find_job
from rankwatch_service.incidents.lost_time import HOUR_NS, Loss, lost_by_kind
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Incident as IncidentRow

router = APIRouter(prefix="/jobs", tags=["jobs"])

NO_PROGRESS: Final = ("stalled", "lost")
NOT_MEANT_TO_RUN: Final = ("paused", "ended")


class KindLoss(ApiReply):
    """What the incidents of one kind have cost."""

    kind: str
    incidents: int
    gpu_hours: Number


class LostTime(ApiReply):
    """What a job has lost in a period, by kind of incident, most first. Where it is not `accelerated`, a rank counts as
    a GPU.
    """

    items: list[KindLoss]
    gpu_hours: Number
    """Sum of the items."""
    goodput: Number | None
    """Share of the period's GPU-hours that incidents did not cost, 0 to 1; null for an empty period."""
    goodput_now: Number | None
    """Share of the usual work that is done now, 0 to 1; null for a job that is paused or has ended."""
    from_unix_ns: int
    to_unix_ns: int


@router.get("/{job}/lost-time")
def show_lost_time(
    job: str,
    context: Ctx,
    _identity: Annotated[Identity, Depends(Require(Scope.READ))],
    from_unix_ns: Time = None,
    to_unix_ns: Time = None,
) -> LostTime:
    """What a job has lost to incidents in all its attempts, by kind, and its goodput.

    An incident costs what it cost last, from its onset on. The period begins no earlier than the job, and ends no later
    than now or the job.
    """
    now = context.clock.unix_ns()
    query = select(
        IncidentRow.kind,
        IncidentRow.onset_unix_ns,
        IncidentRow.resolved_unix_ns,
        IncidentRow.impact_gpu_hours_per_hour,
    ).where(IncidentRow.job == job, IncidentRow.impact_gpu_hours_per_hour > 0)
    with read(context.engine) as connection:
        row = find_job(connection, job)
        costly = connection.execute(query).all()
    begin = max(row["first_seen_unix_ns"], from_unix_ns or 0)
    last = row["last_seen_unix_ns"] if row["state"] == "ended" else now
    end = max(begin, min(last, now if to_unix_ns is None else to_unix_ns))
    losses = [
        Loss(kind, max(begin, onset), min(end, end if resolved is None else resolved), rate)
        for kind, onset, resolved, rate in costly
    ]
    losses = [one for one in losses if one.to_unix_ns > one.from_unix_ns]
    world_size = row["world_size"]
    lost = lost_by_kind(losses, world_size)
    counts = Counter(one.kind for one in losses)
    in_all = sum(lost.values())
    possible = world_size * (end - begin) / HOUR_NS
    rate_now = sum(rate for _, _, resolved, rate in costly if resolved is None)
    return LostTime(
        items=[KindLoss(kind=kind, incidents=counts[kind], gpu_hours=hours) for kind, hours in lost.items()],
        gpu_hours=in_all,
        goodput=max(0.0, 1 - in_all / possible) if possible else None,
        goodput_now=_goodput_now(row["state"], rate_now, world_size),
        from_unix_ns=begin,
        to_unix_ns=end,
    )


def _goodput_now(state: str, gpu_hours_per_hour: float, world_size: int) -> float | None:
    """Share of the usual work that is done now; None: none is meant to be done."""
    if state in NOT_MEANT_TO_RUN:
        return None
    if state in NO_PROGRESS or not world_size:
        return 0.0
    return max(0.0, 1 - gpu_hours_per_hour / world_size)
