"""Puts the api together. Nothing runs until the application is served."""

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
from rankwatch_service.api.background.change_feed import Pulse
from rankwatch_service.api.background.counters import Counters, StoreCollector
from rankwatch_service.api.background.driver_thread import DriverThread
from rankwatch_service.api.background.housekeeping import tidy
from rankwatch_service.api.background.order_cache import OrderBoard
from rankwatch_service.api.context import Context
from rankwatch_service.api.http import problem
from rankwatch_service.api.http.cursor import open_seal
from rankwatch_service.api.http.gate import Gate
from rankwatch_service.api.http.openapi import describe
from rankwatch_service.api.http.query_parameters import known_parameters_only
from rankwatch_service.api.ingest import agents, telemetry
from rankwatch_service.api.ingest.batcher import Batcher
from rankwatch_service.api.ingest.intake import Intake
from rankwatch_service.api.routes import charts, commands, events, hosts, incidents, jobs, policy, receivers, silences
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
    """The application over an open, migrated database; accepted telemetry goes to `intake`."""
    context = _context(settings, engine, intake, clock)
    app = FastAPI(
        title="rankwatch",
        version=version("rankwatch"),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=_lifespan,
        # A browser of another site can send text/plain without asking; what we read as JSON must say that it is.
        strict_content_type=True,
    )
    app.state.context = context
    problem.install(app)
    api = APIRouter(prefix=BASE, dependencies=[Depends(known_parameters_only)])
    for resource in RESOURCES:
        api.include_router(resource.router)
    app.include_router(api)
    app.include_router(health.router)
    app.include_router(metrics.router, dependencies=[Depends(known_parameters_only)])
    describe(app)
    mount(app)
    app.add_middleware(GZipMiddleware, minimum_size=1_024)
    app.add_middleware(Gate, authenticator=context.authenticator)
    return app


def _context(settings: Settings, engine: Engine, intake: Intake, clock: Clock) -> Context:
    registry = CollectorRegistry()
    counters = Counters(registry)
    registry.register(StoreCollector(engine, clock, log_in_store=not settings.kafka))
    authenticator = Authenticator(engine, clock)

    def tidy_up() -> None:
        authenticator.store_last_used()
        tidy(engine, clock.unix_ns())
        gone = trim(engine, *tiers(settings), clock.unix_ns())
        for tier, rows in (("raw", gone.chunks), ("rollup", gone.rollups)):
            counters.series_trimmed.labels(tier).inc(rows)

    def keep_views(views: Sequence[View]) -> None:
        store_views(engine, views, clock.unix_ns())

    controls = ControlLog(engine, clock)
    driver = Driver(engine, controls, clock)
    driving = DriverThread(driver.run_once, tidy_up, counters.driver_failures.inc, clock)
    return Context(
        settings=settings,
        engine=engine,
        controls=controls,
        clock=clock,
        authenticator=authenticator,
        seal=open_seal(engine, clock),
        pulse=Pulse(ChangeWatch(engine), driving.wake),
        board=OrderBoard(engine, clock),
        appends=intake,
        views=Batcher("views", keep_views),
        counters=counters,
        driving=driving,
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: Context = app.state.context
    context.appends.start()
    context.views.start()
    context.pulse.start()
    context.driving.start()
    yield
    await context.pulse.close()
    await context.appends.stop()
    await context.views.stop()
    context.driving.stop()
    context.authenticator.store_last_used()
