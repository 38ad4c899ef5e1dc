"""A Kafka-protocol broker that the demo starts, from the package `noida-db`.

It is small and starts at once, keeps its data in a folder, and ends with the process that started it. It is only for
demos; otherwise use Apache Kafka.
"""

from __future__ import annotations

import socket
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rankwatch_service.demo.services.child import ChildError, end, free_port, started

PACKAGE: Final = "noida_db"
START_S: Final = 30.0
STOP_S: Final = 5.0
ANSWER_S: Final = 0.1


class BrokerError(Exception):
    """The broker cannot be started; the message says why."""


class BrokerProcess:
    """One broker with its data in a folder, on a free port of the loopback interface. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Choose a port; the broker runs from `start` on.

        Raises:
            BrokerError: the package is not installed.
        """
        package = find_spec(PACKAGE)
        if package is None or package.origin is None:
            raise BrokerError("noida-db is not installed: pip install noida-db==0.2.3")
        self._program = Path(package.origin).with_name("noida-db")
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start the broker; returns when it accepts connections.

        Raises:
            BrokerError: the broker ended, or did not answer within `START_S`.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        where = ["--kafka-port", str(self._port), "--data-dir", str(self._folder / "data")]
        command = [str(self._program), "start", "--only", "kafka", *where]
        try:
            self._process = started(command, self._folder / "log", self._answers, START_S)
        except ChildError as error:
            raise BrokerError(f"the broker does not answer; its output:\n{error}") from error

    def stop(self) -> None:
        """Stop the broker if it runs."""
        if self._process is not None:
            end(self._process, STOP_S)
            self._process = None

    def _answers(self) -> bool:
        with socket.socket() as probe:
            probe.settimeout(ANSWER_S)
            return probe.connect_ex(("127.0.0.1", self._port)) == 0
