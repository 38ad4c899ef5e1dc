"""The role `stream`: builds a stream process and runs it."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Mapping
from urllib.parse import quote

from sqlalchemy import Engine

from rankwatch_detectors.catalogue import detectors
from rankwatch_service.clock import Clock, SystemClock
from rankwatch_service.job.job import Links
from rankwatch_service.log.control_log import ControlLog, ControlTail
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.stream.loop import PublishRefused, Stream
from rankwatch_service.stream.malloc_tuning import tune
from rankwatch_service.stream.process import Stop, StreamProcess
from rankwatch_service.stream.sources.base import Source
from rankwatch_service.stream.sources.sql import SqlSource
from rankwatch_service.stream.status import new_counts
from rankwatch_service.text_log import configure


def run(settings: Settings) -> None:
    """Process the log until SIGTERM or SIGINT."""
    configure(settings.log_level, "stream")
    tune()
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.ask)
    engine = open_engine(settings.database_url, "stream")
    upgrade(engine)
    clock, links = SystemClock(), links_of(settings.public_url)
    if settings.kafka:
        follow_kafka(engine, settings, clock, links, stop)
    else:
        follow_sql(engine, clock, links, stop)
    engine.dispose()


def follow_sql(engine: Engine, clock: Clock, links: Links, stop: Stop) -> None:
    """Run the stream over the log in the store until asked to stop.

    Raises:
        FencedError: another process owns the log; this one must end.
    """
    process_over(engine, SqlSource(engine, clock), clock, links, new_counts()).run(stop)


def follow_kafka(
    engine: Engine, settings: Settings, clock: Clock, links: Links, stop: Stop, session_ms: int | None = None
) -> None:
    """Run the streams of the partitions that the consumer group assigns to this process, until asked to stop.

    Args:
        engine: the store.
        settings: the brokers, and how missing topics are created.
        clock: for ticks and durations.
        links: pages about an incident, for notifications.
        stop: when to end.
        session_ms: session time-out of the consumer group; None: `kafka_consumer.SESSION_MS`.
    """
    # The client is an extra that is not installed where telemetry is kept in the store.
    from rankwatch_service.stream.sources.kafka_open import open_kafka  # noqa: PLC0415

    counts = new_counts()
    session = {} if session_ms is None else {"session_ms": session_ms}
    with open_kafka(settings, clock, counts, lambda: stop.asked, **session) as (source, dead_letters):
        process_over(engine, source, clock, links, counts, dead_letters.publish).run(stop)


def links_of(public_url: str) -> Callable[[str, str], Mapping[str, str]]:
    """Pages about an incident, for notifications."""

    def links(job: str, incident_id: str) -> Mapping[str, str]:
        return {"incident": f"{public_url}/incidents/{incident_id}", "job": f"{public_url}/jobs/{quote(job, safe='')}"}

    return links


def process_over(
    engine: Engine,
    source: Source,
    clock: Clock,
    links: Links,
    counts: Counter[str],
    publish_refused: PublishRefused | None = None,
) -> StreamProcess:
    """A stream process over this source, with the detectors of the catalogue."""
    controls = ControlTail(ControlLog(engine, clock))

    def make_stream(partition: int) -> Stream:
        series = SeriesWriter(engine, clock)
        return Stream(engine, source, controls, clock, detectors, links, series, partition, publish_refused)

    return StreamProcess(engine, source, controls, clock, make_stream, counts)
