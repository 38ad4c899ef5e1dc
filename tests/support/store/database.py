"""A migrated database of a test's own, on SQLite or on both databases in turn."""

import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, Executable, Select, event, insert

from rankwatch.wire import Progress, View
from rankwatch_service.orders.running_attempt import ReceivedView, store_views
from rankwatch_service.store.engine import open_engine, read, write
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.store.models import Base
from tests.support.values.incidents import incident_row


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a migrated database; a test that takes it runs once on each kind."""
    if request.param == "sqlite":
        new_database(tmp_path).dispose()
        yield f"sqlite:///{tmp_path}/rankwatch.db"
    else:
        with request.getfixturevalue("postgres").migrated() as url:
            yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database without tables, once of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/new/folder/test.db"
    else:
        with request.getfixturevalue("postgres").empty() as url:
            yield url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """An open engine on such a database."""
    engine = without_sync(open_engine(database_url))
    yield engine
    engine.dispose()


def new_database(folder: Path) -> Engine:
    """An engine on the migrated SQLite database of a folder, which is made if there is none."""
    file = folder / "rankwatch.db"
    if not file.exists():
        file.write_bytes(_migrated())
    return without_sync(open_engine(f"sqlite:///{file}"))


def without_sync(engine: Engine) -> Engine:
    """Have SQLite not wait for the disk: commits then survive a process that is killed, not a power cut."""
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda connection, _record: connection.execute("PRAGMA synchronous=OFF"))
    return engine


@cache
def _migrated() -> bytes:
    """The content of a new database. Made once for all tests of a process: migrating takes half a second."""
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(f"sqlite:///{folder}/new.db")
        upgrade(engine)
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        engine.dispose()
        return Path(folder, "new.db").read_bytes()


FAR_NS = 2**62


def add(engine: Engine, model: type[Base], *rows: dict[str, Any], **columns: Any) -> None:
    """Insert rows; the columns are those of one row, or what all rows have in common."""
    with write(engine) as connection:
        connection.execute(insert(model), [row | columns for row in rows or [{}]])


def job_row(name: str = "j", **changes: Any) -> dict[str, Any]:
    seen = {"first_seen_unix_ns": 1, "last_seen_unix_ns": 2, "step": 5, "step_time_s": 0.1, "loss": 1.0}
    return {"name": name, "state": "running", "attempt": "l.0", "world_size": 4, "ranks_reporting": 4} | seen | changes


def attempt_row(job: str = "j", *, can: Iterable[str] = (), ranks: Any = (), **changes: Any) -> dict[str, Any]:
    topology = {"ranks": list(ranks), "can": list(can), "replicated": True}
    ran = {"started_unix_ns": 1, "ended_unix_ns": None, "first_step": 0, "last_step": 5}
    return {"job": job, "attempt": "l.0", "number": 1, "world_size": 4, "topology": topology} | ran | changes


def checkpoint_row(job: str = "j", step: int = 4, tier: str = "local", **changes: Any) -> dict[str, Any]:
    shards = {"shards_expected": 1, "shards": [0], "seconds": 1.0, "bytes": 1, "location": "/x"}
    proven = {"verdict": "good", "verdict_reason": "", "saved_unix_ns": step}
    return (
        {"job": job, "id": f"{tier}:l.0:{step}", "attempt": "l.0", "step": step, "tier": tier}
        | shards
        | proven
        | changes
    )


def command_row(name: str = "cmd_1", **changes: Any) -> dict[str, Any]:
    """One that is over: the driver leaves it alone."""
    asked = {"action": "pause", "params": {}, "reason": "", "requested_by": "ann", "requested_unix_ns": 1}
    became = {"state": "applied", "result": "", "expires_unix_ns": FAR_NS}
    return {"id": name, "job": "j", "attempt": "l.0"} | asked | became | changes


def report(
    engine: Engine, job: str = "j", at_unix_ns: int = FAR_NS, *ranks: Progress, attempt: str = "l.0", agent: str = ""
) -> None:
    """What an agent would report of a job at this time; nothing answers its orders."""
    store_views(engine, [ReceivedView(View(job, attempt, f"of-{attempt}", "b", 0, ranks), agent)], at_unix_ns)


def numbered_incident(number: int, **changes: Any) -> dict[str, Any]:
    """An incident of job j whose id, steps and times are of this number."""
    named = {"id": f"inc_{number}", "job": "j", "attempt": "l.0", "scope": "rank:1", "ranks": [1], "hosts": ["h"]}
    steps = {"onset_step": number, "detected_step": number}
    times = {"onset_unix_ns": number // 2, "detected_unix_ns": number, "updated_unix_ns": number}
    rest = {"devices": [], "summary": "slow", "evidence": {"ratio": "NaN"}, "impact_gpu_hours_per_hour": 0.5}
    return incident_row(**named | steps | times | rest | changes)


def change(engine: Engine, statement: Executable) -> None:
    with write(engine) as connection:
        connection.execute(statement)


def rows_of(engine: Engine, query: Select[Any]) -> list[Any]:
    with read(engine) as connection:
        return list(connection.execute(query))


def values_of(engine: Engine, query: Select[Any]) -> list[Any]:
    """Of a query for one column."""
    return [row[0] for row in rows_of(engine, query)]
