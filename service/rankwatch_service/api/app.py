"""Builds the application. Nothing runs until it is served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Final

from fastapi import APIRouter, Depends, FastAPI
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine
from starlette.middleware.gzip import GZipMiddleware

from rankwatch.wire import View
from rankwatch_service.access.identities import Authenticator
from rankwatch_service.access.refusals import Refusals
from rankwatch_service.api.background.change_feed import ChangeFeed
from rankwatch_service.api.background.counters import Counters, StoreCollector
from rankwatch_service.api.background.driver_thread import DriverThread
from rankwatch_service.api.background.housekeeping import remove_expired
from rankwatch_service.api.background.order_cache import OrderCache
from rankwatch_service.api.dependencies.context import Context
from rankwatch_service.api.http import problem
from rankwatch_service.api.http.cursor import load_cursor_signer
from rankwatch_service.api.http.gate import Gate
from rankwatch_service.api.http.openapi import describe
from rankwatch_service.api.http.query_parameters import reject_unknown_parameters
from rankwatch_service.api.ingest.batcher import Batcher
from rankwatch_service.api.ingest.intake import Intake
from rankwatch_service.api.routes import (
    agents,
    charts,
    commands,
    events,
    hosts,
    incidents,
    jobs,
    policy,
    receivers,
    silences,
    telemetry,
)
from rankwatch_service.api.routes.system import audit_trail, health, metrics, sessions, stream, tokens
from rankwatch_service.clock import Clock
from rankwatch_service.dashboard import mount
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.orders.driver import Driver
from rankwatch_service.orders.running_attempt import store_views
from rankwatch_service.series.retention import tiers, trim
from rankwatch_service.settings import Settings
from rankwatch_service.store.change_watch import ChangeWatch

BASE: Final = "/api/v1"
RESOURCES: Final = (
    telemetry,
    agents,
    jobs,
    charts,
    incidents,
    commands,
    receivers,
    silences,
    hosts,
    stream,
    events,
    policy,
    audit_trail,
    tokens,
    sessions,
)


def create_app(settings: Settings, engine: Engine, intake: Intake, clock: Clock) -> FastAPI:
    """Build the application.

    Args:
        settings: settings of the service.
        engine: an open database with this version's tables.
        intake: stores accepted telemetry.
        clock: the clock for the whole application.
    """
    context = _context(settings, engine, intake, clock)
    app = FastAPI(
        title="rankwatch",
        version=version("rankwatch"),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=_lifespan,
        # Any site can make a browser send text/plain without a preflight, so JSON must be declared as such.
        strict_content_type=True,
    )
    app.state.context = context
    problem.install(app)
    api = APIRouter(prefix=BASE, dependencies=[Depends(reject_unknown_parameters)])
    for resource in RESOURCES:
        api.include_router(resource.router)
    app.include_router(api)
    app.include_router(health.router)
    app.include_router(metrics.router, dependencies=[Depends(reject_unknown_parameters)])
    describe(app)
    mount(app)
    app.add_middleware(GZipMiddleware, minimum_size=1_024)
    # Added last, so that it is the outermost: it refuses requests before any other code sees them.
    app.add_middleware(
        Gate,
        authenticator=context.authenticator,
        refusals=context.refusals,
        public_url=context.settings.public_url,
    )
    return app


def _context(settings: Settings, engine: Engine, intake: Intake, clock: Clock) -> Context:
    registry = CollectorRegistry()
    counters = Counters(registry)
    registry.register(StoreCollector(engine, clock, log_in_store=not settings.kafka))
    authenticator = Authenticator(engine, clock)
    refusals = Refusals(engine, clock, lambda status: counters.refused.labels(status).inc())

    def housekeeping() -> None:
        authenticator.store_last_used()
        refusals.store()
        remove_expired(engine, clock.unix_ns())
        trimmed = trim(engine, *tiers(settings), clock.unix_ns())
        for tier, rows in (("raw", trimmed.chunks), ("rollup", trimmed.rollups)):
            counters.series_trimmed.labels(tier).inc(rows)

    def keep_views(views: Sequence[View]) -> None:
        store_views(engine, views, clock.unix_ns())

    controls = ControlLog(engine, clock)
    driver = Driver(engine, controls, clock)
    driver_thread = DriverThread(driver.run_once, housekeeping, counters.driver_failures.inc, clock)
    return Context(
        settings=settings,
        engine=engine,
        controls=controls,
        clock=clock,
        authenticator=authenticator,
        refusals=refusals,
        cursors=load_cursor_signer(engine, clock),
        changes=ChangeFeed(ChangeWatch(engine), driver_thread.wake),
        orders=OrderCache(engine, clock),
        intake=intake,
        views=Batcher("views", keep_views),
        counters=counters,
        driver=driver_thread,
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: Context = app.state.context
    context.intake.start()
    context.views.start()
    context.changes.start()
    context.driver.start()
    yield
    await context.changes.close()
    await context.intake.stop()
    await context.views.stop()
    context.driver.stop()
    context.authenticator.store_last_used()
    context.refusals.store()
