"""Three nodes of Apache Kafka as one cluster, each to be killed and started by itself."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.kafka.broker import START_S, _kafka_node, answers, missing
from tests.support.service.process import free_port

NODES = 3


class KafkaNode:
    """One of them. It keeps its port and its data over restarts."""

    def __init__(self, folder: Path, number: int, port: int, voters: str) -> None:
        self.bootstrap = f"127.0.0.1:{port}"
        self._log = folder / f"node-{number}.log"
        directory = str(folder / f"node-{number}")
        self._command = [str(_kafka_node()), "--dir", directory, "--port", str(port)]
        self._command += ["--id", str(number), "--voters", voters]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it; returns before it is ready."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def kafka_nodes() -> Iterator[list[KafkaNode]]:
    """Three nodes that know each other and answer; skips, with the reason, if none can be started."""
    if why := missing("apache"):
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="rankwatch-apache-"))
    voters = ",".join(f"{number}@127.0.0.1:{free_port()}" for number in range(1, NODES + 1))
    nodes = [KafkaNode(folder, number, free_port(), voters) for number in range(1, NODES + 1)]
    try:
        for node in nodes:
            node.start()
        deadline_s = time.monotonic() + START_S
        while not all(answers(node.bootstrap) for node in nodes):
            assert time.monotonic() < deadline_s, "the three nodes are not ready"
        yield nodes
    finally:
        for node in nodes:
            node.kill()
        shutil.rmtree(folder, ignore_errors=True)
