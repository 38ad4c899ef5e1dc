"""How fast `rankwatch follow` reads logs, and what it costs to follow one that hardly grows, as Markdown.

    python benchmarks/follow_speed.py [--lines 100000] [--megabytes 0] [--idle 0] [--steps 0]

Lines per second of one process, of five forms. With `--megabytes` a log of this size is written into a temporary folder
and read as a file, and the peak of resident memory is told; with `--idle` a log that gets a line each ten seconds is
followed for so many seconds; with `--steps` a finished log of so many steps is followed into a service.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rankwatch.follow.intake import LogIntake, PassedOver
from rankwatch.follow.rows import LoggedStep
from rankwatch.follow.sources import READ_BYTES, FollowedLog
from rankwatch.follow.text_logs import TextLog
from rankwatch_service.demo.processes import own_environment
from rankwatch_service.demo.service import ServiceProcess

FORMS: dict[str, Callable[[int, float], str]] = {
    "key=value": lambda n, loss: f"step={n} loss={loss:.4f} grad_norm=1.{n % 97:02} lr=3.0e-04 time=0.2{n % 7}\n",
    "JSON lines": lambda n, loss: f'{{"step": {n}, "loss": {loss:.4f}, "grad_norm": 1.{n % 97:02}, "lr": 3e-05}}\n',
    "dicts of Python": lambda n, loss: (
        f"{{'step': {n}, 'loss': {loss:.4f}, 'grad_norm': 1.{n % 97:02}, 'lr': 3e-05}}\n"
    ),
    "bars of tqdm": lambda n, loss: (
        f"\rEpoch 0:  {n % 100:2}%|{'█' * (n % 10):10}| {n}/9000000 [{n // 60 % 60:02}:{n % 60:02}<01:30, "
        f"9.{n % 90:02}it/s, loss={loss:.4f}]"
    ),
    "CSV": lambda n, loss: f"{n},{loss:.4f},1.{n % 97:02},3e-05\n",
}


def written(form: str, lines: int) -> bytes:
    """A log of so many steps."""
    head = "step,loss,grad_norm,lr\n" if form == "CSV" else ""
    return (head + "".join(FORMS[form](n, 2.5 + 1 / (1 + n)) for n in range(lines)) + "\n").encode()


def lines_per_s(form: str, lines: int) -> float:
    """Lines that are read in a second of CPU time, the best of three times."""
    data, best = written(form, lines), 0.0
    for _ in range(3):
        intake, rows = LogIntake(TextLog(is_table=form == "CSV"), PassedOver()), 0
        began_s = time.process_time()
        for at in range(0, len(data), READ_BYTES):
            rows += sum(isinstance(entry, LoggedStep) for entry in intake.feed(data[at : at + READ_BYTES]))
        best = max(best, lines / (time.process_time() - began_s))
        assert rows == lines, (form, rows)
    return best


def long_log(folder: Path, megabytes: int) -> str:
    """Seconds and peak of resident memory of reading a long file; half of its lines are of other kinds."""
    path, part = folder / "long.log", written("key=value", 5_000)
    lines = part.splitlines(keepends=True)
    block = b"".join(line + b"[%d] worker 7 has loaded shard %d of the data\n" % (n, n) for n, line in enumerate(lines))
    with path.open("wb") as file:
        for _ in range((megabytes << 20) // len(block)):
            file.write(block)
    before_kib, began_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    log, rows = FollowedLog(path, None), 0
    rows += sum(isinstance(entry, LoggedStep) for entry in log.read())
    while log.behind:
        rows += sum(isinstance(entry, LoggedStep) for entry in log.read())
    took_s, after_kib = time.process_time() - began_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (
        f"{megabytes} MB, {rows:,} steps: {took_s:.0f} s, peak {before_kib >> 10} MB before, {after_kib >> 10} MB after"
    )


@contextlib.contextmanager
def following(folder: Path, log: Path, *more: str) -> Iterator[tuple[ServiceProcess, subprocess.Popen[bytes]]]:
    """A service, and a follower of a log beside it."""
    home = {"XDG_CONFIG_HOME": str(folder / "config"), "HOME": str(folder), "RANKWATCH_DIR": str(folder / "rings")}
    environment = own_environment() | home
    service = ServiceProcess(folder / "service", 0, environment)
    service.start()
    command = [sys.executable, "-m", "rankwatch_service.cli", "follow", str(log), "--job", "measured", *more]
    process = subprocess.Popen(command, env=environment)
    try:
        yield service, process
    finally:
        process.terminate()
        process.wait(10)
        service.stop()


def finished_log(folder: Path, steps: int) -> str:
    """Steps per second from the start of a follower until the newest one is judged."""
    log = folder / "finished.log"
    log.write_bytes(written("key=value", steps))
    with following(folder, log) as (service, _):
        began_s, step = time.monotonic(), -1
        while step < steps - 1:
            time.sleep(0.1)
            jobs = {job["name"]: job for job in service.items("/api/v1/jobs")}
            step = jobs.get("measured", {}).get("step") or -1
        took_s = time.monotonic() - began_s
    return f"{steps:,} steps in {took_s:.1f} s, {steps / took_s:,.0f} steps/s"


def idle_log(folder: Path, seconds: float) -> str:
    """CPU time of a follower of a log that gets a line each ten seconds."""
    log = folder / "idle.log"
    log.write_bytes(written("key=value", 100))
    with following(folder, log) as (_, process):
        time.sleep(5)
        began, n = cpu_s(process.pid), 100
        for second in range(int(seconds)):
            if second % 10 == 0:
                with log.open("a") as file:
                    file.write(FORMS["key=value"](n + second, 2.5))
            time.sleep(1)
        return f"{100 * (cpu_s(process.pid) - began) / seconds:.2f} % of a core"


def cpu_s(pid: int) -> float:
    """CPU time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print the table, and what else was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--megabytes", type=int, default=0)
    parser.add_argument("--idle", type=float, default=0)
    parser.add_argument("--steps", type=int, default=0)
    options = parser.parse_args()
    print("| form | lines/s |\n| --- | ---: |")
    for form in FORMS:
        print(f"| {form} | {lines_per_s(form, options.lines):,.0f} |", flush=True)
    for measured, size in ((long_log, options.megabytes), (idle_log, options.idle), (finished_log, options.steps)):
        if size:
            with tempfile.TemporaryDirectory() as folder:
                print(f"\n{measured.__name__}: {measured(Path(folder), size)}", flush=True)


if __name__ == "__main__":
    main()
