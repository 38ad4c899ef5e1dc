"""The api in this process, over a database of its own, with a token for each purpose."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.testclient import TestClient

from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.secret_key import load_secret_key
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.api.app import create_app
from rankwatch_service.api.ingest import Batcher, Intake
from rankwatch_service.clock import Clock, SystemClock
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.log.sql_log import SqlLog
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine, write
from tests.support.store.database import new_database, without_sync


class Api:
    """A client that sends the admin's token by default."""

    def __init__(
        self,
        folder: Path,
        clock: Clock | None = None,
        intake: Intake | None = None,
        database_url: str = "",
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
            self.settings, self.engine, intake or Batcher("append", self.log.append), self.clock, secret_key
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


@contextmanager
def running_api(
    folder: Path, clock: Clock | None = None, intake: Intake | None = None, database_url: str = "", **more: Any
) -> Iterator[Api]:
    """`more`: settings of the service."""
    api = Api(folder, clock, intake, database_url, **more)
    with api.client:
        yield api
    api.engine.dispose()
