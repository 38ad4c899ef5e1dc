"""A real api process, as benchmarks measure it."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import httpx2

from rankwatch.agent.processes import TICKS_PER_S, read_stat
from rankwatch.children import python_module
from rankwatch_service.demo.processes import end, free_port, started


@contextlib.contextmanager
def api_process(url: str, folder: Path) -> Iterator[tuple[int, int]]:
    """An api on the database of this URL; its port and its PID."""
    port = free_port()
    own = {"RANKWATCH_DATABASE_URL": url, "RANKWATCH_PORT": str(port), "RANKWATCH_DATA_DIR": str(folder)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RANKWATCH_")} | own

    def answers() -> bool:
        with contextlib.suppress(httpx2.TransportError):
            return httpx2.get(f"http://127.0.0.1:{port}/readyz").is_success
        return False

    process = started(python_module("rankwatch_service", "api"), folder / "api.log", answers, 60.0, env=environment)
    try:
        yield port, process.pid
    finally:
        end(process, 10.0)


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    stat = read_stat(pid)
    assert stat is not None, "the process has ended"
    return stat.cpu_ticks / TICKS_PER_S
