"""A role waits for a database that is away, but not for ever."""

import shutil
import subprocess
import sys
import threading

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import insert, inspect, select

from rankwatch_service.store import migrate
from rankwatch_service.store.engine import open_engine, read, write
from rankwatch_service.store.errors import SchemaError, StoreBusyError
from rankwatch_service.store.migrate import START_S, check, configuration, migrations_folder, once_it_answers, upgrade
from rankwatch_service.store.models import Base, Setting
from tests.support.clock import FakeClock

MIGRATE = """
import os, sys
from sqlalchemy import event
from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import upgrade

left = int(sys.argv[2])

def count(*_):
    global left
    left -= 1
    if left == 0:
        os._exit(9)

engine = open_engine(sys.argv[1])
event.listen(engine, "before_cursor_execute", count)
upgrade(engine)
"""

NEXT = """
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade():
    op.add_column("setting", sa.Column("note", sa.Text(), nullable=False, server_default=""))
"""


@pytest.fixture
def engine(empty_database_url):
    engine = open_engine(empty_database_url)
    yield engine
    engine.dispose()


def alembic(engine, step, revision: str) -> None:
    config = configuration()
    with write(engine) as connection:
        config.attributes["connection"] = connection
        step(config, revision)


def differences(engine) -> list:
    with read(engine) as connection:
        return compare_metadata(MigrationContext.configure(connection), Base.metadata)


def test_the_migrations_make_exactly_the_tables_of_the_models(engine):
    upgrade(engine)
    assert differences(engine) == []


def test_the_first_migration_makes_the_tables_of_the_models_only_as_long_as_there_is_no_second():
    versions = sorted((migrations_folder() / "versions").glob("*.py"))
    assert len(versions) == 1 or "Base.metadata" not in versions[0].read_text()


@pytest.fixture
def next_version(tmp_path, monkeypatch):
    """A made-up next version of rankwatch is installed; calling it installs this version again."""
    folder = tmp_path / "migrations"
    shutil.copytree(migrations_folder(), folder)
    (folder / "versions" / "0002_next.py").write_text(NEXT)
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "migrations_folder", lambda: folder)
        yield patch.undo


def columns(engine) -> list[str]:
    return [column["name"] for column in inspect(engine).get_columns("setting")]


@pytest.mark.usefixtures("next_version")
def test_a_next_version_upgrades_the_tables_and_keeps_what_is_in_them(engine):
    alembic(engine, command.upgrade, "0001")
    with write(engine) as connection:
        connection.execute(insert(Setting).values(name="policy", value={}, updated_unix_ns=1))
    with pytest.raises(SchemaError, match="is at revision 0001, this version needs 0002: run `rankwatch db upgrade`"):
        check(engine)
    upgrade(engine)
    check(engine)
    assert "note" in columns(engine)
    with read(engine) as connection:
        assert connection.scalars(select(Setting.name)).all() == ["policy"]


def test_a_database_of_a_newer_version_is_refused(engine, next_version):
    upgrade(engine)
    next_version()
    for migration in (check, upgrade):
        with pytest.raises(SchemaError, match="revision 0002, which this older version does not know"):
            migration(engine)


def test_an_empty_database_is_refused_until_it_is_migrated(engine):
    with pytest.raises(SchemaError, match="rankwatch db upgrade"):
        check(engine)
    upgrade(engine)
    check(engine)


def test_several_processes_may_migrate_at_once(empty_database_url):
    errors: list[BaseException] = []

    def work() -> None:
        engine = open_engine(empty_database_url)
        try:
            upgrade(engine)
            check(engine)
        except BaseException as error:
            errors.append(error)
        finally:
            engine.dispose()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def kill_at_statement(url: str, number: int) -> bool:
    """Migrate in a process of its own that is gone before its statement `number`; False if it ended before that."""
    process = subprocess.run([sys.executable, "-c", MIGRATE, url, str(number)], check=False)
    assert process.returncode in (0, 9)
    return process.returncode == 9


@pytest.mark.ci
@pytest.mark.integration
def test_a_migration_that_is_killed_half_way_has_done_nothing_and_the_next_one_completes(empty_database_url):
    for number in (1, 2, 5, 12, 40):
        assert kill_at_statement(empty_database_url, number)
        engine = open_engine(empty_database_url)
        assert inspect(engine).get_table_names() == []
        engine.dispose()
    assert not kill_at_statement(empty_database_url, 100_000)
    engine = open_engine(empty_database_url)
    assert differences(engine) == []
    engine.dispose()


class Database:
    """Refuses so many tries before it answers."""

    def __init__(self, refusals: float) -> None:
        self.refusals = refusals
        self.tries = 0

    def __call__(self) -> str:
        self.tries += 1
        if self.tries <= self.refusals:
            raise StoreBusyError("refused")
        return "ready"


def test_a_role_tries_again_until_its_database_answers():
    clock, database = FakeClock(), Database(3)
    began_s = clock.monotonic_s()
    assert once_it_answers(database, clock) == "ready"
    assert database.tries == 4
    assert clock.monotonic_s() - began_s == pytest.approx(3.0)


def test_a_role_gives_up_after_its_time():
    clock = FakeClock()
    began_s = clock.monotonic_s()
    with pytest.raises(StoreBusyError, match="refused"):
        once_it_answers(Database(float("inf")), clock)
    assert clock.monotonic_s() - began_s == pytest.approx(START_S)


def test_what_waiting_cannot_repair_is_raised_at_once():
    clock = FakeClock()
    began_s = clock.monotonic_s()

    def begin() -> None:
        raise SchemaError("made by a newer version")

    with pytest.raises(SchemaError):
        once_it_answers(begin, clock)
    assert clock.monotonic_s() == began_s
