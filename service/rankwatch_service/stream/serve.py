"""The role `stream`: builds a stream process and runs it."""

from __future__ import annotations

import signal
from collections import Counter
from functools import partial

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
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.store.startup import once_it_answers
from rankwatch_service.stream.loop import PublishRefused, Stream
from rankwatch_service.stream.malloc_tuning import tune
from rankwatch_service.stream.process import Stop, StreamProcess
from rankwatch_service.stream.sources.base import Source
from rankwatch_service.stream.sources.sql import SqlSource
from rankwatch_service.stream.status import new_counts
from rankwatch_service.telemetry.signature import SecretOf, no_secrets
from rankwatch_service.text_log import configure


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
        session_ms: session time-out of the consumer group; None: `kafka_consumer.SESSION_MS`.
    """
    # The client is an extra that is not installed where telemetry is kept in the store.
    from rankwatch_service.stream.sources.kafka_open import open_kafka  # noqa: PLC0415

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
