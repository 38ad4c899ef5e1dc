"""A recording as input of both forms of the service, and copies of its results, for crash tests."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from sqlalchemy import Engine

from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine
from rankwatch_service.stream.kafka_source import KafkaSource
from rankwatch_service.stream.loop import Stream
from rankwatch_service.stream.sources import SqlSource
from tests.support.kafka.broker import Broker, GivenBroker, new_prefix
from tests.support.recordings.recording import Timed, end_of, record_controls, record_log, stream_over
from tests.support.service.stream_process import record_topic
from tests.support.store.database import without_sync
from tests.support.store.faulty_calls import Faults, FaultySource
from tests.support.store.postgres import PostgresDatabases


class SqliteForm:
    """The log and all else in one SQLite file."""

    def __init__(self, folder: Path, entries: list[Timed]) -> None:
        self._entries = entries
        self._folder = folder
        self._copies = itertools.count()
        self.url = f"sqlite:///{record_log(folder, entries)}"

    @contextmanager
    def copied(self, url: str) -> Iterator[str]:
        copy = self._folder / f"copy-{next(self._copies)}.db"
        shutil.copy(url.removeprefix("sqlite:///"), copy)
        yield f"sqlite:///{copy}"
        for left in self._folder.glob(f"{copy.name}*"):
            left.unlink()

    @contextmanager
    def opened(self, url: str, faults: Faults | None = None) -> Iterator[tuple[Engine, Stream]]:
        # Processes crash here, the machine does not.
        engine = without_sync(open_engine(url))
        clock = end_of(self._entries)
        source = FaultySource(SqlSource(engine, clock), faults or Faults())
        try:
            yield _opened(engine, self._entries, source, faults)
        finally:
            engine.dispose()


class KafkaForm:
    """The log in a topic of Kafka, all else in PostgreSQL."""

    def __init__(
        self, postgres: PostgresDatabases, broker: Broker | GivenBroker, url: str, entries: list[Timed]
    ) -> None:
        """`url`: of a migrated database that is kept as long as this."""
        self._postgres = postgres
        self._entries = entries
        self.url = url
        # One partition, as in the store, so that all jobs have one order.
        settings = Settings(kafka=broker.bootstrap, kafka_prefix=new_prefix(), kafka_partitions=1)
        record_topic(settings, entries)
        kafka = settings.kafka_settings()
        assert kafka is not None
        self._kafka = kafka
        engine = open_engine(url)
        record_controls(engine, entries)
        engine.dispose()

    def copied(self, url: str) -> AbstractContextManager[str]:
        return self._postgres.copied(url)

    @contextmanager
    def opened(self, url: str, faults: Faults | None = None) -> Iterator[tuple[Engine, Stream]]:
        engine = open_engine(url)
        kafka = KafkaSource(self._kafka, end_of(self._entries))
        try:
            yield _opened(engine, self._entries, FaultySource(kafka, faults or Faults()), faults)
        finally:
            kafka.close()
            engine.dispose()


def _opened(engine: Engine, entries: list[Timed], source: FaultySource, faults: Faults | None) -> tuple[Engine, Stream]:
    if faults is not None:
        faults.install(engine)
    return engine, stream_over(engine, end_of(entries), source=source)
