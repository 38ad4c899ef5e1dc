"""Builds the application. Nothing runs until it is served."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Depends, FastAPI
from prometheus_client import CollectorRegistry
from sqlalchemy import Engine
from starlette.concurrency import run_in_threadpool
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import BaseRoute

from rankwatch_service.access.agents import Agents, AgentSecrets, Renewals
from rankwatch_service.access.budgets import Account, Budgets
from rankwatch_service.access.identities import Authenticator
from rankwatch_service.access.oidc_provider import OidcProvider
from rankwatch_service.access.refusals import Refusals
from rankwatch_service.access.secret_key import SecretKey
from rankwatch_service.alerts import AlertResult
from rankwatch_service.api.background.change_feed import ChangeFeed, FeedTail
from rankwatch_service.api.background.counters import Counters, StoreCollector
from rankwatch_service.api.background.driver_thread import DriverThread
from rankwatch_service.api.background.health_facts import HealthReader
from rankwatch_service.api.background.housekeeping import AlertExpiry, remove_expired, report_changed_precision
from rankwatch_service.api.background.order_cache import OrderCache
from rankwatch_service.api.background.order_feed import OrderFeed
from rankwatch_service.api.dependencies import Context
from rankwatch_service.api.http import problem
from rankwatch_service.api.http.gate import Gate, TrustedProxies, own_names
from rankwatch_service.api.http.paging import CursorSigner, reject_unknown_parameters
from rankwatch_service.api.http.relay import PeopleRelay, Relayed
from rankwatch_service.api.http.turns import BUSY_TURNS_MAX, Turns
from rankwatch_service.api.ingest import Batcher, Forgeries, Intake, NewJobs
from rankwatch_service.api.openapi import describe
from rankwatch_service.api.routes import (
    agents,
    alerts,
    audit_trail,
    commands,
    devices,
    events,
    explanations,
    health,
    hosts,
    incident_totals,
    incidents,
    jobs,
    metric_rules,
    notifications,
    people,
    policy,
    precision,
    previews,
    receivers,
    sessions,
    silences,
    steps,
    telemetry,
    tokens,
    tuning,
)
from rankwatch_service.api.routes.message_links import LinkRoutes
from rankwatch_service.api.routes.sessions import LoginRoutes
from rankwatch_service.clock import Clock
from rankwatch_service.dashboard import mount
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.log.sql_log import SqlLog
from rankwatch_service.orders.driver import Driver
from rankwatch_service.orders.running_attempt import ReceivedView, ViewSizes, store_views
from rankwatch_service.policy.control_records import TelemetryRefused, encode_control
from rankwatch_service.series.rows import tiers, trim
from rankwatch_service.settings import Settings
from rankwatch_service.store.change_watch import ChangeWatch
from rankwatch_service.store.engine import write
from rankwatch_service.store.migrate import once_it_answers

BASE: Final = "/api/v1"
ALERTMANAGER_BASE: Final = "/api/v2"
"""Where clients of an Alertmanager look for its API."""

RESOURCES: Final = (
    telemetry,
    agents,
    jobs,
    steps,
    devices,
    incident_totals,
    incidents,
    explanations,
    precision,
    commands,
    receivers,
    notifications,
    silences,
    hosts,
    events,
    policy,
    metric_rules,
    tuning,
    previews,
    audit_trail,
    tokens,
    people,
    sessions,
)


def create_app(
    settings: Settings, engine: Engine, intake: Intake, clock: Clock, secret_key: SecretKey, people: Path | None = None
) -> FastAPI:
    """Build the application.

    Args:
        settings: settings of the service.
        engine: an open database with this version's tables.
        intake: stores accepted telemetry.
        clock: the clock for the whole application.
        secret_key: the one of this database.
        people: where the process that answers people listens; None if there is none.
    """
    context = _context(settings, engine, intake, clock, secret_key)
    app = _application(context, _lifespan)
    provider = context.provider
    page = mount(app, provider.name if provider else "", provider.begin_url if provider else "")
    LinkRoutes(context).mount(app)
    if provider is not None:
        LoginRoutes(context, provider, page).mount(app)

    def waited(account: Account) -> None:
        context.counters.waited.labels(account.whose).inc()

    turns = Turns(clock, waited, BUSY_TURNS_MAX)
    # What is added later is further outside.
    app.add_middleware(GZipMiddleware, minimum_size=1_024)
    if people is not None:
        counters = context.counters
        app.add_middleware(
            PeopleRelay,
            socket=people,
            authenticator=context.authenticator,
            answered_here=counters.not_relayed.inc,
            count_alerts=counters.count_alerts,
        )
    app.add_middleware(
        Gate,
        authenticator=context.authenticator,
        refusals=context.refusals,
        public_url=settings.public_url,
        own_names=own_names(settings, socket.gethostname()),
        proxies=TrustedProxies(settings.trusted_proxies),
        turns=turns,
        relayed_turns=turns if people is None else Turns(clock, waited),
    )
    return app


def create_people_app(settings: Settings, engine: Engine, clock: Clock, secret_key: SecretKey) -> FastAPI:
    """Build the application of the process that answers people: it takes requests from the first process alone."""
    context = _context(settings, engine, Batcher("append", SqlLog(engine, clock).append), clock, secret_key)
    app = _application(context, _people_lifespan)
    app.add_middleware(GZipMiddleware, minimum_size=1_024)
    app.add_middleware(Relayed, authenticator=context.authenticator)
    return app


def _application(context: Context, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]) -> FastAPI:
    app = FastAPI(
        title="rankwatch",
        version=version("rankwatch"),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
    )
    app.state.context = context
    problem.install(app)
    app.router.routes.extend(_routes())
    describe(app)
    return app


@cache
def _routes() -> Sequence[BaseRoute]:
    """The same for every application of a process: to prepare them for requests takes FastAPI longer than all else."""
    # Any site can make a browser send text/plain without a preflight, so JSON must be declared as such.
    root = APIRouter(strict_content_type=True)
    checked = [Depends(reject_unknown_parameters)]
    for resource in RESOURCES:
        root.include_router(resource.router, prefix=BASE, dependencies=checked)
    for router in (alerts.waiting_router, health.service_router):
        root.include_router(router, prefix=BASE, dependencies=checked)
    root.include_router(alerts.router, prefix=ALERTMANAGER_BASE, dependencies=checked)
    root.include_router(health.router)
    root.include_router(health.metrics_router, dependencies=checked)
    return root.routes


def _context(settings: Settings, engine: Engine, intake: Intake, clock: Clock, secret_key: SecretKey) -> Context:
    registry = CollectorRegistry()
    counters = Counters(registry)
    registry.register(StoreCollector(engine, clock, log_in_store=not settings.kafka))
    authenticator = Authenticator(engine, clock)
    budgets = Budgets(clock, lambda what, whose: counters.budget_refused.labels(what, whose).inc())
    counters.watch(budgets)
    refusals = Refusals(engine, clock, lambda status: counters.refused.labels(status).inc())

    controls = ControlLog(engine, clock)

    def report(job: str, record: TelemetryRefused) -> None:
        with write(engine) as connection:
            controls.append_in(connection, [Entry(job, encode_control(record))])

    new_jobs = NewJobs(engine, clock, report)
    alert_expiry = AlertExpiry(engine, controls, clock)

    def housekeeping() -> None:
        authenticator.store_last_used()
        refusals.store()
        new_jobs.report_due()
        report_changed_precision(engine, controls, clock)
        counters.alerts.labels(AlertResult.EXPIRED).inc(alert_expiry.run())
        remove_expired(engine, clock.unix_ns())
        trimmed = trim(engine, *tiers(settings), clock.unix_ns())
        for tier, rows in (("raw", trimmed.chunks), ("rollup", trimmed.rollups)):
            counters.series_trimmed.labels(tier).inc(rows)

    def keep_views(views: Sequence[ReceivedView]) -> None:
        store_views(engine, views, clock.unix_ns())

    driver = Driver(engine, controls, clock)
    driver_thread = DriverThread(driver.run_once, housekeeping, counters.driver_failures.inc, clock)
    changes, orders = ChangeFeed(ChangeWatch(engine), driver_thread.wake), OrderCache(engine, clock)
    return Context(
        settings=settings,
        engine=engine,
        controls=controls,
        clock=clock,
        authenticator=authenticator,
        refusals=refusals,
        secret_key=secret_key,
        budgets=budgets,
        new_jobs=new_jobs,
        cursors=CursorSigner(secret_key.derive("cursors")),
        changes=changes,
        tail=FeedTail(engine),
        orders=orders,
        order_feed=OrderFeed(orders, changes, counters.order_failures.inc),
        intake=intake,
        views=Batcher("views", keep_views),
        view_sizes=ViewSizes(),
        counters=counters,
        driver=driver_thread,
        agents=Agents(engine, AgentSecrets(secret_key), clock),
        forgeries=Forgeries(engine, controls, clock),
        renewals=Renewals(engine, authenticator, clock),
        health=HealthReader(engine, settings, clock),
        provider=OidcProvider(settings, clock) if settings.oidc_issuer else None,
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: Context = app.state.context
    await run_in_threadpool(once_it_answers, context.new_jobs.load, context.clock)
    context.intake.start()
    context.views.start()
    context.changes.start()
    context.order_feed.start()
    context.driver.start()
    yield
    await context.changes.close()
    await context.order_feed.close()
    await context.intake.stop()
    await context.views.stop()
    context.driver.stop()
    context.authenticator.store_last_used()
    context.refusals.store()


@asynccontextmanager
async def _people_lifespan(app: FastAPI) -> AsyncIterator[None]:
    context: Context = app.state.context
    context.changes.start()
    yield
    await context.changes.close()
