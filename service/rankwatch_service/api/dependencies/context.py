"""What all routes share: settings, database, log, clock, and the parts that run beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy import Engine

from rankwatch.wire import View
from rankwatch_service.access.identities import Authenticator
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
    """Made once by `create_app`."""

    settings: Settings
    engine: Engine
    controls: ControlLog
    clock: Clock
    authenticator: Authenticator
    cursors: CursorSigner
    changes: ChangeFeed
    orders: OrderCache
    intake: Intake
    views: Batcher[View]
    counters: Counters
    driver: DriverThread
    streams: dict[str, int] = field(default_factory=dict)
    """Open event streams by token."""


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Ctx = Annotated[Context, Depends(_context)]
