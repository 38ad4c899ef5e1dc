"""A small job that trains without end on one host with scripted faults, for `docker compose up`.

    python -m rankwatch_service.demo.job.small_job --job small --ranks 8 --folder DIR

Its ranks are real processes that use rankwatch's SDK, with a real agent; torch is not needed. The addresses of the
service and Kafka are read from the environment, as by every job.
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
"""Steps between two faults, which take a minute."""

LOOK_S: Final = 0.05
AGENT_END_S: Final = 8.0
"""Time for the agent to send the last records and exit."""


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
    # One thread for each rank, since there may be more ranks than cores.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    # A number that increases with each start, so that a job restarted in the same folder repeats no launch name.
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
