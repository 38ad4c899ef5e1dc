import sqlite3
import threading

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from rankwatch_service.store import engine as store_engine
from rankwatch_service.store.changes import ChangeWatch
from rankwatch_service.store.engine import open_engine, read, write
from rankwatch_service.store.errors import StoreBusyError


@pytest.fixture
def engine(tmp_path):
    engine = open_engine(f"sqlite:///{tmp_path}/new/folder/test.db")
    with write(engine) as connection:
        connection.execute(text("CREATE TABLE parent (id INTEGER PRIMARY KEY)"))
        connection.execute(text("CREATE TABLE child (parent INTEGER REFERENCES parent (id))"))
    yield engine
    engine.dispose()


def count(engine) -> int:
    with read(engine) as connection:
        return connection.execute(text("SELECT count(*) FROM parent")).scalar_one()


def add(connection) -> None:
    connection.execute(text("INSERT INTO parent DEFAULT VALUES"))


def add_and_fail(engine) -> None:
    with write(engine) as connection:
        add(connection)
        raise RuntimeError


def test_a_block_that_raises_leaves_nothing_behind(engine):
    with pytest.raises(RuntimeError):
        add_and_fail(engine)
    assert count(engine) == 0


def test_what_a_block_wrote_is_seen_afterwards_by_everyone(engine):
    with write(engine) as connection:
        add(connection)
    assert count(engine) == 1


def test_a_reader_sees_one_state_while_a_writer_commits(engine):
    with read(engine) as reader:
        assert reader.execute(text("SELECT count(*) FROM parent")).scalar_one() == 0
        with write(engine) as writer:
            add(writer)
        assert reader.execute(text("SELECT count(*) FROM parent")).scalar_one() == 0


def test_foreign_keys_are_enforced(engine):
    with pytest.raises(IntegrityError), write(engine) as connection:
        connection.execute(text("INSERT INTO child VALUES (7)"))


def test_commits_survive_a_power_cut_and_readers_do_not_block_writers(engine):
    with read(engine) as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar_one() == 2


def test_eight_writers_at_once_all_get_their_turn(engine):
    def work() -> None:
        for _ in range(20):
            with write(engine) as connection:
                connection.execute(text("SELECT count(*) FROM parent")).scalar_one()
                add(connection)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(engine) == 160


def test_a_database_that_stays_locked_is_told_apart_from_a_broken_one(tmp_path, monkeypatch):
    monkeypatch.setattr(store_engine, "BUSY_TIMEOUT_MS", 20)
    engine = open_engine(f"sqlite:///{tmp_path}/test.db")
    with write(engine) as connection:
        connection.execute(text("CREATE TABLE parent (id INTEGER PRIMARY KEY)"))
    other = sqlite3.connect(tmp_path / "test.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreBusyError), write(engine):
        pass
    other.execute("ROLLBACK")
    other.close()
    with write(engine) as connection:
        add(connection)
    engine.dispose()


def test_nan_is_refused_in_a_json_column(engine):
    with pytest.raises(ValueError, match="JSON"):
        engine.dialect._json_serializer({"loss": float("nan")})


def test_a_change_by_anyone_else_is_noticed_once(engine):
    watch = ChangeWatch(engine)
    assert watch.changed()
    assert not watch.changed()
    with write(engine) as connection:
        add(connection)
    assert watch.changed()
    assert not watch.changed()
    watch.close()
