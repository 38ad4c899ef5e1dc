"""The outbound heartbeat: asks for a URL as long as the chain from telemetry to notifications lives.

Whoever watches that URL (Healthchecks, Dead Man's Snitch, Uptime Kuma, …) raises the alarm when nobody asks for it any
more, so the end of the whole service is noticed as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final

import httpx2
import structlog
from sqlalchemy import Connection, Engine, func, select
from sqlalchemy.exc import SQLAlchemyError

from rankwatch_service.clock import Clock
from rankwatch_service.notify.lease import Lease
from rankwatch_service.store.engine import read, upsert, write
from rankwatch_service.store.errors import StoreError
from rankwatch_service.store.models import Setting, StreamReport

SETTING: Final = "heartbeat"
"""Setting with {success_unix_ns, error}: when the URL last answered with 2xx, and what is wrong now."""

BEAT_TIMEOUT_S: Final = 10.0
"""How long the URL may take to answer."""

SILENT_S: Final = 60.0
"""Stream reports every few seconds; this late, it hangs."""

_log = structlog.get_logger(__name__)


class Heartbeat:
    """Asks for a URL in an interval while this process holds the lease and the chain lives."""

    def __init__(self, engine: Engine, lease: Lease, clock: Clock, blocking: Executor, url: str) -> None:
        """Nothing is asked for before `run`.

        Args:
            engine: the store.
            lease: of the notifier; who does not hold it asks for nothing.
            clock: stamps.
            blocking: runs work on the database.
            url: what is asked for, by GET.
        """
        self._engine = engine
        self._lease = lease
        self._clock = clock
        self._blocking = blocking
        self._url = url
        self._error = ""

    async def run(self, interval_s: float) -> None:
        """Beat every `interval_s` seconds until cancelled."""
        async with httpx2.AsyncClient(follow_redirects=False, timeout=BEAT_TIMEOUT_S) as client:
            while True:
                if self._lease.valid:
                    await self.beat(client)
                await asyncio.sleep(interval_s)

    async def beat(self, client: httpx2.AsyncClient) -> str:
        """Request the URL once if the chain is alive; return why this was not done or failed, else an empty text."""
        now_unix_ns = self._clock.unix_ns()
        try:
            error: str = await self._in_thread(self._gap, now_unix_ns)
            if not error:
                error = await self._ask(client)
            await self._in_thread(self._store, now_unix_ns, error)
        except (SQLAlchemyError, StoreError) as failed:
            error = f"the database does not answer: {failed}"
        if error and error != self._error:
            _log.error("heartbeat_missed", error=error)
        elif self._error and not error:
            _log.info("heartbeat_goes_on")
        self._error = error
        return error

    async def _ask(self, client: httpx2.AsyncClient) -> str:
        try:
            response = await client.get(self._url)
        except httpx2.HTTPError as failed:
            return f"{type(failed).__name__}: {failed}"
        return "" if response.is_success else f"the URL answered {response.status_code}"

    def _gap(self, now_unix_ns: int) -> str:
        with read(self._engine) as connection:
            return chain_gap(connection, now_unix_ns)

    def _store(self, now_unix_ns: int, error: str) -> None:
        with write(self._engine) as connection:
            stored = connection.scalar(select(Setting.value).where(Setting.name == SETTING)) or {}
            success_unix_ns = stored.get("success_unix_ns") if error else now_unix_ns
            value = {"success_unix_ns": success_unix_ns, "error": error}
            row = {"name": SETTING, "value": value, "updated_unix_ns": now_unix_ns}
            connection.execute(upsert(connection, Setting, row), row)

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._blocking, call, *arguments)


def chain_gap(connection: Connection, now_unix_ns: int) -> str:
    """The broken link of the chain from telemetry to notifications, for people; empty: the chain is alive.

    That this process delivers is proved by its lease, which the loop renews that starts the tries. A receiver that does
    not answer breaks nothing.
    """
    late_unix_ns = now_unix_ns - int(SILENT_S * 1e9)
    reported_unix_ns = connection.scalar(select(func.min(StreamReport.at_unix_ns)))
    if reported_unix_ns is None:
        return "no stream process has ever reported"
    if reported_unix_ns < late_unix_ns:
        return f"a partition has no stream process since {(now_unix_ns - reported_unix_ns) / 1e9:.0f} s"
    return ""
