"""`GET /api/v1/health`: whether rankwatch itself works, and what is wrong with it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Literal

from fastapi import APIRouter, Depends

from rankwatch_detectors.base import Severity
from rankwatch_service.access.identities import Identity
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.background.health_facts import OF_NO_JOB, HealthFacts, HealthProblem, StreamState, evaluate
from rankwatch_service.api.dependencies import Ctx
from rankwatch_service.api.http.authorization import Require

router = APIRouter(prefix="/health", tags=["health"])


class ServiceHealth(HealthFacts):
    """The parts of rankwatch, and what is wrong with them."""

    version: str
    """Version of the api process that answers."""
    state: Literal["ok", "warning", "critical"]
    """The severity of the worst problem."""
    problems: list[HealthProblem]
    """Critical ones first; empty: all is well."""


@router.get("")
def show_health(context: Ctx, identity: Annotated[Identity, Depends(Require(Scope.READ))]) -> ServiceHealth:
    """Stream, notifier, receivers, agents, detectors and database as last reported, and what is wrong with them.

    A token that is restricted to some jobs gets only what names no job, host or receiver.
    """
    facts = context.health.facts()
    problems = evaluate(facts, driver_alive=context.driver.alive)
    if not identity.jobs.every:
        problems = [problem for problem in problems if problem.area in OF_NO_JOB]
        hidden: dict[str, object] = {
            name: [] for name in ("receivers", "unknown_receivers", "agents", "detectors_off", "dropped")
        }
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
