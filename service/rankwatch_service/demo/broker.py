"""A Kafka-protocol broker of our own, from the package `noida-db`: for the demo's distributed form.

It is small and starts at once, keeps its data in a folder, and ends with the process that started it. For anything
but a demo take Apache Kafka.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rankwatch_service.supervise import die_with_parent

PACKAGE: Final = "noida_db"
START_S: Final = 30.0
STOP_S: Final = 5.0
LOOK_S: Final = 0.1


class BrokerError(Exception):
    """There is no broker to be had; the message says why."""


class Broker:
    """One broker with its data in a folder, on loopback, at a port that was free. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Nothing runs before `start`.

        Raises:
            BrokerError: the package is not installed.
        """
        package = find_spec(PACKAGE)
        if package is None or package.origin is None:
            raise BrokerError("noida-db is not installed: pip install 'rankwatch[demo]'")
        self._program = Path(package.origin).with_name("noida-db")
        self._folder = folder
        self._port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it; returns when it takes connections.

        Raises:
            BrokerError: it ended, or did not answer within `START_S`.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        where = ["--kafka-port", str(self._port), "--data-dir", str(self._folder / "data")]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [self._program, "start", "--only", "kafka", *where],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - nothing but two system calls
            )
        deadline_s = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                said = (self._folder / "log").read_text(errors="replace")[-1_000:].strip()
                raise BrokerError(f"the broker does not answer; it said:\n{said}")
            time.sleep(LOOK_S)

    def stop(self) -> None:
        """End it; nothing if it does not run."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(LOOK_S)
            return probe.connect_ex(("127.0.0.1", self._port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
