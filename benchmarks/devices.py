"""Counters of devices: what each second of them costs stream and the table of a job's page, and training.

    python benchmarks/devices.py [--hosts 8,128,2048] [--seconds 60] [--pairs 20]

Hosts of eight devices with ten counters each, read once a second. Stream takes them into slots, judges them and
stores them as series; the table reads the newest values of a page of 500 devices. CPU time of one process, SQLite.

For training, a model of 2.1 M parameters trains in one thread in pairs of equal times: while the agent's reader of
devices reads a substitute for the NVML library on the same core, and while it is stopped. The CPU time of a step is not
disturbed by other processes of a busy machine, but says nothing of the time in which the reader has the core.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from rankwatch import wire
from rankwatch.agent.devices.sampler import READER
from rankwatch_detectors.base import AttemptStart
from rankwatch_detectors.devices.device_degraded import DeviceDegradedConfig, DeviceDegradedDetector
from rankwatch_service.clock import SystemClock
from rankwatch_service.demo.accelerator import DRIVER
from rankwatch_service.job.boards.device_board import DeviceBoard
from rankwatch_service.job.boards.device_boards import as_frame
from rankwatch_service.names import series_of_devices
from rankwatch_service.series.last_values import last_values
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.simulate.placement import RankPlacement
from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import upgrade

DEVICES = 8
PAGE = 500
START_S = 1_800_000_000.0
ATTEMPT = "l.0"
TRAINED_S = 2.0
"""Each half of a pair: the reader reads twice in it."""


def batches(hosts: int, now_s: float, rng: np.random.Generator) -> Iterator[wire.Batch]:
    """One second's message of each host."""
    for host in range(hosts):
        celsius, watts = 60 + rng.normal(0, 2, DEVICES), 600 + rng.normal(0, 20, DEVICES)
        samples = tuple(
            wire.DeviceSample(
                f"GPU-{host}-{index}",
                int(now_s * 1e9),
                index,
                float(celsius[index]),
                float(watts[index]),
                1.98e9,
                0.98,
                68 * 10**9,
                80 * 10**9,
                4,
                0,
                None,
                {"memory_temperature_celsius": float(celsius[index]) + 8, "power_now_w": float(watts[index])},
            )
            for index in range(DEVICES)
        )
        yield wire.Batch(1, "job", ATTEMPT, f"node-{host}", "boot", int(now_s), int(now_s * 1e9), devices=samples)


def measured(hosts: int, seconds: int) -> list[str]:
    """The cells of a line: CPU milliseconds for each second of telemetry, and for the table."""
    rng = np.random.default_rng(hosts)
    board, detector = DeviceBoard(), DeviceDegradedDetector(DeviceDegradedConfig())
    detector.observe(AttemptStart(ATTEMPT, RankPlacement().topology(hosts * DEVICES), START_S))
    spent = {"slots": 0.0, "judged": 0.0, "stored": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(f"sqlite:///{Path(folder)}/rankwatch.db")
        upgrade(engine)
        writer, series = SeriesWriter(engine, SystemClock()), series_of_devices("job", "gpu")
        for second in range(seconds):
            now_s = START_S + second
            sent = list(batches(hosts, now_s, rng))
            began_s = time.process_time()
            board.take(sent, hosts * DEVICES, now_s)
            due = list(board.due(now_s))
            spent["slots"] += time.process_time() - began_s
            for counters in due:
                began_s = time.process_time()
                detector.observe(counters)
                spent["judged"] += time.process_time() - began_s
                began_s = time.process_time()
                writer.add(series, as_frame(counters))
                spent["stored"] += time.process_time() - began_s
        began_s = time.process_time()
        writer.flush("job")
        spent["stored"] += time.process_time() - began_s
        page = list(range(min(PAGE, hosts * DEVICES)))
        times = []
        for _ in range(5):
            began_s = time.process_time()
            last_values(engine, series, page, within=0)
            times.append(time.process_time() - began_s)
        engine.dispose()
    each = [f"{1e3 * one / seconds:.2f}" for one in spent.values()]
    return [f"{hosts * DEVICES:,}", *each, f"{1e3 * statistics.median(times):.0f}"]


@contextlib.contextmanager
def reader() -> Iterator[int]:
    """PID of a reader that has begun, and whose readings are thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*READER, f"{folder}/lock"]
        reading = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(DRIVER)})
        assert reading.stdout is not None
        os.read(reading.stdout.fileno(), 1 << 16)
        emptying = subprocess.Popen(["cat"], stdin=reading.stdout, stdout=subprocess.DEVNULL)
        try:
            yield reading.pid
        finally:
            reading.kill()
            reading.wait()
            emptying.wait()


class StepTime(NamedTuple):
    """Mean seconds of a training step: by the clock, and of the training thread."""

    wall: float
    cpu: float


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> StepTime:
    """Train for a while."""
    values = torch.randn(64, 256)
    steps, begin_s, used_s = 0, time.monotonic(), time.thread_time()
    while (elapsed_s := time.monotonic() - begin_s) < TRAINED_S:
        optimizer.zero_grad()
        model(values).square().mean().backward()
        optimizer.step()
        steps += 1
    return StepTime(elapsed_s / steps, (time.thread_time() - used_s) / steps)


def measured_training(pairs: int) -> Iterator[list[str]]:
    """The cells of a line each: of what, milliseconds of a step, and how much more it is while devices are read."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    model = nn.Sequential(*(one for _ in range(4) for one in (nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))))
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer)
    found = list[dict[bool, StepTime]]()
    with reader() as pid:
        for pair in range(pairs):
            found.append({})
            for is_read in (True, False) if pair % 2 else (False, True):
                os.kill(pid, signal.SIGCONT if is_read else signal.SIGSTOP)
                found[-1][is_read] = trained(model, optimizer)
    for index, name in enumerate(StepTime._fields):
        ratios = [one[True][index] / one[False][index] for one in found]
        low, middle, high = (f"{100 * (one - 1):+.2f} %" for one in statistics.quantiles(ratios, n=4))
        yield [name, f"{1e3 * statistics.median(one[False][index] for one in found):.2f}", middle, f"{low} to {high}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=lambda text: [int(one) for one in text.split(",")], default=[8, 128, 2048])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=20, help="of training with and without a reader; 0: none")
    chosen = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("| devices | into slots, ms a second | judged | stored | table of 500, ms |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for hosts in chosen.hosts:
        print(f"| {' | '.join(measured(hosts, chosen.seconds))} |", flush=True)
    if chosen.pairs:
        print(f"\nload {os.getloadavg()[0]:.1f}\n")
        print("| time of a step | without a reader, ms | more with it, median | middle half of pairs |")
        print("| --- | ---: | ---: | ---: |")
        for cells in measured_training(chosen.pairs):
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
