"""Receivers in the database, and the router of a notifier that nobody else disturbs."""

from collections.abc import Iterable

from sqlalchemy import Connection, Engine, insert

from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.lease import Lease
from rankwatch_service.notify.pipeline import ReceiverRoute
from rankwatch_service.notify.router import Router
from rankwatch_service.policy.announcement import Announcement
from rankwatch_service.store import models
from rankwatch_service.store.engine import write
from rankwatch_service.store.rows import announcement_row
from tests.support.values.incidents import receiver_row


class HeldLease(Lease):
    """Nobody takes it over."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, "notify", SystemClock())

    def confirm(self, connection: Connection) -> None:
        pass


def subscribe(engine: Engine, *routes: ReceiverRoute) -> None:
    """Let there be these receivers."""
    lists = ("kinds", "severities", "jobs", "projects", "matchers")
    with write(engine) as connection:
        for route in routes:
            wants = {name: list(getattr(route, name)) for name in lists}
            row = receiver_row(route.name, **wants, enabled=route.enabled, after_s=route.after_s)
            connection.execute(insert(models.Receiver).values(**row))


def announce(engine: Engine, announcements: Iterable[Announcement]) -> None:
    """Write announcements, as stream and api do."""
    if rows := list(map(announcement_row, announcements)):
        with write(engine) as connection:
            connection.execute(insert(models.Announcement), rows)


def route_all(engine: Engine, now_unix_ns: int = 0) -> None:
    """Decide who is notified of all that was announced."""
    router = Router(engine, HeldLease(engine))
    while router.route():
        pass
    router.release(now_unix_ns)
