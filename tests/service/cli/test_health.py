"""Health checks of roles without a port, by their last report in the database."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from sqlalchemy import Engine, insert
from typer.testing import CliRunner, Result

from rankwatch_service.cli.app import app
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.lease import Lease
from rankwatch_service.store.engine import open_engine, write
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.store.models import StreamProcess


@pytest.fixture
def store(tmp_path: Path) -> Engine:
    engine = open_engine(f"sqlite:///{tmp_path}/rankwatch.db")
    upgrade(engine)
    yield engine
    engine.dispose()


def asked(role: str, folder: Path) -> Result:
    return CliRunner().invoke(app, ["health", role, "--data", str(folder)])


def told(engine: Engine, host: str, age_s: float) -> None:
    at = SystemClock().unix_ns() - int(age_s * 1e9)
    with write(engine) as connection:
        row = {"owner": f"{host}:42", "started_unix_ns": at, "counters": {}, "at_unix_ns": at}
        connection.execute(insert(StreamProcess).values(**row))


def test_a_stream_process_of_this_host_that_reported_is_healthy(tmp_path: Path, store: Engine) -> None:
    told(store, socket.gethostname(), 3.0)
    assert asked("stream", tmp_path).exit_code == 0


@pytest.mark.parametrize(("host", "age_s"), [(socket.gethostname(), 45.0), ("elsewhere", 1.0)])
def test_a_silent_or_remote_stream_process_is_not_healthy(
    tmp_path: Path, store: Engine, host: str, age_s: float
) -> None:
    told(store, host, age_s)
    result = asked("stream", tmp_path)
    assert isinstance(result.exception, CliError)
    assert result.exception.status is Status.FINDINGS


def test_a_notifier_is_healthy_while_somebody_holds_its_lease(tmp_path: Path, store: Engine) -> None:
    assert isinstance(asked("notify", tmp_path).exception, CliError)
    assert Lease(store, "notify", SystemClock()).hold()
    assert asked("notify", tmp_path).exit_code == 0


def test_a_missing_database_is_reported_in_one_line() -> None:
    url = "postgresql://nobody:secret@127.0.0.1:1/none"
    result = CliRunner().invoke(app, ["health", "stream", "--database-url", url])
    assert isinstance(result.exception, CliError)
    assert "\n" not in str(result.exception)
    assert "secret" not in str(result.exception)
