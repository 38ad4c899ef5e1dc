"""Liveness and readiness of this process, its metrics, and whether rankwatch itself works (`GET /api/v1/health`)."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Response
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from sqlalchemy import text

from rankwatch_detectors.base import Severity
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.background.health_facts import OF_NO_JOB, HealthFacts, HealthProblem, StreamState, evaluate
from rankwatch_service.api.dependencies import Ctx, Require
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.store.engine import read
from rankwatch_service.store.errors import SchemaError, StoreError
from rankwatch_service.store.migrate import check

router = APIRouter(tags=["health"])
metrics_router = APIRouter(tags=["health"])
service_router = APIRouter(prefix="/health", tags=["health"])


class Liveness(ApiReply):
    """The process is alive."""

    live: bool = True


class Readiness(ApiReply):
    """What the process needs, each "ok" or with the problem."""

    ready: bool
    checks: dict[str, str]


@router.get("/livez")
async def livez() -> Liveness:
    """Whether the event loop runs. Independent of the database, so that an outage of it restarts no process."""
    return Liveness()


@router.get("/readyz", responses={503: {"model": Readiness}})
def readyz(context: Ctx, response: Response) -> Readiness:
    """Whether the database answers and has this version's tables, and orders are being driven."""
    checks = {"database": "ok", "schema": "ok", "driver": "ok" if context.driver.alive else "not running"}
    try:
        with read(context.engine) as connection:
            connection.execute(text("SELECT 1"))
        check(context.engine)
    except SchemaError as error:
        checks["schema"] = str(error)
    except StoreError as error:
        checks["database"] = str(error)
    ready = all(state == "ok" for state in checks.values())
    if not ready:
        response.status_code = 503
    return Readiness(ready=ready, checks=checks)


@metrics_router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"application/openmetrics-text": {"schema": {"type": "string"}}}}},
)
def metrics(context: Ctx, _identity: Annotated[Identity, Depends(Require(Scope.READ, every_job=True))]) -> Response:
    """Metrics of this process and of the state that all processes share, as OpenMetrics text."""
    content: bytes = generate_latest(context.counters.registry)  # type: ignore[no-untyped-call]
    return Response(content, media_type=CONTENT_TYPE_LATEST)


class ServiceHealth(HealthFacts):
    """The parts of rankwatch, and what is wrong with them."""

    version: str
    """Version of the api process that answers."""
    state: Literal["ok", "warning", "critical"]
    """The severity of the worst problem."""
    problems: list[HealthProblem]
    """Critical ones first; empty: all is well."""


@service_router.get("")
def show_health(context: Ctx, identity: Annotated[Identity, Depends(Require(Scope.READ))]) -> ServiceHealth:
    """Stream, notifier, receivers, agents, detectors and database as last reported, and what is wrong with them.

    A token that is restricted to some jobs gets only what names no job, host or receiver.
    """
    facts = context.health.facts()
    problems = evaluate(facts, driver_alive=context.driver.alive)
    if not identity.jobs.every:
        problems = [problem for problem in problems if problem.area in OF_NO_JOB]
        hidden: dict[str, object] = {name: [] for name in ("receivers", "agents", "detectors_off", "dropped")}
        counts: dict[str, object] = {"agents_total": 0, "agents_silent": 0}
        unnamed = StreamState(partitions=[], processes=[])
        facts = facts.model_copy(update=hidden | counts | {"stream": unnamed})
    worst = problems[0].severity if problems else None
    return ServiceHealth(
        **dict(facts),
        version=version("rankwatch"),
        state="critical" if worst is Severity.CRITICAL else "warning" if problems else "ok",
        problems=problems,
    )
