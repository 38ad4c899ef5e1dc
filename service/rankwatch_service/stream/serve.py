"""The stream as a process of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Final
from urllib.parse import quote

import structlog
from sqlalchemy import Engine

from rankwatch_detectors.catalogue import detectors
from rankwatch_service.clock import Clock, SystemClock
from rankwatch_service.log.base import Log
from rankwatch_service.log.control import ControlLog
from rankwatch_service.log.sql import SqlLog
from rankwatch_service.settings import Settings
from rankwatch_service.store.changes import ChangeWatch
from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.store.series import SeriesWriter, trim
from rankwatch_service.stream.commit import FencedError
from rankwatch_service.stream.job import Links
from rankwatch_service.stream.loop import RECORDS_MAX, Started, Stream
from rankwatch_service.text_log import configure

POLL_S: Final = 0.01
"""Between looks at the database's change counter (3 us each) while nothing comes."""

IDLE_S: Final = 0.25
"""Between steps while nothing comes, so that a tick is at most so late."""

RETRY_S: Final = 1.0
"""Before starting anew after the database failed."""

SERIES_TRIM_S: Final = 600.0
"""Between looks at how large the series have become."""

_log = structlog.get_logger(__name__)


class Stop:
    """Set by a signal; the loop ends after the batch it is in."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, _number: int = 0, _frame: FrameType | None = None) -> None:
        """As a signal handler or by hand."""
        self.asked = True


def run(settings: Settings) -> None:
    """Process the log until SIGTERM or SIGINT."""
    configure(settings.log_level, "stream")
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.ask)
    engine = open_engine(settings.database_url)
    upgrade(engine)
    clock = SystemClock()
    follow(engine, SqlLog(engine, clock), clock, links_of(settings.public_url), stop)
    engine.dispose()


def follow(engine: Engine, log: Log, clock: Clock, links: Links, stop: Stop) -> None:
    """Keep a stream going until asked to stop, begun anew whenever the database fails.

    Raises:
        FencedError: another process owns the partition; this one must end.
    """
    while not stop.asked:
        stream = Stream(engine, log, ControlLog(engine, clock), clock, detectors, links, SeriesWriter(engine, clock))
        try:
            _say(stream.start())
            _follow(engine, stream, clock, stop)
        except FencedError:
            _log.exception("stream_fenced")
            raise
        except Exception:  # noqa: BLE001 - told, and begun anew
            # Whether the last batch was committed is not known: a new start finds out.
            _log.exception("stream_failed")
            clock.sleep(RETRY_S)


def links_of(public_url: str) -> Callable[[str, str], Mapping[str, str]]:
    """Where receivers can read on about an incident."""

    def links(job: str, incident_id: str) -> Mapping[str, str]:
        return {"incident": f"{public_url}/incidents/{incident_id}", "job": f"{public_url}/jobs/{quote(job, safe='')}"}

    return links


def _follow(engine: Engine, stream: Stream, clock: Clock, stop: Stop) -> None:
    changes = ChangeWatch(engine)
    try:
        trimmed_s = stepped_s = clock.monotonic_s()
        more = True
        while not stop.asked:
            now_s = clock.monotonic_s()
            if more or changes.changed() or now_s - stepped_s >= IDLE_S:
                stepped_s = now_s
                more = stream.step() >= RECORDS_MAX
                stream.save_due()
            else:
                clock.sleep(POLL_S)
            if now_s - trimmed_s >= SERIES_TRIM_S:
                trimmed_s = now_s
                trim(engine)
        stream.close()
    finally:
        changes.close()


def _say(started: Started) -> None:
    _log.info("stream_starts", records=started.replayed_records, ticks=started.replayed_ticks)
    for job in started.cold_jobs:
        _log.warning("job_begins_cold", job=job)
    for job, names in started.cold_detectors.items():
        _log.warning("detectors_begin_cold", job=job, detectors=names)
