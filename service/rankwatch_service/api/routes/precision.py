"""`GET /api/v1/precision`: how precise each kind of incident is, by what people say of the incidents of 30 days."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from sqlalchemy import RowMapping, select

from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.dependencies.context import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.paging import Page, Wanted, fetch_page
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.policy import precision
from rankwatch_service.policy.demotion import demotion
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Incident
from rankwatch_service.store.settings_rows import feedback_counts, policy_action_counts, read_policy

router = APIRouter(prefix="/precision", tags=["incidents"])

ReaderOfAll = Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]
Reader = Annotated[Identity, Depends(Require(Scope.READ))]


class Precision(ApiReply):
    """How many incidents were what, by people's feedback. Each counts once, by what most people say of it."""

    kind: str
    useful: int
    noise: int
    duplicate: int
    unanswered: int
    ratio: float | None
    """Useful ones of those that are useful or noise; null: there are none."""
    low: float
    """The true ratio lies between `low` and `high` with 95 % confidence."""
    high: float


class KindPrecision(Precision):
    """Precision of a kind of incident in all jobs."""

    known: bool
    """Whether there are enough answers to rely on the ratio."""
    demotion: str
    """What is proposed if the ratio is known and below one half; else empty."""
    withheld: bool
    """Whether the policy takes no action on it, because the ratio is not known to reach `precision_min`."""


class JobPrecision(Precision):
    """Precision of a kind of incident in one job."""

    job: str


class PolicyActions(ApiReply):
    """Actions that the policy carried out, by people's feedback on the incident that each was about."""

    useful: int
    noise: int
    duplicate: int
    unanswered: int
    false_ratio: float | None
    """Those on noise, of all; null: there were none."""


class PrecisionReport(ApiReply):
    """Precision of every kind that has incidents, by name, and the rate of false actions."""

    days: int
    """Incidents detected, and actions requested, in so many days count."""
    kinds: list[KindPrecision]
    actions: PolicyActions


@router.get("")
def show_precision(context: Ctx, _identity: ReaderOfAll) -> PrecisionReport:
    """Precision of each kind of incident in the last 30 days, which kinds are proposed for demotion, and how many
    actions of the policy were false.
    """
    now = context.clock.unix_ns()
    query = feedback_counts(now, Incident.kind).order_by(Incident.kind)
    with read(context.engine) as connection:
        rows, policy = connection.execute(query).mappings().all(), read_policy(connection)
        done = dict(connection.execute(policy_action_counts(now)).mappings().one())
    kinds = []
    for row in rows:
        of_kind = precision.Precision(row["useful"], row["noise"])
        proposed = demotion(row["kind"], of_kind, policy)
        withheld = not of_kind.reaches(policy.limits.precision_min)
        shown = KindPrecision(**_counted(row), known=of_kind.is_known, demotion=proposed, withheld=withheld)
        kinds.append(shown)
    total = sum(done.values())
    actions = PolicyActions(**done, false_ratio=done["noise"] / total if total else None)
    return PrecisionReport(days=precision.WINDOW_DAYS, kinds=kinds, actions=actions)


@router.get("/jobs")
def list_precision_of_jobs(context: Ctx, window: Wanted, identity: Reader) -> Page[JobPrecision]:
    """Precision of each kind of incident in each job in the last 30 days; those with the most answers first."""
    now = context.clock.unix_ns()
    counts = feedback_counts(now, Incident.kind, Incident.job).where(identity.jobs.clause(Incident.job)).subquery()
    judged = (counts.c.useful + counts.c.noise).label("judged")
    order = (judged, counts.c.kind, counts.c.job)

    def shown(row: RowMapping) -> JobPrecision:
        return JobPrecision(**_counted(row), job=row["job"])

    with read(context.engine) as connection:
        return fetch_page(connection, select(counts, judged), order, window, context.cursors, "precision", shown)


def _counted(row: RowMapping) -> dict[str, Any]:
    found = precision.Precision(row["useful"], row["noise"])
    low, high = found.interval
    names = ("kind", "useful", "noise", "duplicate", "unanswered")
    return {name: row[name] for name in names} | {"ratio": found.ratio, "low": low, "high": high}
