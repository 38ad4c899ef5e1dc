"""What all routes share: settings, database, control log, clock, caches and background tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy import Engine

from rankwatch.wire import View
from rankwatch_service.access.identities import Authenticator
from rankwatch_service.access.refusals import Refusals
from rankwatch_service.api.background.change_feed import ChangeFeed
from rankwatch_service.api.background.counters import Counters
from rankwatch_service.api.background.driver_thread import DriverThread
from rankwatch_service.api.background.order_cache import OrderCache
from rankwatch_service.api.http.cursor import CursorSigner
from rankwatch_service.api.ingest.batcher import Batcher
from rankwatch_service.api.ingest.intake import Intake
from rankwatch_service.clock import Clock
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.settings import Settings


@dataclass(frozen=True)
class Context:
    """Created once by `create_app`."""

    settings: Settings
    engine: Engine
    controls: ControlLog
    clock: Clock
    authenticator: Authenticator
    refusals: Refusals
    cursors: CursorSigner
    changes: ChangeFeed
    orders: OrderCache
    intake: Intake
    views: Batcher[View]
    counters: Counters
    driver: DriverThread
    streams: dict[str, int] = field(default_factory=dict)
    """Number of open event streams by token id."""


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Ctx = Annotated[Context, Depends(_context)]
