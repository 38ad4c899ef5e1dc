"""A small job that trains for ever on one host with scripted faults, for `docker compose up`.

    python -m rankwatch_service.demo.job.small_job --job small --ranks 8 --folder DIR

Its ranks are real processes with rankwatch's SDK in them and a real agent beside them; torch is not needed. Where the
service and Kafka are stands in the environment, as for every job.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from rankwatch_service.clock import SystemClock
from rankwatch_service.demo.job import processes
from rankwatch_service.demo.job.launcher import Launcher
from rankwatch_service.supervise import python_module

EVERY_STEPS: Final = 600
"""Steps between two faults: a minute."""

LOOK_S: Final = 0.05
AGENT_END_S: Final = 8.0
"""The agent sends what its ranks have left, then exits."""


def main(arguments: list[str]) -> int:
    """Run the job until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="a small job with faults by script")
    parser.add_argument("--job", default="small")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--every", type=int, default=EVERY_STEPS, help="steps between two faults")
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints and the ranks' output")
    parser.add_argument("--token-file", default="", help="file with an ingest token")
    options = parser.parse_args(arguments)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: stopping.append(number))
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    ranks = ("--job", options.job, "--every", str(options.every), "--folder", str(folder))
    command = python_module("rankwatch_service.demo.job.small_rank", *ranks, "--token-file", options.token_file)
    # One thread for each rank's matrices: there are more ranks than cores.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    # A job that is started again in the same folder must not repeat the names of its attempts.
    begins = SystemClock().unix_ns() // 10**9
    launcher = Launcher(command, options.ranks, options.job, folder / "logs", environment, sys.maxsize, begins)
    launcher.start()
    try:
        while not stopping:
            if launcher.poll():
                print(f"a rank died, all ranks restart as {launcher.launch}", flush=True)  # noqa: T201 - to the container's log
            time.sleep(LOOK_S)
    finally:
        launcher.stop()
    processes.await_none(str(folder), AGENT_END_S, "rankwatch.agent")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
