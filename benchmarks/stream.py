"""What the stream takes on one core: Kafka → frames → detectors → commit, against a consumer that only decodes.

    python benchmarks/stream.py [--quick] [--repeats 5] [--only 1024x64,1024x8] [--untuned]
        [--kafka HOST:PORT] [--no-kafka]

Each line is one job (up to eight ranks on a host, 16 metrics, ten steps a second, progress once a second) whose
telemetry lies in one partition; the first steps warm up and are not counted. Figures are rank-steps per CPU second of
the whole process, the client's thread included, median of the repeats:

- poll: records come out of the log, and nothing is done with them;
- decode: they become checked batches and arrays as well;
- stream: they become frames, go through all detectors and are committed to SQLite, with fsync;
- + charts: series are written too, which costs the same whatever the log is: measured with the first one.

Records carry the time at which they were sent, so that there is a tick for each second of the job, as in live
operation. Without a broker (RANKWATCH_TEST_KAFKA, ../shared/kafka, or tansu from PyPI) the log is memory.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import zstandard
from kafka import KafkaProducer

from rankwatch.kafka.settings import KafkaSettings, client_options
from rankwatch_detectors.base import Frame
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.clock import SystemClock
from rankwatch_service.log.base import Record
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.log.kafka_topics import ensure_topics
from rankwatch_service.series.writer import SeriesSink, SeriesWriter
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.stream import kafka_source
from rankwatch_service.stream.kafka_source import KafkaSource
from rankwatch_service.stream.loop import RECORDS_MAX, Stream
from rankwatch_service.stream.partition import TOGETHER_MAX
from rankwatch_service.stream.saved import pack
from rankwatch_service.stream.serve import tune
from rankwatch_service.stream.sources import Source
from rankwatch_service.telemetry.bundle import read_bundle
from rankwatch_service.telemetry.envelope import decode_envelope
from rankwatch_service.text_log import configure
from suite.traffic import HOST_RANKS, METRICS, START_UNIX_NS, SentMessage, Traffic
from tests.support.kafka.broker import broker_at_hand

JOB = "benchmark"
MEMORY = "memory"
WAIT_S = 30.0


@dataclass(frozen=True)
class Load:
    """One line of the table."""

    ranks: int
    rows: int
    """Rank-steps in a message."""
    warm_steps: int
    steps: int

    def messages(self) -> list[SentMessage]:
        """What agents send."""
        return list(Traffic(JOB, self.ranks, self.rows).messages(self.warm_steps + self.steps))

    @property
    def warm_messages(self) -> int:
        """Messages that are not counted."""
        return self.warm_steps * self.ranks // self.rows

    @property
    def messages_in_all(self) -> int:
        """Messages in the log."""
        return (self.warm_steps + self.steps) * self.ranks // self.rows

    def at_once(self, position: int) -> int:
        """How many messages to take from a position on: a batch, or up to the end of the warm-up."""
        left = self.warm_messages - position
        return min(RECORDS_MAX, left) if left > 0 else RECORDS_MAX


def loads(quick: bool) -> list[Load]:
    """About 300,000 rank-steps in large messages, half as many in small ones and for few ranks."""
    if quick:
        return [Load(64, 64, 32, 320), Load(1_024, 64, 32, 160), Load(1_024, 8, 32, 80)]
    return [
        Load(1, 64, 64, 960),
        Load(8, 64, 32, 960),
        Load(64, 64, 32, 960),
        Load(64, 8, 32, 960),
        Load(256, 64, 32, 640),
        Load(1_024, 64, 32, 320),
        Load(1_024, 8, 32, 160),
        Load(16_384, 64, 16, 24),
        Load(16_384, 8, 16, 16),
    ]


# ---- logs ------------------------------------------------------------------------------------------------------------


class Memory:
    """A log that costs nothing."""

    def __init__(self, messages: Sequence[SentMessage]) -> None:
        self.records = [Record(0, number, JOB, sent.body, sent.unix_ns) for number, sent in enumerate(messages)]

    partitions = 1

    def partition_of(self, _key: str) -> int:
        """There is one."""
        return 0

    def read(self, _partition: int, position: int, limit: int, _wait_s: float = 0.0) -> list[Record]:
        """The next records."""
        return self.records[position : position + limit]

    def drained(self, _partition: int, position: int) -> bool:
        """Whether that is all."""
        return position >= len(self.records)

    def begin(self, _partition: int) -> int:
        """Nothing is forgotten."""
        return 0

    def end(self, _partition: int) -> int:
        """How many there are."""
        return len(self.records)

    def processed(self, _partition: int, _committed: int, _needed: int) -> None:
        """It keeps everything."""


def fill(kafka: KafkaSettings, messages: Sequence[SentMessage]) -> None:
    """Put messages into a topic of their own, with the times at which they were sent."""
    folder = Path(tempfile.gettempdir())
    ensure_topics(Settings(data_dir=folder, kafka=kafka.bootstrap, kafka_prefix=kafka.prefix, kafka_partitions=1))
    producer = KafkaProducer(
        **client_options(kafka), linger_ms=50, batch_size=262_144, compression_type=kafka.compression
    )
    for number, sent in enumerate(messages):
        producer.send(
            kafka.telemetry_topic, sent.body, JOB.encode(), partition=0, timestamp_ms=sent.unix_ns // 1_000_000
        )
        if number % 5_000 == 0:
            producer.flush()
    producer.flush()
    producer.close()


def as_sent(messages: Sequence[SentMessage]) -> Callable[[Any, int], int]:
    """Times of sending by position: the broker's own say only how fast the benchmark filled it."""
    return lambda message, _now: messages[message.offset].unix_ns


# ---- what is measured ------------------------------------------------------------------------------------------------


class NoCharts:
    """Series that are discarded."""

    def add(self, job: str, frame: Frame) -> None:
        """Discard it."""

    def flush(self, job: str) -> None:
        """There is nothing."""

    def delete(self, job: str) -> None:
        """There is nothing."""

    def close(self, job: str) -> None:
        """There is nothing."""

    def flush_due(self) -> None:
        """Nor is anything due."""


class StandingClock(SystemClock):
    """All ticks come from records."""

    def unix_ns(self) -> int:
        """Before the first of them."""
        return START_UNIX_NS


def reading(log: Source, load: Load, take: Callable[[list[Record]], object]) -> float:
    """CPU seconds for the records behind the warm-up."""
    position, began_s = 0, 0.0
    while position < load.messages_in_all:
        if position == load.warm_messages:
            gc.collect()
            began_s = time.process_time()
        records = log.read(0, position, load.at_once(position), WAIT_S)
        for first in range(0, len(records), TOGETHER_MAX):
            take(records[first : first + TOGETHER_MAX])
        position = records[-1].position + 1
    return time.process_time() - began_s


def decode(records: list[Record]) -> object:
    return read_bundle([decode_envelope(record.value) for record in records])


def streaming(log: Source, load: Load, folder: Path, charts: bool) -> tuple[float, float, Stream]:
    """CPU seconds and seconds for the records behind the warm-up, and the stream as it is after them."""
    engine = open_engine(f"sqlite:///{folder / 'rankwatch.db'}")
    upgrade(engine)
    clock = StandingClock()
    series: SeriesSink = SeriesWriter(engine, clock) if charts else NoCharts()
    stream = Stream(engine, log, ControlLog(engine, clock), clock, detectors, lambda _job, _incident: {}, series)
    stream.start()
    began, done = (0.0, 0.0), 0
    while (position := stream.partition.offsets.position) < load.messages_in_all:
        if position == load.warm_messages:
            gc.collect()  # else it falls into this line or the next, as the objects before it are counted
            began = (time.process_time(), time.monotonic())
        if isinstance(log, KafkaSource):
            log.fetch(0.0 if done else 0.01)
        done = stream.step(load.at_once(position))
        stream.save_due()
    spent_s, took_s = time.process_time() - began[0], time.monotonic() - began[1]
    last = stream.partition.snapshot(JOB)["assembler"]["windows"]["steps"]["last_closed"]
    assert last >= load.warm_steps + load.steps - 1, f"only {last} frames of {load}"
    engine.dispose()
    return spent_s, took_s, stream


@dataclass
class LoadResult:
    """Medians of one load."""

    load: Load
    source: str
    decode: float
    stream: float
    wall: float
    state_bytes: float
    wire_bytes: float
    poll: float | None = None
    """Of a log that is more than a list."""
    charts: float | None = None


def measure(
    load: Load,
    source: str,
    open_log: Callable[[], Source],
    messages: Sequence[SentMessage],
    repeats: int,
    *,
    with_charts: bool,
) -> LoadResult:
    seconds: dict[str, list[float]] = defaultdict(list)
    state_bytes = 0.0
    for _ in range(repeats):
        if source != MEMORY:
            seconds["poll"].append(reading(open_log(), load, lambda _records: None))
        seconds["decode"].append(reading(open_log(), load, decode))
        for charts in (False, True) if with_charts else (False,):
            with tempfile.TemporaryDirectory() as folder:
                spent_s, took_s, stream = streaming(open_log(), load, Path(folder), charts)
            seconds["charts" if charts else "stream"].append(spent_s)
            if not charts:
                seconds["wall"].append(took_s)
                state = pack(stream.partition.snapshot(JOB))
                state_bytes = zstandard.frame_content_size(state) / load.ranks
    rank_steps = load.ranks * load.steps
    rates = {name: rank_steps / statistics.median(spent) for name, spent in seconds.items()}
    plain = [sent for sent in messages[load.warm_messages :] if len(sent.body) == min(len(s.body) for s in messages)]
    return LoadResult(load, source, **rates, state_bytes=state_bytes, wire_bytes=len(plain[0].body) / load.rows)


def main() -> None:
    configure("WARNING", "benchmark")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three small lines, one repeat")
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--only", default="", help="lines to measure, RANKSxROWS with commas")
    parser.add_argument("--kafka", default="", help="HOST:PORT of a broker that runs already")
    parser.add_argument("--no-kafka", action="store_true")
    parser.add_argument(
        "--untuned", action="store_true", help="memory as Python and the C library treat it by themselves"
    )
    options = parser.parse_args()
    if not options.untuned:
        tune()  # as the stream's process does
    repeats = options.repeats or (1 if options.quick else 5)
    only = options.only.split(",") if options.only else []
    chosen = [load for load in loads(options.quick) if not only or f"{load.ranks}x{load.rows}" in only]
    at_hand = nullcontext(("", "")) if options.no_kafka else broker_at_hand(options.kafka)
    with at_hand as (what, bootstrap):
        print(f"{len(METRICS)} metrics, {HOST_RANKS} ranks on a host; log: {what or 'memory'}; SQLite, fsync on")
        print(f"{platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} cores, ", end="")
        print(f"load of the machine (1 min): {os.getloadavg()[0]:.1f}; median of {repeats}")
        head()
        for load in chosen:
            messages = load.messages()
            if bootstrap:
                kafka = KafkaSettings(bootstrap, prefix=f"benchmark-{os.getpid()}-{load.ranks}-{load.rows}")
                fill(kafka, messages)
                kafka_source.appended_unix_ns = as_sent(messages)
                open_log = partial(KafkaSource, kafka, SystemClock())
                show(measure(load, "Kafka", open_log, messages, repeats, with_charts=True))
            show(measure(load, MEMORY, partial(Memory, messages), messages, repeats, with_charts=not bootstrap))


def head() -> None:
    columns = ("log", "ranks", "per message", "poll", "decode", "stream", "of decode", "+ charts", "stream, wall")
    print("| " + " | ".join((*columns, "state, B/rank", "wire, B/rank-step")) + " |")
    print("| --- |" + " ---: |" * (len(columns) + 1))


def show(line: LoadResult) -> None:
    cells = [
        line.source,
        f"{line.load.ranks:,}",
        str(line.load.rows),
        *map(rate, (line.poll, line.decode, line.stream)),
    ]
    cells += [f"{line.stream / line.decode:.2f}", rate(line.charts), rate(line.wall)]
    cells += [f"{line.state_bytes:,.0f}", f"{line.wire_bytes:.1f}"]
    print("| " + " | ".join(cells) + " |", flush=True)


def rate(per_s: float | None) -> str:
    return "" if per_s is None else f"{per_s / 1e3:,.0f}k"


if __name__ == "__main__":
    main()
