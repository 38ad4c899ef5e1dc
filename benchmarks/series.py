"""Series: bytes per value, speed of the codec and the writer, and heat maps of a day-old job through HTTP.

    python benchmarks/series.py [--quick] [--database-url URL]

Noise is realistic: step times have a common factor for each step, an offset for each rank, 0.8 ms of jitter and 1 % of
slow ones; losses and norms wander and differ between ranks; powers and memory change slowly. The day of the heat maps
is written as `SeriesWriter` writes it, its raw chunks left out (nobody reads them for a day's map): 86,400 steps at
1 step/s and 864,000 at 10. The api is a process of its own, answers are those of a browser (gzip). PostgreSQL is the
one that tests use, with fsync as it comes.
"""

from __future__ import annotations

import argparse
import http.client
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Engine, insert

from rankwatch_detectors.base import Frame, StepKind
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.clock import SystemClock
from rankwatch_service.series.chunks import CHUNK_STEPS, decoded, encoded
from rankwatch_service.series.rollups import of_chunk
from rankwatch_service.series.rows import put, rollup_rows
from rankwatch_service.series.writer import AttemptBuffer, SeriesWriter
from rankwatch_service.store.engine import open_engine, write
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.store.models import Job, SeriesRollup
from tests.support.store.postgres_server import Postgres, PostgresError

METRICS = 16
DAY_STEPS = 86_400
SERVE = (
    "import sys, socket, uvicorn\n"
    "from rankwatch_service.api.app import create_app\n"
    "from rankwatch_service.api.serve import run\n"
    "from rankwatch_service.settings import Settings\n"
    "run(Settings(database_url=sys.argv[1], port=int(sys.argv[2]), log_level='ERROR', data_dir=sys.argv[3]))\n"
)


def step_times(rng: np.random.Generator, steps: int, ranks: int) -> NDArray[np.float32]:
    """Seconds, as most metrics of a step are."""
    cells = 0.25 * (1 + 0.02 * rng.standard_normal((steps, 1))) * (1 + 0.005 * rng.standard_normal((1, ranks)))
    cells += 0.0008 * rng.standard_normal((steps, ranks))
    slow = rng.random((steps, ranks)) < 0.01
    return np.where(slow, cells * (1 + 0.5 * rng.random((steps, ranks))), cells).astype(np.float32)


def losses(rng: np.random.Generator, steps: int, ranks: int) -> NDArray[np.float32]:
    """Each rank's own loss."""
    course = 2.5 + np.cumsum(rng.normal(0, 0.003, (steps, 1)), axis=0)
    return (course + rng.normal(0, 0.05, (steps, ranks))).astype(np.float32)


def norms(rng: np.random.Generator, steps: int, ranks: int) -> NDArray[np.float32]:
    """Each rank's own gradient norm."""
    return np.exp(rng.normal(0, 0.05, (steps, 1)) + rng.normal(0, 0.2, (steps, ranks))).astype(np.float32)


def same_losses(rng: np.random.Generator, steps: int, ranks: int) -> NDArray[np.float32]:
    """A loss averaged over ranks."""
    return np.broadcast_to(losses(rng, steps, 1), (steps, ranks)).astype(np.float32)


def powers(rng: np.random.Generator, steps: int, ranks: int) -> NDArray[np.float32]:
    """Watts, read once a second to a milliwatt."""
    return np.round(650 + rng.normal(0, 15, (1, ranks)) + rng.normal(0, 8, (steps, ranks)), 3).astype(np.float32)


KINDS: tuple[tuple[str, bool, Callable[[np.random.Generator, int, int], NDArray[np.float32]]], ...] = (
    ("step time", True, step_times),
    ("loss of each rank", False, losses),
    ("mean loss", False, same_losses),
    ("gradient norm", False, norms),
    ("power", False, powers),
)


def median_s(work: Callable[[], object], times: int) -> float:
    """Median CPU time."""
    spent = []
    for _ in range(times):
        began_s = time.process_time()
        work()
        spent.append(time.process_time() - began_s)
    return statistics.median(spent)


def codec(times: int) -> None:
    """Bytes per value and MB of float32 per CPU second, chunk by chunk of 16 metrics."""
    print("\n| values | ranks | bytes per value | encode, MB/s | decode, MB/s | sum up, MB/s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, is_time, make in KINDS:
        for ranks in (64, 1_024, 16_384):
            rng = np.random.default_rng(ranks)
            block = np.stack([make(rng, CHUNK_STEPS, ranks) for _ in range(METRICS if ranks < 10_000 else 2)])
            chunks = encoded(block, is_time)
            per_value = sum(map(len, chunks)) / block.size
            encode_s = median_s(lambda block=block, is_time=is_time: encoded(block, is_time), times)
            decode_s = median_s(lambda chunks=chunks: [decoded(data) for data in chunks], times)
            sum_s = median_s(lambda block=block: of_chunk(block), times)
            rates = (f"{block.nbytes / seconds / 1e6:.0f}" for seconds in (encode_s, decode_s, sum_s))
            print(f"| {name} | {ranks:,} | {per_value:.2f} | " + " | ".join(rates) + " |")


def frames(ranks: int, steps: int) -> Iterator[Frame]:
    """A job of 16 metrics: 12 times, 2 losses, 2 norms."""
    rng = np.random.default_rng(ranks)
    names = [f"phase.{n}" for n in range(12)] + ["loss", "aux_loss", "grad_norm", "local_grad_norm"]
    makers = [step_times] * 12 + [losses] * 2 + [norms] * 2
    block = [make(rng, CHUNK_STEPS, ranks).astype(np.float64) for make in makers]
    everyone = np.ones(ranks, dtype=bool)
    for step in range(steps):
        values = {name: cells[step % CHUNK_STEPS] for name, cells in zip(names, block, strict=True)}
        yield Frame("l.0", "steps", step, StepKind.TRAIN, 0.0, values, dict.fromkeys(names, everyone))


def writer(label: str, engine: Engine, quick: bool) -> None:
    """What a rank-step costs, from `add` to the committed row, roll-ups included."""
    for ranks, many in ((64, 4_096), (1_024, 1_024), (16_384, 128)):
        steps = many // 4 if quick else many
        series = SeriesWriter(engine, SystemClock())
        job = f"w{ranks}"
        made = list(frames(ranks, steps))
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for frame in made:
            series.add(job, frame)
        series.flush(job)
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        rows = ranks * steps
        print(
            f"| {label} | {ranks:,} | {rows / wall_s:,.0f} | {rows / cpu_s:,.0f} | {cpu_s / rows * 1e6:.2f} "
            f"| {rows * METRICS * 4 / wall_s / 1e6:.0f} |"
        )


def adding(quick: bool) -> None:
    """What `add` alone costs: the frames put in their chunks, nothing encoded."""
    print("\n| `add` alone, ranks | us per rank-step |")
    print("| ---: | ---: |")
    for ranks in (8, 64, 1_024, 16_384):
        made = list(frames(ranks, 16 if ranks > 10_000 else CHUNK_STEPS))
        repeats = 3 if quick else 9

        def fill(made: list[Frame] = made) -> None:
            buffer = AttemptBuffer([], -1, lambda _: {}, lambda *_: None)
            for frame in made:
                if buffer.add(frame):
                    buffer.flush()
            buffer.flush()

        print(f"| {ranks:,} | {median_s(fill, repeats) / len(made) / ranks * 1e6:.3f} |")


def write_day(engine: Engine, job: str, ranks: int, steps: int) -> None:
    """Roll-ups of a day of step times; blocks of noise repeat, each with a factor of its own."""
    rng = np.random.default_rng(ranks)
    now = time.time_ns()
    noise = [step_times(rng, CHUNK_STEPS, ranks) for _ in range(16)]
    buffer = AttemptBuffer(["step_time_s"], -1, lambda _: {}, lambda *_: None)
    for number in range(steps // CHUNK_STEPS):
        block = noise[number % 16] * np.float32(1 + 0.05 * np.sin(number / 40))
        buffer.chunk(number).cells = block[None]
        buffer.sum_up_chunk(number)
        buffer.let_go(number)
        if number % 64 == 63 or number == steps // CHUNK_STEPS - 1:
            buffer.sum_up_rows()
            for (level, row_number), row in buffer.rows.items():
                if row.dirty:
                    put(
                        engine,
                        SeriesRollup,
                        rollup_rows(job, "l.0", buffer.metrics, level, row_number, row.buckets, now),
                    )
            buffer.let_rows_go()
    row = {"state": "running", "attempt": "l.0", "world_size": ranks, "ranks_reporting": ranks, "step": steps}
    row |= {"step_time_s": 0.25, "loss": None, "first_seen_unix_ns": 0, "last_seen_unix_ns": 0, "dropped": {}}
    with write(engine) as connection:
        connection.execute(insert(Job).values(name=job, **row))


@contextmanager
def api(url: str, folder: str) -> Iterator[tuple[str, int]]:
    """A real api process over a database; its token and port."""
    import socket

    engine = open_engine(url)
    with write(engine) as connection:
        _, token = create_token(connection, TokenKind.API, "bench", [Scope.READ], time.time_ns())
    engine.dispose()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", SERVE, url, str(port), folder])
    try:
        deadline_s = time.monotonic() + 30
        while True:
            try:
                ask(token, port, "/health/live")
                break
            except OSError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)
        yield token, port
    finally:
        process.terminate()
        process.wait()


def ask(token: str, port: int, path: str) -> tuple[float, int, int]:
    """Seconds, status and bytes on the wire of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    began_s = time.perf_counter()
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}", "Accept-Encoding": "gzip"})
    answer = connection.getresponse()
    size = len(answer.read())
    spent_s = time.perf_counter() - began_s
    connection.close()
    return spent_s, answer.status, size


def heat_maps(label: str, url: str, folder: str, times: int, quick: bool) -> None:
    """Latency and size of whole maps through HTTP."""
    engine = open_engine(url)
    jobs = [
        ("day", 1_024, DAY_STEPS, "1,024 ranks, 86,400 steps"),
        ("day10", 1_024, 10 * DAY_STEPS, "the same, 864,000 steps"),
    ]
    if not quick:
        jobs.append(("wide", 16_384, DAY_STEPS // 2, "16,384 ranks, 43,200 steps"))
    for name, ranks, steps, _ in jobs:
        write_day(engine, name, ranks, steps)
    engine.dispose()
    with api(url, folder) as (token, port):
        for name, _, _, text in jobs:
            for what, path in (
                ("heat map, 300 columns", f"/api/v1/jobs/{name}/heatmap.bin?metric=step_time_s&columns=300"),
                ("fan, 320 points", f"/api/v1/jobs/{name}/series?metric=step_time_s&reduce=fan&points=320"),
            ):
                found = [ask(token, port, path) for _ in range(times)][times // 10 :]
                assert all(status == 200 for _, status, _ in found), found[0]
                spent_ms = sorted(seconds * 1000 for seconds, _, _ in found)
                p95 = spent_ms[int(len(spent_ms) * 0.95)]
                print(
                    f"| {label} | {text} | {what} | {statistics.median(spent_ms):.0f} | {p95:.0f} "
                    f"| {max(size for _, _, size in found) / 1000:.0f} |"
                )


@contextmanager
def databases(folder: str, given: str) -> Iterator[list[tuple[str, str]]]:
    """(label, URL) of empty migrated databases."""
    urls = [("SQLite", f"sqlite:///{folder}/rankwatch.db")]
    if given:
        urls.append(("given database", given))
        yield urls
        return
    with tempfile.TemporaryDirectory(prefix="rankwatch-postgres-") as own:
        server = Postgres(Path(own), {})
        try:
            server.start()
        except PostgresError as error:
            print(f"no PostgreSQL: {error}")
            yield urls
            return
        try:
            yield [*urls, ("PostgreSQL", server.url())]
        finally:
            server.stop()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, no 16,384 ranks in heat maps")
    parser.add_argument("--database-url", default="", help="of an empty PostgreSQL database, instead of one of its own")
    options = parser.parse_args()
    print(f"CPython {platform.python_version()}, NumPy {np.__version__}, {os.cpu_count()} cores")
    print(f"load of the machine (1 min): {os.getloadavg()[0]:.1f}")
    codec(1 if options.quick else 5)
    adding(options.quick)
    with (
        tempfile.TemporaryDirectory(prefix="rankwatch-series-") as folder,
        databases(folder, options.database_url) as urls,
    ):
        print("\n| writer | ranks | rank-steps/s | rank-steps per CPU second | us of CPU | MB/s of float32 |")
        print("| --- | ---: | ---: | ---: | ---: | ---: |")
        for label, url in urls:
            engine = open_engine(url)
            upgrade(engine)
            writer(label, engine, options.quick)
            engine.dispose()
        print("\n| database | job | chart | p50, ms | p95, ms | largest, KB |")
        print("| --- | --- | --- | ---: | ---: | ---: |")
        for label, url in urls:
            heat_maps(label, url, folder, 20 if options.quick else 200, options.quick)


if __name__ == "__main__":
    main()
