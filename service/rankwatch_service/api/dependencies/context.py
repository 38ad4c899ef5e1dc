"""What all routes share: settings, database, control log, clock, caches and background tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from fastapi import Depends, Request
from sqlalchemy import Engine

from rankwatch.signed import Purpose, code_of
from rankwatch.wire import SignedOrders
from rankwatch_service.access.agents import Agents, Origin, Renewals
from rankwatch_service.access.identities import Authenticator
from rankwatch_service.access.oidc_provider import OidcProvider
from rankwatch_service.access.refusals import Refusals
from rankwatch_service.access.secret_key import SecretKey
from rankwatch_service.api.background.change_feed import ChangeFeed, FeedTail
from rankwatch_service.api.background.counters import Counters
from rankwatch_service.api.background.driver_thread import DriverThread
from rankwatch_service.api.background.forgeries import Forgeries
from rankwatch_service.api.background.health_facts import HealthReader
from rankwatch_service.api.background.order_cache import OrderCache
from rankwatch_service.api.background.single_flight import SingleFlight
from rankwatch_service.api.http.paging import CursorSigner
from rankwatch_service.api.ingest import Batcher, Intake, NewJobs
from rankwatch_service.clock import Clock
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.orders.running_attempt import ReceivedView
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
    secret_key: SecretKey
    new_jobs: NewJobs
    cursors: CursorSigner
    changes: ChangeFeed
    tail: FeedTail
    orders: OrderCache
    intake: Intake
    views: Batcher[ReceivedView]
    counters: Counters
    driver: DriverThread
    agents: Agents
    forgeries: Forgeries
    renewals: Renewals
    health: HealthReader
    provider: OidcProvider | None
    """By which people log in; None: with tokens alone."""
    totals: SingleFlight = field(default_factory=SingleFlight)
    """Of incidents and jobs: what all open pages ask for at once."""
    streams: dict[str, int] = field(default_factory=dict)
    """Number of open event streams by token id."""

    def signed_orders(self, origin: Origin, agent: str, orders: bytes, nonce: str, sequence: int) -> bytes:
        """Orders for one agent, signed with its secret: `wire.SignedOrders` as JSON."""
        told = SignedOrders(orders.decode(), nonce, sequence, self.clock.unix_ns())
        secret = self.agents.secrets_of(origin.job, origin.host, agent)
        code = code_of(Purpose.ORDERS, agent, secret, told.signed_part()).hex()
        return msgspec.json.encode(msgspec.structs.replace(told, code=code))


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Ctx = Annotated[Context, Depends(_context)]
