"""The notifier as a process of its own."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Final

from rankwatch_service.access.secret_key import SecretKey, load_secret_key
from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.email_sender import EmailSender
from rankwatch_service.notify.heartbeat import Heartbeat
from rankwatch_service.notify.http_sender import HttpSender
from rankwatch_service.notify.lease import Lease
from rankwatch_service.notify.message_links import PURPOSE, LinkSender, SignedLinks
from rankwatch_service.notify.notifier import Notifier
from rankwatch_service.notify.outbox import OutboxTable
from rankwatch_service.notify.router import Router
from rankwatch_service.notify.sender import MessageSender, SenderTable
from rankwatch_service.settings import Settings
from rankwatch_service.store.change_watch import ChangeWatch
from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import once_it_answers, upgrade
from rankwatch_service.text_log import configure

LOOKUP_THREADS: Final = 32
"""Concurrent DNS look-ups. Each blocks a thread, and a look-up that hangs must not delay other receivers."""


def run(settings: Settings) -> None:
    """Deliver notifications until SIGTERM or SIGINT.

    Raises:
        StoreBusyError: see `once_it_answers`.
        SecretKeyError: see `load_secret_key`.
    """
    configure(settings.log_level, "notify")
    asyncio.run(_run(settings))


async def _run(settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    # The event loop resolves names in its default executor.
    loop.set_default_executor(ThreadPoolExecutor(LOOKUP_THREADS, "lookup"))
    clock = SystemClock()
    engine = open_engine(settings.database_url, "notify")

    def begin() -> SecretKey:
        upgrade(engine)
        return load_secret_key(settings, engine, clock)

    secret_key = once_it_answers(begin, clock)
    lease = Lease(engine, "notify", clock)
    changes = ChangeWatch(engine)
    with ThreadPoolExecutor(1, "database") as database:
        async with (
            HttpSender(clock, settings.private_targets(), settings.public_url) as http,
            EmailSender(settings.mail_server(), clock) as email,
        ):
            web, mail = _with_links(settings, secret_key, http), _with_links(settings, secret_key, email)
            senders = {"http": web, "https": web, "mailto": mail}
            notifier = Notifier(
                Router(engine, lease),
                OutboxTable(engine, lease),
                lease,
                SenderTable(secret_key, senders),
                changes,
                clock,
                random.SystemRandom(),
                database,
            )
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, notifier.stop)
            async with _beating(settings, Heartbeat(engine, lease, clock, database, settings.heartbeat_url)):
                await notifier.run()
    changes.close()
    engine.dispose()


def _with_links(settings: Settings, secret_key: SecretKey, sender: MessageSender) -> MessageSender:
    """The sender with links in its messages, if they shall have them."""
    if not settings.message_links:
        return sender
    return LinkSender(SignedLinks(secret_key.derive(PURPOSE), settings.public_url), sender)


@asynccontextmanager
async def _beating(settings: Settings, heartbeat: Heartbeat) -> AsyncIterator[None]:
    """Beat meanwhile, if a URL is configured."""
    if not settings.heartbeat_url:
        yield
        return
    task = asyncio.create_task(heartbeat.run(settings.heartbeat_s))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
