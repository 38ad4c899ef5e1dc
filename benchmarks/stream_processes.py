"""What several stream processes cost together: CPU per rank-step of one process against three, on the same telemetry.

    python benchmarks/stream_processes.py [--processes 1,3] [--jobs 48] [--ranks 64] [--steps 160] [--repeats 5]
        [--kafka HOST:PORT]

The very processes that `rankwatch stream` starts share 24 partitions as a consumer group. They are started and left
alone until every partition has its owner; then the telemetry of all jobs is put into the topic, 64 rank-steps in a
message, and their CPU time is read when the last position is committed. Charts and snapshots are written to SQLite as
in operation. Beside it stands what a fixed piece of work, which shares nothing, costs in as many processes at once, one
process being 1 (cores that share caches or a clock make everything dearer), and what a process takes at rest.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from kafka import KafkaProducer
from sqlalchemy import Engine, func, select

from rankwatch.kafka.settings import client_options, partition_of
from rankwatch_service.log.kafka_topics import ensure_topics
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine, read
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.store.models import StreamPosition
from rankwatch_service.stream.serve import run
from rankwatch_service.text_log import configure
from suite.traffic import Traffic
from tests.support.kafka.broker import broker_at_hand

PARTITIONS = 24
ROWS = 64
DEADLINE_S = 120.0
NORMAL_S = 5.0
REST_S = 5.0
FIXED_STEPS = 100_000
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of these processes, all threads."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


def wait_for(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not done():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {DEADLINE_S:g} s")
        time.sleep(0.05)


def claims(engine: Engine) -> tuple[int, int]:
    """Partitions that were claimed, and how often in all."""
    with read(engine) as connection:
        return connection.execute(select(func.count(), func.coalesce(func.sum(StreamPosition.epoch), 0))).one()


def settled(engine: Engine) -> None:
    """Wait until every partition has its owner and nothing moves any more."""
    wait_for(lambda: claims(engine)[0] == PARTITIONS)
    before, since_s = claims(engine), time.monotonic()
    while time.monotonic() - since_s < NORMAL_S:
        time.sleep(0.2)
        if (now := claims(engine)) != before:
            before, since_s = now, time.monotonic()


@contextmanager
def processes(count: int, settings: Settings) -> Iterator[list[int]]:
    """So many stream processes."""
    context = multiprocessing.get_context("spawn")
    started = [context.Process(target=run, args=(settings,)) for _ in range(count)]
    for process in started:
        process.start()
    try:
        yield [process.pid or 0 for process in started]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.join()


def fill(settings: Settings, jobs: int, ranks: int, steps: int) -> int:
    """Put the telemetry of all jobs into the topic, as they go along side by side; returns how many messages."""
    kafka = settings.kafka_settings()
    assert kafka is not None
    producer = KafkaProducer(**client_options(kafka), linger_ms=50, batch_size=262_144, compression_type="zstd")
    names = [f"job-{number}" for number in range(jobs)]
    streams = [Traffic(name, ranks, ROWS, seed).messages(steps) for seed, name in enumerate(names)]
    count = 0
    for turn in zip(*streams, strict=True):
        for name, sent in zip(names, turn, strict=True):
            producer.send(kafka.telemetry_topic, sent.body, name.encode(), partition=partition_of(name, PARTITIONS))
            count += 1
    producer.flush()
    producer.close()
    return count


def at_rest(pids: list[int]) -> float:
    """Percent of a core that each of the processes takes while nothing comes."""
    before_s, since_s = cpu_seconds(pids), time.monotonic()
    time.sleep(REST_S)
    return (cpu_seconds(pids) - before_s) / (time.monotonic() - since_s) / len(pids) * 100


def one_run(count: int, bootstrap: str, options: argparse.Namespace) -> tuple[float, float]:
    """CPU microseconds per rank-step, and percent of a core of each process before anything came."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/rankwatch.db"
        prefix = f"benchmark-{os.getpid()}-{time.monotonic_ns()}"
        settings = Settings(
            data_dir=Path(folder),
            database_url=url,
            ingest_config=None,
            log_level="WARNING",
            kafka=bootstrap,
            kafka_prefix=prefix,
            kafka_partitions=PARTITIONS,
        )
        engine = open_engine(url)
        upgrade(engine)
        ensure_topics(settings)
        with processes(count, settings) as pids:
            settled(engine)
            rest = at_rest(pids)
            before_s = cpu_seconds(pids)
            sent = fill(settings, options.jobs, options.ranks, options.steps)

            def committed() -> bool:
                with read(engine) as connection:
                    return connection.scalar(select(func.sum(StreamPosition.position))) == sent

            wait_for(committed)
            spent_s = cpu_seconds(pids) - before_s
        engine.dispose()
    return spent_s / (options.jobs * options.ranks * options.steps) * 1e6, rest


def fixed_work(_number: int) -> float:
    """CPU seconds for many small arrays and objects, which is what the stream mostly does."""
    began_s = time.process_time()
    values = np.linspace(0.0, 1.0, 64)
    for step in range(FIXED_STEPS):
        clipped = np.minimum(values * step, 1.0)
        fields = {str(index): (index, step) for index in range(64)}
        values = clipped * (len(fields) / 64)
    return time.process_time() - began_s


def sharing(count: int) -> float:
    """CPU seconds of the fixed work in so many processes at once, mean of all."""
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        return statistics.mean(pool.map(fixed_work, range(count), chunksize=1))


def main() -> None:
    configure("WARNING", "benchmark")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="1,3")
    parser.add_argument("--jobs", type=int, default=48)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kafka", default="", help="HOST:PORT of a broker that runs already")
    options = parser.parse_args()
    with broker_at_hand(options.kafka) as (what, bootstrap):
        if not bootstrap:
            print("no broker at hand: name one with --kafka")
            return
        print(f"{what}; {PARTITIONS} partitions, {options.jobs} jobs of {options.ranks} ranks, {os.cpu_count()} cores,")
        print(f"load of the machine (1 min): {os.getloadavg()[0]:.1f}; median of {options.repeats}")
        print("| stream processes | CPU, us per rank-step | a fixed work in as many | each at rest, % of a core |")
        print("| ---: | ---: | ---: | ---: |")
        alone_s = statistics.median(sharing(1) for _ in range(options.repeats))
        for count in map(int, options.processes.split(",")):
            runs = [one_run(count, bootstrap, options) for _ in range(options.repeats)]
            spent, rest = (statistics.median(figures) for figures in zip(*runs, strict=True))
            shared = statistics.median(sharing(count) for _ in range(options.repeats)) / alone_s
            print(f"| {count} | {spent:.2f} | {shared:.2f} | {rest:.1f} |", flush=True)


if __name__ == "__main__":
    main()
