"""Counters of devices: what each second of them costs stream and the table of a job's page, and training.

    python benchmarks/devices.py [--hosts 8,128,2048] [--seconds 60] [--pairs 20] [--device cuda]

Hosts of eight devices with ten counters each, read once a second. Stream takes them into slots, judges them and
stores them as series; the table reads the newest values of a page of 500 devices. CPU time of one process, SQLite.

For training, a model of 2.1 M parameters trains in one thread in pairs of equal times: while the agent's reader of
devices reads a substitute for the NVML library on the same core, and while it is stopped. The CPU time of a step is not
disturbed by other processes of a busy machine, but says nothing of the time in which the reader has the core.

With --device cuda the model trains on a GPU, in steps of so small kernels that launching them is what takes the time,
and the reader reads the machine's own GPUs: both need the driver. They are free to use any core. A table more says what
one event of device times costs: the host's part of each call that the probe makes, as the median of blocks of 1,000
calls, and what an event adds to the device behind a small kernel, in alternating blocks with and without events.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from rankwatch import wire
from rankwatch.agent.devices import READER
from rankwatch.torch_probe.device import CudaDevice
from rankwatch_detectors.base import AttemptStart
from rankwatch_detectors.devices.device_degraded import DeviceDegradedConfig, DeviceDegradedDetector
from rankwatch_service.clock import SystemClock
from rankwatch_service.job.device_boards import DeviceBoard, as_frame
from rankwatch_service.names import series_of_devices
from rankwatch_service.series.query import last_values
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.simulate.job import RankPlacement
from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import upgrade
from tests.support.accelerator import DRIVER

DEVICES = 8
PAGE = 500
START_S = 1_800_000_000.0
ATTEMPT = "l.0"
TRAINED_S = 2.0
"""Each half of a pair: the reader reads twice in it."""
CALLS, BLOCKS = 1_000, 50
KERNELS = 400
"""With their events, fewer than the launches that a driver takes before it makes the host wait."""


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
            board.add(sent, hosts * DEVICES, now_s)
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
def reader(library: dict[str, str]) -> Iterator[int]:
    """PID of a reader that has begun, and whose readings are thrown away; `library`: environment that gives it NVML."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*READER, f"{folder}/lock"]
        reading = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **library})
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


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> StepTime:
    """Train for a while."""
    values = torch.randn(64, 256, device=device)
    steps, begin_s, used_s = 0, time.monotonic(), time.thread_time()
    while (elapsed_s := time.monotonic() - begin_s) < TRAINED_S:
        optimizer.zero_grad()
        model(values).square().mean().backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        steps += 1
    return StepTime(elapsed_s / steps, (time.thread_time() - used_s) / steps)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measured_training(pairs: int, device: str) -> Iterator[list[str]]:
    """The cells of a line each: of what, milliseconds of a step, and how much more it is while devices are read.

    The last line is the reader's own: its CPU time, in milliseconds for each second in which it reads.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if device == "cpu":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    layers = (one for _ in range(4) for one in (nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)))
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, device)
    found = list[dict[bool, StepTime]]()
    with reader({"PYTHONPATH": str(DRIVER)} if device == "cpu" else {}) as pid:
        begin_s = cpu_s(pid)
        for pair in range(pairs):
            found.append({})
            for is_read in (True, False) if pair % 2 else (False, True):
                os.kill(pid, signal.SIGCONT if is_read else signal.SIGSTOP)
                found[-1][is_read] = trained(model, optimizer, device)
        used_s = cpu_s(pid) - begin_s
    for index, name in enumerate(StepTime._fields):
        ratios = [one[True][index] / one[False][index] for one in found]
        low, middle, high = (f"{100 * (one - 1):+.2f} %" for one in statistics.quantiles(ratios, n=4))
        yield [name, f"{1e3 * statistics.median(one[False][index] for one in found):.2f}", middle, f"{low} to {high}"]
    yield ["the reader's CPU, ms a second", "", f"{1e3 * used_s / (pairs * TRAINED_S):.1f}", ""]


def host_us(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    taken = []
    for _ in range(BLOCKS):
        begin_ns = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        taken.append((time.perf_counter_ns() - begin_ns) / CALLS / 1e3)
        torch.cuda.synchronize()
    return statistics.median(taken)


def device_us() -> float:
    """Microseconds of device time that an event adds behind a kernel.

    The host gives all kernels while the device still spins, so that it never waits for the host.
    """
    numbers = torch.zeros(1, device="cuda")
    events = [torch.cuda.Event(enable_timing=True) for _ in range(KERNELS)]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    taken: dict[bool, list[float]] = {False: [], True: []}
    for block in range(BLOCKS):
        marked = block % 2 == 1
        torch.cuda._sleep(60_000_000)
        begin.record()
        for event in events:
            numbers.add_(1)
            if marked:
                event.record()
        end.record()
        torch.cuda.synchronize()
        taken[marked].append(begin.elapsed_time(end) * 1e3 / KERNELS)
    return statistics.median(taken[True]) - statistics.median(taken[False])


def measured_events() -> Iterator[list[str]]:
    """The cells of a line each: a call, and microseconds."""
    device = CudaDevice(torch.device("cuda", torch.cuda.current_device()))
    passed, later = device.now(), device.now()
    torch.cuda.synchronize()
    calls: dict[str, Callable[[], object]] = {
        "record an event that was used before": lambda: device.free(device.now()),
        "ask whether a graph is captured": device.captures,
        "ask whether the device has passed an event": passed.query,
        "read the time between two events": lambda: passed.elapsed_time(later),
    }
    for name, call in calls.items():
        yield [name, f"{host_us(call):.2f}"]
    yield ["the device: an event behind a kernel", f"{device_us():.2f}"]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=lambda text: [int(one) for one in text.split(",")], default=[8, 128, 2048])
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--pairs", type=int, default=20, help="of training with and without a reader; 0: none")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="on which it trains")
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
        for cells in measured_training(chosen.pairs, chosen.device):
            print(f"| {' | '.join(cells)} |")
    if chosen.device == "cuda":
        print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
        print("| call | µs |\n| --- | ---: |")
        for cells in measured_events():
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
