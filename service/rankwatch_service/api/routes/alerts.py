"""Alerts of a Prometheus: what its Alertmanagers have at this place, so that it takes this service for one of them.

Those that fire and that no incident has wait: whoever sends them may have forgotten a label.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request
from pydantic import AwareDatetime, BaseModel, Field
from sqlalchemy import Connection, RowMapping, select

from rankwatch_detectors.base import Severity
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.alerts import ALERTS_MAX, NO_JOB, WAITING, Alert, AlertResult, store_alerts, why_it_waits
from rankwatch_service.api.dependencies import Ctx, Require
from rankwatch_service.api.http.paging import Page, Wanted, fetch_page
from rankwatch_service.api.http.problem import RETRY_AFTER_S, ProblemError
from rankwatch_service.api.reply import ApiReply, time_text
from rankwatch_service.labels import Matcher, match_all, parse_matchers
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import AlertRow

router = APIRouter(prefix="/alerts", tags=["alerts"])
waiting_router = APIRouter(prefix="/alerts", tags=["alerts"])

ALERTS_PER_REQUEST_MAX: Final = 1_000
"""Four times what a Prometheus sends at once."""

LISTED_MAX: Final = 16
"""Names and errors in a reply; counts say how many there are."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_UNSET_YEAR: Final = 1
"""Of a time that is not set, as Go writes it."""
_UNIX_NS_MAX: Final = 2**63 - 1

QUERY: Final = "https://prometheus.example.com/graph?g0.expr=node_filesystem_avail_bytes+%3D%3D+0"
Labels = Annotated[
    dict[str, str], Field(examples=[{"alertname": "DiskFull", "instance": "node-17:9100", "severity": "warning"}])
]
Annotations = Annotated[dict[str, str], Field(examples=[{"summary": "The disk of node-17 is full"}])]
TimeText = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
Sender = Annotated[Identity, Depends(Require(Scope.ALERT))]
Reader = Annotated[Identity, Depends(Require(Scope.READ))]


class PostedAlert(BaseModel):
    """An alert as clients of an Alertmanager send it; fields that are not listed are ignored."""

    labels: Labels
    """They identify it; `alertname` is its name."""
    annotations: Annotations = {}
    """They describe it: `summary`, `description`, `runbook_url`."""
    starts_at: Annotated[AwareDatetime | None, Field(alias="startsAt")] = None
    """null: now."""
    ends_at: Annotated[AwareDatetime | None, Field(alias="endsAt")] = None
    """The time at which it counts as resolved, unless it is repeated; in the past: it is resolved; null: in five
    minutes."""
    generator_url: Annotated[str, Field(alias="generatorURL", examples=[QUERY])] = ""
    """Where its Prometheus shows the query."""

    def read(self, now_unix_ns: int) -> Alert:
        """What it says.

        Raises:
            ValueError: it cannot be accepted.
        """
        times = _unix_ns(self.starts_at), _unix_ns(self.ends_at)
        return Alert.of(self.labels, self.annotations, *times, self.generator_url, now_unix_ns)


class AlertResults(ApiReply):
    """What became of the alerts of a request."""

    results: Annotated[dict[AlertResult, int], Field(examples=[{"begun": 1, "repeated": 2, "waiting": 1}])]
    """How many of them have each result."""
    waiting: Annotated[list[str], Field(examples=[["DiskFull"]])]
    """Names of those that no incident has, at most 16: no known job runs where they come from, or it has too many."""


class AlertStatus(ApiReply):
    """Whether an incident has an alert."""

    state: Annotated[str, Field(examples=["active"])]
    """active: an incident has it; unprocessed: none has."""
    silenced_by: Annotated[list[str], Field(alias="silencedBy", examples=[[]])]
    """Always empty: silences act on incidents. The same for inhibition."""
    inhibited_by: Annotated[list[str], Field(alias="inhibitedBy", examples=[[]])]


class ShownAlert(ApiReply):
    """An alert that fires, as an Alertmanager shows it, and its jobs."""

    labels: Labels
    annotations: Annotations
    starts_at: Annotated[TimeText, Field(alias="startsAt")]
    ends_at: Annotated[TimeText, Field(alias="endsAt")]
    updated_at: Annotated[TimeText, Field(alias="updatedAt")]
    generator_url: Annotated[str, Field(alias="generatorURL", examples=[QUERY])]
    fingerprint: Annotated[str, Field(examples=["13d21d7b245ea7b0"])]
    receivers: Annotated[list[dict[str, str]], Field(examples=[[]])]
    """Always empty: receivers are those of incidents."""
    status: AlertStatus
    jobs: list[str]
    """The jobs with an incident of it."""


@router.post("")
def receive_alerts(
    request: Request,
    body: Annotated[list[PostedAlert], Field(max_length=ALERTS_PER_REQUEST_MAX)],
    context: Ctx,
    identity: Sender,
) -> AlertResults:
    """Receive firing and resolved alerts, as Prometheus and amtool send them. Repeats change nothing.

    If some cannot be accepted, the others are taken all the same, and the request is refused.
    """
    now = context.clock.unix_ns()
    alerts, errors, counts = dict[str, Alert](), list[dict[str, str]](), Counter[AlertResult]()
    for index, posted in enumerate(body):
        try:
            alert = posted.read(now)
        except ValueError as error:
            errors.append({"loc": f"body.{index}", "msg": str(error)})
            continue
        if alert.is_own:
            counts[AlertResult.OWN] += 1
        else:
            alerts[alert.fingerprint] = alert
    counts[AlertResult.MALFORMED] = len(errors)
    taken = list(alerts.values())
    known = context.settings.alert_job_label_names
    results = store_alerts(context.engine, context.controls, taken, known, identity.may_see, now) if taken else []
    counts.update(results)
    context.counters.count_alerts(counts)
    request.scope["alerts"] = counts  # for the metrics of the process that has relayed the request
    if errors:
        detail = f"{len(errors)} of {len(body)} alerts cannot be accepted; all others were taken"
        raise ProblemError(400, detail, errors=errors[:LISTED_MAX])
    if refused := counts[AlertResult.REFUSED]:
        detail = f"{ALERTS_MAX} alerts fire already: {refused} of {len(body)} were not taken"
        raise ProblemError(503, detail, headers={"Retry-After": str(RETRY_AFTER_S)})
    waiting = [alert.name for alert, result in zip(taken, results, strict=True) if result is AlertResult.WAITING]
    return AlertResults(
        results={result: count for result, count in sorted(counts.items()) if count},
        waiting=list(dict.fromkeys(waiting))[:LISTED_MAX],
    )


@router.get("")
def list_alerts(
    context: Ctx,
    identity: Reader,
    matchers: Annotated[list[str], Query(alias="filter", max_length=20)] = [],  # noqa: B006 - FastAPI copies it
    active: bool = True,
    unprocessed: bool = True,
    silenced: bool = True,  # noqa: ARG001 - amtool sends it
    inhibited: bool = True,  # noqa: ARG001 - the same
    receiver: str = "",
) -> list[ShownAlert]:
    """Alerts that fire, oldest first, with the parameters of an Alertmanager.

    `active` are those that an incident has, `unprocessed` those that none has. `filter` is a matcher such as
    `severity="critical"`. Here alerts are neither silenced nor inhibited, and have no receivers, but their incidents.
    """
    try:
        wanted = [matcher for text in matchers for matcher in parse_matchers(text)]
    except ValueError as error:
        raise ProblemError(422, str(error)) from error
    if receiver:
        return []
    with read(context.engine) as connection:
        shown = _shown(connection, identity, wanted)
    states = {"active": active, "unprocessed": unprocessed}
    return [alert for alert in shown if states[alert.status.state]]


def _shown(connection: Connection, identity: Identity, matchers: Sequence[Matcher]) -> list[ShownAlert]:
    mine = identity.jobs.clause(AlertRow.job)
    if not identity.jobs.every:
        mine &= AlertRow.job != NO_JOB
    query = select(AlertRow.__table__).where(mine).order_by(AlertRow.starts_unix_ns, AlertRow.fingerprint, AlertRow.job)
    found: dict[str, dict[str, Any]] = {}
    for row in connection.execute(query).mappings():
        if not match_all(matchers, row["labels"]):
            continue
        alert = found.setdefault(row["fingerprint"], {**row, "jobs": []})
        if row["is_reported"]:
            alert["jobs"].append(row["job"])
    return [
        ShownAlert.model_validate(
            {
                "labels": alert["labels"],
                "annotations": alert["annotations"],
                "startsAt": time_text(alert["starts_unix_ns"]),
                "endsAt": time_text(alert["ends_unix_ns"]),
                "updatedAt": time_text(alert["updated_unix_ns"]),
                "generatorURL": alert["url"],
                "fingerprint": alert["fingerprint"],
                "receivers": [],
                "status": {"state": "active" if alert["jobs"] else "unprocessed", "silencedBy": [], "inhibitedBy": []},
                "jobs": alert["jobs"],
            }
        )
        for alert in found.values()
    ]


def _unix_ns(time: datetime | None) -> int | None:
    """A time in nanoseconds since 1970, within what the database takes; None if it is not set."""
    if time is None or time.year == _UNSET_YEAR:
        return None
    return min(max((time - _EPOCH) // timedelta(microseconds=1) * 1_000, 0), _UNIX_NS_MAX)


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


@waiting_router.get("/waiting")
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
