"""The daemon: starts an agent for every job with a recorder in a directory."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from rankwatch.agent.ranks import jobs_in
from rankwatch.spawn import ensure_agent

LOOK_EVERY_S: Final = 0.5
START_AGAIN_AFTER_S: Final = 10.0
"""Keeps an agent that ends at once, for instance because its directory is read-only, from being started in a loop."""


def serve_all(directory: Path, environment: Mapping[str, str], url: str | None, token_file: Path | None) -> int:
    """Start agents until SIGTERM or Ctrl-C; the agents outlive the daemon, until their ranks end. Returns 0."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: stopping.append(number))
    known: dict[str, str] = {}
    started_s: dict[str, float] = {}
    while not stopping:
        known = {name: job for name, job in known.items() if (directory / name).exists()}
        known |= jobs_in(directory, set(known))
        now_s = time.monotonic()
        for job in set(known.values()):
            if now_s - started_s.get(job, -START_AGAIN_AFTER_S) >= START_AGAIN_AFTER_S:
                token = str(token_file) if token_file is not None else None
                if ensure_agent(str(directory), job, environment, url=url, token_file=token):
                    started_s[job] = now_s
        time.sleep(LOOK_EVERY_S)
    return 0
