"""How long from a sample appended to the log to its incident committed, with a real stream process on SQLite.

    python benchmarks/latency.py [--samples 200] [--ranks 64] [--rate 10]

A background job of so many ranks (8 on a host) makes so many steps a second through the same log. Beside it each
sample is a small job of its own in which one rank reports a NaN gradient; the clock runs from before the append until
another connection sees the incident. fsync is on, as in production.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from sqlalchemy import Engine, select

from rankwatch import wire
from rankwatch_service.clock import SystemClock
from rankwatch_service.log.base import Entry
from rankwatch_service.log.sql_log import SqlLog
from rankwatch_service.settings import Settings
from rankwatch_service.simulate.batches import batches
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.store.change_watch import ChangeWatch
from rankwatch_service.store.engine import open_engine, read
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.store.models import Incident
from rankwatch_service.stream.serve import run

DEADLINE_S = 30.0
SPACING_S = 0.05


def step_table(step: int, nonfinite: int) -> wire.Table:
    two = np.array([0, 1])
    return wire.Table(
        2,
        {
            "step": wire.Column("i8", np.full(2, step, "<i8").tobytes()),
            "rank": wire.Column("u4", two.astype("<u4").tobytes()),
            "loss": wire.Column("f8", np.full(2, 2.5, "<f8").tobytes()),
            "step_time_s": wire.Column("f8", np.full(2, 0.1, "<f8").tobytes()),
            "nonfinite": wire.Column("i8", np.array([0, nonfinite], "<i8").tobytes()),
        },
    )


def append(log: SqlLog, job: str, seq: int, table: wire.Table) -> None:
    infos = tuple(wire.RankInfo(rank, 2, rank, "h", f"GPU-{rank}") for rank in range(2)) if seq == 0 else ()
    batch = wire.Batch(wire.SCHEMA_VERSION, job, "l.0", "h", "b", seq, time.time_ns(), ranks=infos, steps=table)
    log.append([Entry(job, wire.encode(batch))])


def background(log: SqlLog, ranks: int, rate: float, stop: threading.Event) -> None:
    job = Job(world_size=ranks, steps=10**6, step_s=1 / rate, late_values=True)
    began_s = time.monotonic()
    for message in batches("background", generate(job)):
        if stop.wait(max(0.0, began_s + message.time_s - time.monotonic())):
            return
        log.append([Entry("background", wire.encode(message.batch))])


def one_sample(engine: Engine, log: SqlLog, watch: ChangeWatch, job: str) -> float:
    """Seconds from append to incident."""
    append(log, job, 0, step_table(1, 0))
    time.sleep(SPACING_S)
    began_s = time.monotonic()
    append(log, job, 1, step_table(2, 5))
    while time.monotonic() - began_s < DEADLINE_S:
        if watch.changed():
            with read(engine) as connection:
                if connection.execute(select(Incident.id).where(Incident.job == job)).first() is not None:
                    return time.monotonic() - began_s
        time.sleep(0.001)
    raise TimeoutError(f"no incident for {job} within {DEADLINE_S} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rate", type=float, default=10.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data_dir=Path(folder), ingest_config=None, log_level="WARNING")
        engine = open_engine(settings.database_url)
        upgrade(engine)
        log = SqlLog(engine, SystemClock())
        stream = multiprocessing.get_context("spawn").Process(target=run, args=(settings,))
        stream.start()
        stop = threading.Event()
        feeder = threading.Thread(target=background, args=(log, options.ranks, options.rate, stop))
        try:
            watch = ChangeWatch(engine)
            one_sample(engine, log, watch, "warm-up")
            if options.ranks:
                feeder.start()
                time.sleep(3.0)
            names = (f"probe-{number}" for number in itertools.count())
            seconds = [one_sample(engine, log, watch, next(names)) for _ in range(options.samples)]
        finally:
            stop.set()
            if feeder.is_alive():
                feeder.join()
            stream.terminate()
            stream.join()
        watch.close()
        engine.dispose()
    quantiles = statistics.quantiles(seconds, n=100)
    print(f"{options.samples} samples beside {options.ranks} ranks x {options.rate:g} steps/s")
    print(f"{platform.python_implementation()} {platform.python_version()}, {os.cpu_count()} cores, SQLite, fsync on")
    print(f"load of the machine (1 min): {os.getloadavg()[0]:.1f}")
    print("| sample appended -> incident committed | ms |")
    print("| --- | ---: |")
    for name, value in (
        ("median", quantiles[49]),
        ("p95", quantiles[94]),
        ("p99", quantiles[98]),
        ("max", max(seconds)),
    ):
        print(f"| {name} | {value * 1000:.0f} |")


if __name__ == "__main__":
    main()
