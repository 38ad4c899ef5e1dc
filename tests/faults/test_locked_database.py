"""Another process keeps the SQLite database locked while writers and readers go on: waiting, 503, never 500."""

import sqlite3
import threading
import time
from collections import Counter

import httpx2
import pytest
from sqlalchemy import select

from rankwatch import wire
from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.clock import SystemClock
from rankwatch_service.store.engine import BEGIN_TRIES_MAX, BUSY_TIMEOUT_MS, read, write
from rankwatch_service.store.models import LogRecord
from tests.support.service.process import Http, Role, free_port, until
from tests.support.store.database import new_database
from tests.support.values.batches import batch

pytestmark = pytest.mark.integration
WRITERS = 8
READERS = 20
GIVES_UP_S = BEGIN_TRIES_MAX * BUSY_TIMEOUT_MS / 1000
MSGPACK = {"content-type": "application/msgpack"}


class Crowd:
    """Writers that send batch after batch, each again until it is accepted, and readers of pages beside them."""

    def __init__(self, url: str, token: str) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.accepted: list[tuple[str, int]] = []
        self.bare = 0
        """Answers of 503 that do not say when to come again."""
        self.slowest_read_s = 0.0
        self._client = httpx2.Client(
            base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60.0, trust_env=False
        )
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(f"job-{n}",)) for n in range(WRITERS)]
        self._threads += [threading.Thread(target=self._read) for _ in range(READERS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _write(self, job: str) -> None:
        seq = 0
        while not self._stop.is_set():
            body = wire.encode(batch(seq, job=job))
            if self._ask("POST", "/api/v1/telemetry", content=body, headers=MSGPACK) == 202:
                self.accepted.append((job, seq))
                seq += 1
            self._stop.wait(0.05)

    def _read(self) -> None:
        while not self._stop.is_set():
            asked_s = time.monotonic()
            self._ask("GET", "/api/v1/incidents")
            self.slowest_read_s = max(self.slowest_read_s, time.monotonic() - asked_s)
            self._stop.wait(0.25)

    def _ask(self, method: str, path: str, **how) -> int:
        answer = self._client.request(method, path, **how)
        self.answers[method, answer.status_code] += 1
        self.bare += answer.status_code == 503 and "retry-after" not in answer.headers
        return answer.status_code


@pytest.mark.ci
def test_a_database_that_another_process_locks_costs_503_and_waiting_but_no_batch_and_no_500(tmp_path):
    engine = new_database(tmp_path)
    with write(engine) as connection:
        _, token = create_token(connection, TokenKind.API, "t", [Scope.ADMIN], SystemClock().unix_ns())
    port = free_port()
    environment = {"RANKWATCH_DATABASE_URL": str(engine.url), "RANKWATCH_PORT": str(port)}
    api = Role(tmp_path, "api", environment=environment)
    api.start()
    http = Http(f"http://127.0.0.1:{port}", token)
    http.ask("GET", "/readyz")
    crowd = Crowd(http.url, token)
    intruder = sqlite3.connect(tmp_path / "rankwatch.db", isolation_level=None, check_same_thread=False)
    try:
        until("writers under way", lambda: len(crowd.accepted) > 10 * WRITERS)
        intruder.execute("BEGIN IMMEDIATE")
        until("the first 503", lambda: crowd.answers["POST", 503], 4 * GIVES_UP_S)
        locked_at = len(crowd.accepted)
        read_while_locked = crowd.answers["GET", 200]
        until("readers go on", lambda: crowd.answers["GET", 200] > read_while_locked + READERS)
        intruder.execute("ROLLBACK")
        until("writers go on", lambda: len(crowd.accepted) > locked_at + 10 * WRITERS)
    finally:
        intruder.close()
        crowd.stop()
        http.close()
        api.stop()
    assert {status for _, status in crowd.answers} <= {200, 202, 503}
    assert {status for method, status in crowd.answers if method == "GET"} == {200}
    assert crowd.bare == 0
    assert crowd.slowest_read_s < GIVES_UP_S  # readers do not wait for the lock; the rest is the machine
    with read(engine) as connection:
        stored = Counter(
            (message.job, message.seq)
            for message in map(wire.decode_batch, connection.scalars(select(LogRecord.value)))
        )
    engine.dispose()
    assert set(stored) >= set(crowd.accepted)
    assert max(stored[one] for one in crowd.accepted) == 1, "an accepted batch was stored twice"
