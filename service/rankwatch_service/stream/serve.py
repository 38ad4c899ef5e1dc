"""The stream as a process of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from urllib.parse import quote

from sqlalchemy import Engine

from rankwatch_detectors.catalogue import detectors
from rankwatch_service.clock import Clock, SystemClock
from rankwatch_service.job.job import Links
from rankwatch_service.log.base import Log
from rankwatch_service.log.control_log import ControlLog, ControlTail
from rankwatch_service.log.sql_log import SqlLog
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.stream.loop import Stream, TellRefused
from rankwatch_service.stream.malloc_tuning import tune
from rankwatch_service.stream.process import Member, Source, Stop
from rankwatch_service.stream.sources.sql import SoleReader
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
        # The client is an extra, which those who keep telemetry in the store need not install.
        from rankwatch_service.stream.sources.kafka import follow_kafka  # noqa: PLC0415

        follow_kafka(engine, settings, clock, links, stop)
    else:
        follow(engine, SqlLog(engine, clock), clock, links, stop)
    engine.dispose()


def follow(engine: Engine, log: SqlLog, clock: Clock, links: Links, stop: Stop) -> None:
    """Keep the streams of a log in the store going until asked to stop.

    Raises:
        FencedError: another process owns the log; this one must end.
    """
    member_over(engine, log, SoleReader(log, clock), clock, links).run(stop)


def links_of(public_url: str) -> Callable[[str, str], Mapping[str, str]]:
    """Where receivers can read on about an incident."""

    def links(job: str, incident_id: str) -> Mapping[str, str]:
        return {"incident": f"{public_url}/incidents/{incident_id}", "job": f"{public_url}/jobs/{quote(job, safe='')}"}

    return links


def member_over(
    engine: Engine, log: Log, source: Source, clock: Clock, links: Links, tell_refused: TellRefused | None = None
) -> Member:
    """What keeps the streams of the source's partitions of the log going, with the detectors of the catalogue."""
    controls = ControlTail(ControlLog(engine, clock))

    def make_stream(partition: int) -> Stream:
        series = SeriesWriter(engine, clock)
        return Stream(engine, log, controls, clock, detectors, links, series, partition, tell_refused)

    return Member(engine, source, controls, clock, make_stream)
