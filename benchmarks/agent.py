"""What the agent costs: CPU, memory and bytes, with real recorders, a real HTTP sink and the real agent.

    python benchmarks/agent.py [--seconds 30] [--ranks 8] [--rate 10] [--kafka apache|noida|tansu]

Each rank is a process that writes 16 metrics a step (12 logged values and the 4 times of every step). The devices are
stand-ins for NVML (eight, read through the real `nvml.py` once a second, by the reader's own process). CPU and memory
are those of supervisor, worker and reader, from /proc, after a warm-up of 3 s. With `--kafka` telemetry goes to a
broker of that kind, started here.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rankwatch import wire
from rankwatch.agent.batch_builder import BatchBuilder, SenderIdentity
from rankwatch.reader import StepEntry
from rankwatch_service.log.kafka_topics import ensure_topics
from rankwatch_service.settings import Settings
from tests.support.accelerator import DRIVER
from tests.support.agent.host import AgentProcess
from tests.support.agent.service import AgentService, until
from tests.support.kafka.broker import KINDS, kafka_broker

ROOT = Path(__file__).resolve().parent.parent
WARM_UP_S = 3.0

RANK = """
import os, sys, time
import rankwatch
directory, rank, world_size, rate = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
watch = rankwatch.start(
    "gpt", launch="l", rank=rank, world_size=world_size, host="node-1", agent=False,
    env={**os.environ, "RANKWATCH_DIR": directory},
)
due_s = time.monotonic()
while True:
    with watch.step() as step:
        watch.log(**{f"metric_{index}": 1 / (step + index + 1) for index in range(12)})
        due_s += 1 / rate
        time.sleep(max(0.0, due_s - time.monotonic()))
"""


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def reader_of(worker: int) -> int:
    """PID of the process that reads the devices for a worker."""
    (pid,) = (int(pid) for task in Path(f"/proc/{worker}/task").glob("*/children") for pid in task.read_text().split())
    return pid


def memory_bytes(pid: int) -> tuple[int, int]:
    """Resident, and proportional (shared pages divided among those who share them)."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        found[name] = int(value) * 1024
    return found["Rss:"], found["Pss:"]


def wire_bytes_per_rank_step(rows: int = 64) -> float:
    """One message of 64 rank-steps of 16 metrics, as the agent encodes it."""
    batch_builder = BatchBuilder("gpt", "l.0")
    ranks = [_Numbered(rank) for rank in range(8)]
    for index in range(rows):
        values = {f"metric_{metric}": 1 / (index + metric + 1) for metric in range(12)}
        entry = StepEntry(
            index, index // 8, 0, 0, index // 8, 10**18 + index * 12_500_000, 0.1, 0.05, 0.04, 0.01, values, {}
        )
        batch_builder.add(ranks[index % 8], entry)  # type: ignore[arg-type]
    return len(batch_builder.encoded_batch(SenderIdentity("node-1"), 10**18).body) / rows


class _Numbered:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.path = str(rank)


def reported_after_s(service: AgentService, ranks: list[subprocess.Popen[bytes]]) -> list[float]:
    """Kill the ranks one by one; seconds until the service has each exit."""
    seconds = []
    for count, rank in enumerate(ranks, 1):
        begin_s = time.monotonic()
        rank.kill()
        until(lambda count=count: len(service.events("process_exit")) >= count)
        seconds.append(time.monotonic() - begin_s)
    return seconds


def restarted_after_s(agent: AgentProcess, times: int) -> list[float]:
    """Kill the worker; seconds until the supervisor has started the next one."""
    seconds = []
    for _ in range(times):
        begin_s = time.monotonic()
        killed = agent.kill_worker()
        until(lambda killed=killed: agent.worker not in (0, killed))
        seconds.append(time.monotonic() - begin_s)
        time.sleep(1.0)
    return seconds


def in_order(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} / {max(seconds):.3f}"


@contextlib.contextmanager
def by_way_of(kind: str | None, service: AgentService) -> Iterator[dict[str, str]]:
    """The agent's environment; what it publishes to a broker is read there and handed to the service."""
    if kind is None:
        yield {}
        return
    from kafka import KafkaConsumer, TopicPartition

    with kafka_broker(kind) as broker:
        settings = Settings(kafka=broker.bootstrap, kafka_partitions=1)
        ensure_topics(settings)
        consumer = KafkaConsumer(bootstrap_servers=broker.bootstrap, auto_offset_reset="earliest")
        consumer.assign([TopicPartition(settings.kafka_settings().telemetry_topic, 0)])
        done = threading.Event()

        def follow() -> None:
            while not done.is_set():
                for records in consumer.poll(timeout_ms=100).values():
                    service.batches += [wire.decode_batch(record.value) for record in records]

        reader = threading.Thread(target=follow)
        reader.start()
        yield {"RANKWATCH_KAFKA": broker.bootstrap}
        done.set()
        reader.join()
        consumer.close(timeout_ms=1_000)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--kafka", choices=KINDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, AgentService() as service, by_way_of(options.kafka, service) as kafka:
        directory = Path(folder)
        ranks = [
            subprocess.Popen([sys.executable, "-c", RANK, folder, str(rank), str(options.ranks), str(options.rate)])
            for rank in range(options.ranks)
        ]
        environment = {**service.environment, **kafka, "PYTHONPATH": str(DRIVER)}
        try:
            with AgentProcess(directory, environment) as agent:
                until(lambda: len(service.rows()) > options.ranks)
                time.sleep(WARM_UP_S)
                pids = (agent.supervisor.pid, agent.worker, reader_of(agent.worker))
                before, rows, messages = (
                    [cpu_s(pid) for pid in pids],
                    sum(service.rows().values()),
                    len(service.batches),
                )
                begin_s = time.monotonic()
                time.sleep(options.seconds)
                elapsed_s = time.monotonic() - begin_s
                used = [cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)]
                memory = [memory_bytes(pid) for pid in pids]
                rows, messages = sum(service.rows().values()) - rows, len(service.batches) - messages
                devices = sum(len(batch.devices) for batch in service.batches)
                sizes = [len(wire.encode(batch)) for batch in service.batches[5:]]
                restarts = restarted_after_s(agent, 3)
                until(lambda: service.batches[-1].boot != service.batches[0].boot)
                exits = reported_after_s(service, ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        way = options.kafka or "HTTP"
        print(f"{way}: {options.ranks} ranks x {options.rate:g} steps/s x 16 metrics, {elapsed_s:.0f} s")
        for name, value in (
            ("CPU, supervisor and worker, % of a core", f"{100 * sum(used[:2]) / elapsed_s:.2f}"),
            ("CPU, reader of eight devices, % of a core", f"{100 * used[2] / elapsed_s:.2f}"),
            ("memory, resident, supervisor + worker + reader, MB", " + ".join(f"{rss / 1e6:.1f}" for rss, _ in memory)),
            ("memory, proportional, sum, MB", f"{sum(pss for _, pss in memory) / 1e6:.1f}"),
            ("device samples sent", str(devices)),
            ("rank-steps/s sent", f"{rows / elapsed_s:.1f}"),
            ("messages/s", f"{messages / elapsed_s:.1f}"),
            ("median message, bytes", f"{statistics.median(sizes):.0f}"),
            ("bytes per rank-step at 64 rank-steps per message", f"{wire_bytes_per_rank_step():.1f}"),
            ("killed worker replaced after, median / worst, s", in_order(restarts)),
            ("killed rank told to the service after, s", in_order(exits)),
            ("records lost", str(sum(service.lost().values()))),
        ):
            print(f"  {name:<52}{value:>16}")


if __name__ == "__main__":
    main()
