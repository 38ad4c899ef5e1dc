"""The api in this process, over a database of its own, with a token for each purpose."""

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from rankwatch.agent.processes import TICKS_PER_S, read_stat
from rankwatch.children import python_module
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.secret_key import load_secret_key
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.api.app import create_app, create_people_app
from rankwatch_service.api.http.connection import Connections, TlsServer
from rankwatch_service.api.ingest import Batcher, Intake
from rankwatch_service.api.people_process import PeopleServer
from rankwatch_service.api.serve import KEEP_ALIVE_S
from rankwatch_service.clock import Clock, SystemClock
from rankwatch_service.demo.processes import end, free_port, started
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.log.sql_log import SqlLog
from rankwatch_service.notify.lease import LEASE_NS
from rankwatch_service.policy.control_records import decode_control
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine, write
from rankwatch_service.store.models import Lease
from rankwatch_service.stream.process import PartitionReport, Reporter
from tests.support.service.process import until
from tests.support.store.database import add, new_database, without_sync

MSGPACK = {"content-type": "application/msgpack"}
OURS = {"Sec-Fetch-Site": "same-origin"}
"""A browser sends it from pages of the service."""


class Api:
    """A client that sends the admin's token by default."""

    def __init__(
        self,
        folder: Path,
        clock: Clock | None = None,
        intake: Intake | None = None,
        database_url: str = "",
        people: Path | None = None,
        **more: Any,
    ) -> None:
        self.clock = clock or SystemClock()
        self.engine = without_sync(open_engine(database_url)) if database_url else new_database(folder)
        self.log = SqlLog(self.engine, self.clock)
        self.controls = ControlLog(self.engine, self.clock)
        self.settings = Settings(
            data_dir=folder, database_url=self.engine.url.render_as_string(False), allowed_hosts="testserver", **more
        )
        secret_key = load_secret_key(self.settings, self.engine, self.clock)
        self.app: FastAPI = create_app(
            self.settings, self.engine, intake or Batcher("append", self.log.append), self.clock, secret_key, people
        )
        self.client = TestClient(self.app, raise_server_exceptions=False)
        self.admin = self.token(Scope.ADMIN)

    def token(self, *scopes: Scope, job: str = "", expires_unix_ns: int | None = None) -> str:
        with write(self.engine) as connection:
            _, text = create_token(
                connection,
                TokenKind.API,
                "+".join(scopes),
                scopes,
                self.clock.unix_ns(),
                job=job,
                expires_unix_ns=expires_unix_ns,
            )
        return text

    def ask(self, method: str, path: str, *, token: str | None = None, key: str = "", **how):
        headers = dict(how.pop("headers", {}))
        bearer = self.admin if token is None else token
        if bearer:
            headers["Authorization"] = f"Bearer {bearer}"
        if key:
            headers["Idempotency-Key"] = key
        return self.client.request(method, path, headers=headers, **how)

    def get(self, path: str, **how):
        return self.ask("GET", path, **how)

    def post(self, path: str, body=None, **how):
        return self.ask("POST", path, json={} if body is None else body, **how)

    def send(self, body: Any, path: str = "telemetry", headers: Any = MSGPACK, **how):
        """What agents send."""
        return self.ask("POST", f"/api/v1/{path}", content=body, headers=headers, **how)

    def log_in(self, token: str, headers: Any = OURS):
        """Open a session in the client, as the login page does."""
        return self.client.post("/api/v1/session", json={"token": token}, headers=headers)

    def reported(self, kind: type[Any]) -> list[Any]:
        """Records of a kind for stream, in their order."""
        records = [decode_control(one.value) for one in self.controls.read(0, 1_000)]
        return [record for record in records if isinstance(record, kind)]


@contextmanager
def running_api(
    folder: Path, clock: Clock | None = None, intake: Intake | None = None, database_url: str = "", **more: Any
) -> Iterator[Api]:
    """`more`: settings of the service."""
    api = Api(folder, clock, intake, database_url, **more)
    with api.client:
        yield api
    api.engine.dispose()


@contextmanager
def served_api(folder: Path, **more: Any) -> Iterator[tuple[Api, str]]:
    """The api on a real port, in a thread of this process, and its URL; `more`: settings of the service."""
    api = Api(folder, **more)
    context = api.app.state.context
    connections = Connections(lambda reason: context.counters.connections_closed.labels(reason).inc(), context.budgets)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1_024)
    config = uvicorn.Config(
        api.app,
        log_level="warning",
        timeout_graceful_shutdown=1,
        proxy_headers=False,
        http=connections.protocol,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = TlsServer(config, connections, tls=None)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield api, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        api.engine.dispose()


@contextmanager
def people_app(api: Api, path: Path) -> Iterator[FastAPI]:
    """The second application, which answers people, in a thread of this process; on the database of the first."""
    secret_key = load_secret_key(api.settings, api.engine, api.clock)
    app = create_people_app(api.settings, api.engine, api.clock, secret_key)
    server = PeopleServer(app, path)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until("the second application is served", lambda: server.started)
        yield app
    finally:
        server.should_exit = True
        thread.join()


def stream_reports(api: Api, tick_s: int = 0) -> None:
    """Stream owns partition 0, and its newest tick was `tick_s` ago."""
    tick = api.clock.unix_ns() - tick_s * 10**9
    Reporter(api.engine, api.clock, "host:1").report([PartitionReport(0, 3, 7, 7, tick, 0)], Counter())


def notifier_reports(api: Api, ago_s: int = 0) -> None:
    """The notifier took its lease `ago_s` ago."""
    until = api.clock.unix_ns() + LEASE_NS - ago_s * 10**9
    add(api.engine, Lease, name="notify", holder="host 1", epoch=1, expires_unix_ns=until)


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
