import subprocess
import sys
import threading

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import insert, inspect, select, text

from rankwatch_service.access.secret_key import CHECK, SecretKey
from rankwatch_service.store.engine import open_engine, read, write
from rankwatch_service.store.errors import SchemaError
from rankwatch_service.store.migrate import check, configuration, downgrade, upgrade
from rankwatch_service.store.models import Base, Receiver, Setting
from tests.support.values.incidents import SECRET, receiver_row

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


@pytest.fixture
def engine(empty_database_url):
    engine = open_engine(empty_database_url)
    yield engine
    engine.dispose()


def take_all_back(engine) -> None:
    config = configuration()
    with write(engine) as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")


def differences(engine) -> list:
    with read(engine) as connection:
        return compare_metadata(MigrationContext.configure(connection), Base.metadata)


def test_the_migrations_make_exactly_the_tables_of_the_models(engine):
    upgrade(engine)
    assert differences(engine) == []


def test_up_down_up_ends_where_it_began(engine):
    upgrade(engine)
    take_all_back(engine)
    assert set(inspect(engine).get_table_names()) == {"alembic_version"}
    upgrade(engine)
    assert differences(engine) == []


def test_an_earlier_version_gets_its_tables_back_and_this_one_goes_on_after_an_upgrade(engine):
    upgrade(engine)
    downgrade(engine, "0002")
    assert "lease" not in inspect(engine).get_table_names()
    with pytest.raises(SchemaError, match="rankwatch db upgrade"):
        check(engine)
    upgrade(engine)
    check(engine)


def test_an_earlier_version_gets_no_receiver_and_no_setting_that_it_cannot_read(engine):
    upgrade(engine)
    key = SecretKey(b"k" * 32)
    with write(engine) as connection:
        connection.execute(insert(Receiver).values(**receiver_row("plain")))
        row = receiver_row("encrypted", url=key.encrypt("http://a/"), secret=key.encrypt(SECRET))
        connection.execute(insert(Receiver).values(**row))
        connection.execute(insert(Setting).values(name=CHECK, value={"check": "00"}, updated_unix_ns=1))
        for name in ("policy", "precision"):
            connection.execute(insert(Setting).values(name=name, value={}, updated_unix_ns=1))
    downgrade(engine, "0007")
    with read(engine) as connection:
        assert connection.scalars(select(Receiver.name)).all() == ["plain"]
        assert connection.scalars(select(Setting.name)).all() == ["policy"]


def test_a_database_goes_back_only_to_a_revision_that_was_before_its_own(engine):
    upgrade(engine)
    for revision in ("9998", "9999", "base", "-1"):
        with pytest.raises(SchemaError, match="it can go back to 0001, 0002, 0003, 0004, 0005, 0006"):
            downgrade(engine, revision)
    check(engine)


def test_there_is_one_head():
    assert len(ScriptDirectory.from_config(configuration()).get_heads()) == 1


def test_an_empty_database_is_refused_until_it_is_migrated(engine):
    with pytest.raises(SchemaError, match="rankwatch db upgrade"):
        check(engine)
    upgrade(engine)
    check(engine)


def test_a_database_of_a_newer_version_is_refused(engine):
    upgrade(engine)
    with write(engine) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(SchemaError, match="does not know"):
        check(engine)
    with pytest.raises(SchemaError, match="does not know"):
        upgrade(engine)


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


def test_data_survives_a_second_upgrade(engine):
    upgrade(engine)
    with write(engine) as connection:
        connection.execute(text("INSERT INTO setting VALUES ('policy.hands_off', '{}', 1)"))
    upgrade(engine)
    with read(engine) as connection:
        assert connection.execute(text("SELECT count(*) FROM setting")).scalar_one() == 1


def test_control_records_of_the_first_version_move_to_a_log_of_their_own(engine):
    config = configuration()
    with write(engine) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        for position, kind in enumerate(["control", "telemetry", "control", "telemetry", "control"]):
            row = {"position": position, "kind": kind, "value": b"%d" % position}
            connection.execute(text("INSERT INTO log_record VALUES (0, :position, 'job', :kind, :value, 7)"), row)
        connection.execute(text("INSERT INTO log_partition VALUES (0, 5)"))
        connection.execute(text("INSERT INTO stream_position VALUES (0, 4, 2, 1)"))
        connection.execute(text("INSERT INTO stream_tick VALUES (0, 1, 0, 1), (0, 2, 3, 2)"))
        connection.execute(text("INSERT INTO snapshot VALUES (1, 0, 'job', 1, 1, '1', '', 1, true, 9)"))
        connection.execute(text("INSERT INTO snapshot_chunk VALUES (1, 0, 'state')"))
    upgrade(engine)
    with read(engine) as connection:
        moved = connection.execute(text("SELECT position, key, value, appended_unix_ns FROM control_record")).all()
        assert moved == [(0, "job", b"0", 7), (1, "job", b"2", 7), (2, "job", b"4", 7)]
        assert connection.scalar(text("SELECT next_position FROM control_end")) == 3
        assert connection.execute(text("SELECT position FROM log_record")).scalars().all() == [1, 3]
        assert connection.scalar(text("SELECT control_position FROM stream_position")) == 2
        assert connection.execute(text("SELECT control_position FROM stream_tick")).scalars().all() == [0, 2]
        assert connection.scalar(text("SELECT control_position FROM snapshot")) == 1
        assert connection.scalar(text("SELECT count(*) FROM snapshot_chunk")) == 1


def test_going_back_takes_along_what_stream_has_not_heard_yet(engine):
    upgrade(engine)
    with write(engine) as connection:
        connection.execute(text("INSERT INTO log_partition VALUES (0, 10)"))
        connection.execute(
            text(
                "INSERT INTO stream_position (partition, position, tick_number, epoch, control_position, "
                "control_needed) VALUES (0, 10, 1, 1, 1, 0)"
            )
        )
        for position, value in enumerate([b"old", b"new"]):
            row = {"position": position, "value": value}
            connection.execute(text("INSERT INTO control_record VALUES (:position, 'j', :value, 7)"), row)
    config = configuration()
    with write(engine) as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
    with read(engine) as connection:
        rows = connection.execute(text("SELECT position, kind, value FROM log_record")).all()
        assert rows == [(10, "control", b"new")]
        assert connection.scalar(text("SELECT next_position FROM log_partition")) == 11
