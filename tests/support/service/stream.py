"""A stream over a real database and a clock that the test moves."""

from msgspec.structs import replace
from sqlalchemy import Engine, Select

from rankwatch import wire
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.job.job import IDLE_AFTER_S
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.policy.control_records import encode_control
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.store.engine import read, write
from rankwatch_service.stream.loop import Started, Stream
from rankwatch_service.stream.sources import SqlSource
from tests.support.clock import FakeClock
from tests.support.trials.trial import NoCharts
from tests.support.values.batches import batch, ranks, table


def no_links(job, incident) -> dict[str, str]:
    return {}


class Service:
    """A clock, and streams over a database."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.clock = FakeClock()
        self.log = SqlSource(self.engine, self.clock)
        self.controls = ControlLog(self.engine, self.clock)
        self.seq: dict[str, int] = {}

    def stream(self, partition: int = 0) -> Stream:
        return Stream(self.engine, self.log, self.controls, self.clock, detectors, no_links, NoCharts(), partition)

    def started(self) -> Stream:
        stream = self.stream()
        stream.start()
        return stream

    def again(self, partition: int = 0) -> tuple[Stream, Started]:
        """Another stream, and what its start has found."""
        stream = self.stream(partition)
        return stream, stream.start()

    def send(self, job="gpt", **fields) -> None:
        seq = self.seq[job] = self.seq.get(job, -1) + 1
        body = wire.encode(batch(seq, job=job, **(({"ranks": ranks(2)} if seq == 0 else {}) | fields)))
        self.log.append([Entry(job, body)])

    def append(self, key, record) -> None:
        with write(self.engine) as connection:
            self.controls.append_in(connection, [Entry(key, encode_control(record))])

    def train(self, *steps: int, job="gpt") -> None:
        for step in steps:
            self.send(job, steps=table([step] * 2, [0, 1], loss=[2.0] * 2, step_time_s=[0.5] * 2))

    def ill(self, job="gpt", step=10, attempt="l.0") -> None:
        """Rank 0 has a NaN."""
        self.send(job, attempt=attempt, steps=table([step] * 2, [0, 1], loss=[float("nan"), 2.0]))

    def able(self, job="gpt") -> None:
        """Two ranks that can be paused introduce themselves."""
        self.send(job)
        self.send(job, ranks=tuple(replace(info, can=("pause",)) for info in ranks(2)))

    def second(self, stream: Stream, seconds: float = 1.0) -> None:
        self.clock.advance(seconds)
        while stream.step():
            pass

    def rest(self, stream: Stream) -> None:
        """An hour passes without telemetry; at its end the stream lives on for a second."""
        for _ in range(2):
            self.clock.advance(IDLE_AFTER_S)
            stream.step()

    def column(self, query: Select) -> list:
        with read(self.engine) as connection:
            return list(connection.scalars(query))

    def rows(self, query: Select) -> list[tuple]:
        with read(self.engine) as connection:
            return [tuple(row) for row in connection.execute(query)]


class Charted(Service):
    """Its streams write series."""

    def stream(self, partition: int = 0) -> Stream:
        series = SeriesWriter(self.engine, self.clock)
        return Stream(self.engine, self.log, self.controls, self.clock, detectors, no_links, series, partition)
