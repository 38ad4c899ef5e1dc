"""Alerts that wait: they fire, and no incident has them. Whoever sends them may have forgotten a label."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import Field
from sqlalchemy import RowMapping, select

from rankwatch_detectors.base import Severity
from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.alerts import NO_JOB, WAITING, Alert, why_it_waits
from rankwatch_service.api.dependencies import Ctx
from rankwatch_service.api.http.authorization import Require
from rankwatch_service.api.http.paging import Page, Wanted, fetch_page
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.api.routes.alerts import QUERY, Labels
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import AlertRow

router = APIRouter(prefix="/alerts", tags=["alerts"])

Reader = Annotated[Identity, Depends(Require(Scope.READ))]


class WaitingAlert(ApiReply):
    """An alert that fires and that no incident has."""

    fingerprint: Annotated[str, Field(examples=["13d21d7b245ea7b0"])]
    name: Annotated[str, Field(examples=["DiskFull"])]
    severity: Severity
    """By its label `severity`; a warning if that is missing or unknown."""
    labels: Labels
    summary: Annotated[str, Field(examples=["The disk of node-17 is full"])]
    """Empty: it says nothing."""
    url: Annotated[str, Field(examples=[QUERY])]
    """Where its Prometheus shows the query; empty: unknown."""
    job: Annotated[str, Field(examples=[""])]
    """The job that has no room for it; empty: it concerns no job that is known."""
    why: Annotated[str, Field(examples=["No running job that its sender may access is named gpt-2."])]
    """Why it waits."""
    starts_unix_ns: int
    updated_unix_ns: int
    """When it was reported last."""


@router.get("/waiting")
def list_waiting_alerts(context: Ctx, window: Wanted, identity: Reader) -> Page[WaitingAlert]:
    """Alerts that fire and that no incident has, newest first, and why. Each repeat of an alert tries again.

    A token that is restricted to some jobs gets those that wait for room in these.
    """
    query = select(AlertRow.__table__).where(WAITING, identity.jobs.clause(AlertRow.job))
    if not identity.jobs.every:
        query = query.where(AlertRow.job != NO_JOB)
    order = (AlertRow.starts_unix_ns, AlertRow.fingerprint, AlertRow.job)
    job_labels = context.settings.alert_job_label_names

    def shown(row: RowMapping) -> WaitingAlert:
        times = row["starts_unix_ns"], row["ends_unix_ns"]
        alert = Alert(row["fingerprint"], row["labels"], row["annotations"], *times, row["url"])
        found = {
            "severity": alert.severity,
            "summary": alert.summary,
            "why": why_it_waits(alert, row["job"], job_labels),
        }
        return WaitingAlert.model_validate({**row, **found})

    with read(context.engine) as connection:
        return fetch_page(connection, query, order, window, context.cursors, "waiting alerts", shown, counted=True)
