"""The role `stream`: tunes its process, builds a stream process and runs it.

Python looks for reference cycles after every 700 new objects; records, batches and columns have none, and reference
counting frees them. The C library returns freed memory to the system, and the next batch pays for every page of it
again. `benchmarks/stream.py --untuned` measures what both save.
"""

from __future__ import annotations

import ctypes
import gc
import signal
from collections import Counter
from functools import partial
from typing import Final

from sqlalchemy import Engine

from rankwatch_detectors.catalogue import detectors
from rankwatch_service.access.agents import AgentSecrets
from rankwatch_service.access.secret_key import load_secret_key
from rankwatch_service.clock import Clock, SystemClock
from rankwatch_service.job.job import Links
from rankwatch_service.log.control_log import ControlLog, ControlTail
from rankwatch_service.policy.notification import page_links
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import once_it_answers, upgrade
from rankwatch_service.stream.loop import PublishRefused, Stream
from rankwatch_service.stream.process import Stop, StreamProcess, new_counts
from rankwatch_service.stream.sources import Source, SqlSource
from rankwatch_service.telemetry.envelope import SecretOf, no_secrets
from rankwatch_service.text_log import configure

YOUNG_MAX: Final = 20_000
"""New objects between two collections; of some hundred bytes each, so cycles hold 2 MB at most until then."""

KEPT_BYTES: Final = 256 * 1024 * 1024
"""Freed memory that the process keeps: what one read of 32 MB may need as records, columns and frames."""

ASKED_BYTES: Final = 16 * 1024 * 1024
"""Requested from the system at a time. Pages that are not used take no memory."""

MAPPED_BYTES: Final = 32 * 1024 * 1024
"""Larger blocks are mapped and unmapped one by one; glibc allows no higher threshold."""

# From glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3


def tune() -> bool:
    """Collect young objects less often and keep freed memory; older objects are collected as before.

    Returns:
        False if the C library is not glibc and has no such settings, or if it refused one.
    """
    gc.set_threshold(YOUNG_MAX, *gc.get_threshold()[1:])
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_M_TRIM_THRESHOLD, KEPT_BYTES), (_M_TOP_PAD, ASKED_BYTES), (_M_MMAP_THRESHOLD, MAPPED_BYTES))
    taken = [mallopt(name, size) for name, size in wanted]
    return 0 not in taken


def run(settings: Settings) -> None:
    """Process the log until SIGTERM or SIGINT.

    Raises:
        StoreBusyError: see `once_it_answers`.
        SecretKeyError: see `load_secret_key`.
    """
    configure(settings.log_level, "stream")
    tune()
    engine = open_engine(settings.database_url, "stream")
    clock, links = SystemClock(), partial(page_links, settings.public_url, runbook_url=settings.runbook_url)

    def begin() -> AgentSecrets:
        upgrade(engine)
        return AgentSecrets(load_secret_key(settings, engine, clock))

    secret_of = once_it_answers(begin, clock)
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.ask)
    if settings.kafka:
        follow_kafka(engine, settings, clock, links, stop, secret_of)
    else:
        follow_sql(engine, clock, links, stop, secret_of)
    engine.dispose()


def follow_sql(engine: Engine, clock: Clock, links: Links, stop: Stop, secret_of: SecretOf = no_secrets) -> None:
    """Run the stream over the log in the store until asked to stop.

    Raises:
        FencedError: another process owns the log; this one must end.
    """
    process_over(engine, SqlSource(engine, clock), clock, links, new_counts(), secret_of=secret_of).run(stop)


def follow_kafka(
    engine: Engine,
    settings: Settings,
    clock: Clock,
    links: Links,
    stop: Stop,
    secret_of: SecretOf = no_secrets,
    session_ms: int | None = None,
) -> None:
    """Run the streams of the partitions that the consumer group assigns to this process, until asked to stop.

    Args:
        engine: the store.
        settings: the brokers, and how missing topics are created.
        clock: for ticks and durations.
        links: pages about an incident, for notifications.
        stop: when to end.
        secret_of: the secrets of agents that have enrolled.
        session_ms: session time-out of the consumer group; None: `kafka_source.SESSION_MS`.
    """
    # The client is an extra that is not installed where telemetry is kept in the store.
    from rankwatch_service.stream.kafka_source import open_kafka  # noqa: PLC0415

    counts = new_counts()
    session = {} if session_ms is None else {"session_ms": session_ms}
    with open_kafka(settings, clock, counts, lambda: stop.asked, **session) as (source, dead_letters):
        process_over(engine, source, clock, links, counts, dead_letters.publish, secret_of).run(stop)


def process_over(
    engine: Engine,
    source: Source,
    clock: Clock,
    links: Links,
    counts: Counter[str],
    publish_refused: PublishRefused | None = None,
    secret_of: SecretOf = no_secrets,
) -> StreamProcess:
    """A stream process over this source, with the detectors of the catalogue."""
    controls = ControlTail(ControlLog(engine, clock))

    def make_stream(partition: int) -> Stream:
        series = SeriesWriter(engine, clock)
        return Stream(engine, source, controls, clock, detectors, links, series, partition, publish_refused, secret_of)

    return StreamProcess(engine, source, controls, clock, make_stream, counts)
