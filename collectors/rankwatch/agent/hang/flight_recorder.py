"""Asks ranks for dumps of torch's flight recorder, through torch's worker server where the job runs one.

The server is a thread in C++ that needs no interpreter lock: it answers while the rank is blocked in a collective or
loops in Python, and what it waits for itself, such as a driver, no thread of the training waits for. rankwatch starts
none. Dumps that torch writes to disk (`TORCH_FR_DUMP_TEMP_FILE`) are pickles, which are never read.
"""

from __future__ import annotations

import http.client
import logging
import queue
import socket
import struct
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from rankwatch import wire
from rankwatch.agent.clock import AgentClock
from rankwatch.agent.hang.flight_dump import reduced
from rankwatch.agent.ranks import LocalRank

HANDLER: Final = "/handler/fr_trace_json"
ANSWER_WITHIN_S: Final = 2.0
"""A dump takes milliseconds; this allows for a crowded host."""
DUMP_WAIT_S: Final = 4.0
"""How long a kill waits for the dumps of this host: two ranks may not answer."""
DUMP_BYTES_MAX: Final = 32 * 1024 * 1024
"""Largest dump that is read: 2,000 entries have a megabyte."""
ASKED_MAX: Final = 4_096
"""(Request, rank) pairs that are remembered: eight requests to the 512 ranks that one agent reads."""

_CREDENTIALS: Final = struct.Struct("3i")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Request:
    request: str
    attempt: str
    rank: int
    step: int
    pid: int
    server: str


class FlightRecorders:
    """Asks one rank after the other in a thread of its own; no call waits for an answer."""

    def __init__(self, clock: AgentClock) -> None:
        self._clock = clock
        self._answered: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._asked: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[_Request, str, str]] = queue.SimpleQueue()
        self._outstanding = 0
        self._until_s = 0.0
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> bool:
        """True while a dump is outstanding that is worth waiting for."""
        return self._outstanding > 0 and self._clock.monotonic_s() < self._until_s

    def begin(self, request: str, rank: LocalRank) -> None:
        """Ask a rank for its dump, once for each request; nothing if it has no worker server."""
        server, key = str(rank.identity.get("worker_server") or ""), (request, rank.path)
        if not server or rank.process is None or key in self._answered:
            return
        self._answered[key] = None
        if len(self._answered) > ASKED_MAX:
            self._answered.popitem(last=False)
        block = rank.reader.progress()
        self._outstanding += 1
        self._until_s = self._clock.monotonic_s() + DUMP_WAIT_S
        self._asked.put(_Request(request, rank.attempt(block.k), rank.rank, block.step, rank.process.pid, server))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="flight-recorder", daemon=True)
            self._thread.start()

    def take(self) -> list[tuple[str, wire.Event]]:
        """Attempts with `flight_dump` events: dumps that have arrived, and why others have not."""
        ready = []
        while not self._answers.empty():
            asked, dump, reason = self._answers.get()
            self._outstanding -= 1
            fields = {"order": asked.request, "dump": dump, "reason": reason}
            ready.append(
                (asked.attempt, wire.Event("flight_dump", self._clock.unix_ns(), asked.rank, asked.step, fields))
            )
        return ready

    def _run(self) -> None:
        while True:
            asked = self._asked.get()
            try:
                self._answers.put((asked, reduced(fetch(asked.server, asked.pid)), ""))
            except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
                _log.info("no flight recorder of rank %d: %s", asked.rank, error)
                self._answers.put((asked, "", f"{type(error).__name__}: {error}"[:300]))


def fetch(server: str, pid: int) -> bytes:
    """The dump of the process `pid`, which must be the one that has bound the socket.

    Raises:
        OSError, ValueError, http.client.HTTPException: it does not answer in time, is another process, has no flight
            recorder, or its dump is too large.
    """
    until_s = time.monotonic() + ANSWER_WITHIN_S
    connection = _SocketConnection(server, pid)
    try:
        connection.request("POST", HANDLER, body=b"")
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise ValueError(f"status {answer.status}")
        dump = b""
        while more := answer.read1(1024 * 1024):
            dump += more
            if len(dump) > DUMP_BYTES_MAX:
                raise ValueError(f"larger than {DUMP_BYTES_MAX // 2**20} MiB")
            if time.monotonic() > until_s:
                raise TimeoutError(f"not within {ANSWER_WITHIN_S:g} s")
        return dump
    finally:
        connection.close()


class _SocketConnection(http.client.HTTPConnection):
    def __init__(self, path: str, pid: int) -> None:
        super().__init__("localhost", timeout=ANSWER_WITHIN_S)
        self._path = path
        self._pid = pid

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
        peer, _, _ = _CREDENTIALS.unpack(self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if peer != self._pid:
            raise ConnectionRefusedError(f"{self._path} is of process {peer}, not of the rank")
