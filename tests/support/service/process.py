"""Roles of the service as real processes, to be killed."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog

START_S = 120.0
LOGIN = re.compile(r"(https?://\S+)/login#(\S+)")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


_running: set[subprocess.Popen[bytes]] = set()


@pytest.fixture(autouse=True)
def no_role_outlives_its_test() -> Iterator[None]:
    """What a test that failed half-way left running would take the machine from all others."""
    before = set(_running)
    yield
    for process in _running - before:
        process.kill()
        process.wait()
        _running.discard(process)


@pytest.fixture(autouse=True)
def no_text_log_outlives_its_test() -> Iterator[None]:
    """A log into the captured stderr of a test that has ended would fail whoever logs after it."""
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    yield
    structlog.reset_defaults()
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks


class Role:
    """`python -m rankwatch_service ROLE …`, with a configuration of its own."""

    def __init__(self, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._arguments = arguments
        clean = {key: value for key, value in os.environ.items() if not key.startswith("RANKWATCH_")}
        self._environment = clean | {"XDG_CONFIG_HOME": str(folder / "config")} | dict(environment or {})
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "out.txt").open("ab") as out, (self.folder / "err.txt").open("ab") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rankwatch_service", *self._arguments],
                env=self._environment,
                stdout=out,
                stderr=err,
                cwd=self.folder,
            )
        _running.add(self.process)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """Ask it to end, and return its exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(60)

    def token(self) -> str:
        """The token that `up` leaves for commands on this machine."""
        return json.loads((self.folder / "config" / "rankwatch" / "local.json").read_text())["token"]

    def said(self) -> str:
        files = (self.folder / name for name in ("out.txt", "err.txt"))
        return "".join(file.read_text() for file in files if file.exists())


class Up(Role):
    """`rankwatch up` over data below its folder; `url`, `login` and `http` are those of its newest start."""

    def __init__(
        self, folder: Path, *arguments: str, port: int = 0, environment: Mapping[str, str] | None = None
    ) -> None:
        self.data = folder / "data"
        where = ("--data", str(self.data), "--port", str(port))
        super().__init__(folder, "up", *where, *arguments, environment=environment)

    def start(self) -> None:
        known = len(LOGIN.findall(self.said())) if self.folder.exists() else 0
        super().start()
        self.url, self.login = until("login link", lambda: LOGIN.findall(self.said())[known:])[0]
        self.http = Http(self.url, self.token())

    def stop(self) -> int:
        self.http.close()
        return super().stop()

    def kept(self, name: str) -> str:
        """The content of a file of the data folder."""
        return (self.data / name).read_text().strip()

    def socket(self) -> socket.socket:
        """A connection to its port."""
        host, port = self.url.rpartition("/")[2].split(":")
        return socket.create_connection((host, int(port)), timeout=30)


@contextmanager
def running_up(folder: Path, *arguments: str, port: int = 0, **environment: str) -> Iterator[Up]:
    role = Up(folder, *arguments, port=port, environment=environment)
    role.start()
    yield role
    role.stop()


class Http:
    """Asks a service that may be away for a moment."""

    def __init__(self, url: str, token: str = "") -> None:
        self.url = url
        self.headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.client = httpx2.Client(base_url=url, headers=self.headers, timeout=5.0, trust_env=False)

    def close(self) -> None:
        self.client.close()

    def ask(self, method: str, path: str, within_s: float = START_S, **how: Any) -> httpx2.Response:
        """The first answer that is not a 5xx."""
        deadline_s = time.monotonic() + within_s
        while True:
            try:
                answer = self.client.request(method, path, **how)
                if answer.status_code < 500:
                    return answer
            except httpx2.TransportError:
                pass
            assert time.monotonic() < deadline_s, f"{method} {path} has no answer"
            time.sleep(0.05)


def until(what: str, true: Any, within_s: float = START_S) -> Any:
    """Wait for a condition; return what made it true."""
    deadline_s = time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < deadline_s, f"{what} not within {within_s} s"
        time.sleep(0.05)
    return found


def children(pid: int) -> dict[str, int]:
    """Pids of a process's children by their last argument (the role)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            stat = (entry / "stat").read_text()
            arguments = (entry / "cmdline").read_bytes().split(b"\0")[:-1]
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == pid and arguments:
            found[arguments[-1].decode()] = int(entry.name)
    return found


def alive(pid: int) -> bool:
    return _state(pid) not in ("", "Z")


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process."""
    return _state(pid) == "T"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    """Let a server answer, in a thread of this process."""
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
