import threading

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from rankwatch_service.store.engine import open_engine, read, write
from rankwatch_service.store.errors import SchemaError
from rankwatch_service.store.migrate import check, configuration, upgrade
from rankwatch_service.store.models import Base


@pytest.fixture
def engine(tmp_path):
    engine = open_engine(f"sqlite:///{tmp_path}/test.db")
    yield engine
    engine.dispose()


def downgrade(engine) -> None:
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
    downgrade(engine)
    assert set(inspect(engine).get_table_names()) == {"alembic_version"}
    upgrade(engine)
    assert differences(engine) == []


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


def test_several_processes_may_migrate_at_once(tmp_path):
    errors: list[BaseException] = []

    def work() -> None:
        engine = open_engine(f"sqlite:///{tmp_path}/test.db")
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
        connection.execute(text("INSERT INTO control_record VALUES (0, 'j', 'old', 7), (1, 'j', 'new', 8)"))
    config = configuration()
    with write(engine) as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
    with read(engine) as connection:
        rows = connection.execute(text("SELECT position, kind, value FROM log_record")).all()
        assert rows == [(10, "control", "new")]
        assert connection.scalar(text("SELECT next_position FROM log_partition")) == 11
