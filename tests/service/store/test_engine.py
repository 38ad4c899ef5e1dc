import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from rankwatch_service.store import engine as store_engine
from rankwatch_service.store import postgres as postgres_limits
from rankwatch_service.store.engine import WriteQueue, in_turn, open_engine, read, turn, write, write_aside
from rankwatch_service.store.errors import StoreAddressError, StoreBusyError
from tests.support.service.process import until


@pytest.fixture
def engine(empty_database_url):
    engine = open_engine(empty_database_url, "test")
    make_tables(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def sqlite(tmp_path):
    engine = open_engine(f"sqlite:///{tmp_path}/test.db")
    make_tables(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def server(postgres, monkeypatch):
    """An engine of a PostgreSQL that may take 0.3 s to answer."""
    monkeypatch.setattr(postgres_limits, "ANSWER_TIMEOUT_S", 0.3)
    with postgres.empty() as url:
        engine = open_engine(url)
        make_tables(engine)
        yield engine
        engine.dispose()


def make_tables(engine) -> None:
    identity = "GENERATED ALWAYS AS IDENTITY" if engine.dialect.name == "postgresql" else ""
    with write(engine) as connection:
        connection.execute(text(f"CREATE TABLE parent (id INTEGER {identity} PRIMARY KEY)"))
        connection.execute(text("CREATE TABLE child (parent INTEGER REFERENCES parent (id))"))


def at_once(threads: int, work) -> None:
    started = [threading.Thread(target=work) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()


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


def test_a_reader_sees_one_state_while_a_writer_commits(engine):
    with read(engine) as reader:
        assert reader.execute(text("SELECT count(*) FROM parent")).scalar_one() == 0
        with write(engine) as writer:
            add(writer)
        assert reader.execute(text("SELECT count(*) FROM parent")).scalar_one() == 0


def test_foreign_keys_are_enforced(engine):
    with pytest.raises(IntegrityError), write(engine) as connection:
        connection.execute(text("INSERT INTO child VALUES (7)"))


def test_commits_survive_a_power_cut_and_readers_do_not_block_writers(sqlite):
    with read(sqlite) as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar_one() == 2


def test_what_a_writer_has_read_stays_true_until_it_commits(engine):
    """Each adds as many rows as there are: any other order than one after the other gives another count."""

    def double() -> None:
        with write(engine) as connection:
            rows = connection.execute(text("SELECT count(*) FROM parent")).scalar_one()
            for _ in range(rows):
                add(connection)

    with write(engine) as connection:
        add(connection)
    at_once(7, double)
    assert count(engine) == 2**7


def test_a_reader_never_sees_an_id_before_a_smaller_one(engine):
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with write(engine) as connection:
                add(connection)
                add(connection)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        seen = 0
        while seen < 200:
            with read(engine) as connection:
                query = text("SELECT id FROM parent WHERE id > :seen ORDER BY id")
                new = connection.execute(query, {"seen": seen}).scalars().all()
            assert new == list(range(seen + 1, seen + 1 + len(new)))
            seen += len(new)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_text_with_any_character_can_be_stored_and_looked_for(engine):
    name = "a\0b \u2603 \U0001f600"
    with write(engine) as connection:
        connection.execute(text("CREATE TABLE named (name TEXT, told JSON)"))
        connection.execute(text("INSERT INTO named VALUES (:name, :told)"), {"name": name, "told": '{"x":"\\u0000"}'})
    with read(engine) as connection:
        (found,) = connection.execute(text("SELECT name FROM named WHERE name = :name"), {"name": name}).scalars()
    assert found.replace("\0", "\ufffd") == name.replace("\0", "\ufffd")


def test_only_a_writer_is_in_turn(engine):
    with write(engine) as connection:
        assert in_turn(connection)
    with write_aside(engine) as connection:
        assert not in_turn(connection)
    with read(engine) as connection:
        assert not in_turn(connection)


def test_a_reader_cannot_write_on_postgresql(server):
    with pytest.raises(StoreBusyError, match="read-only"), read(server) as connection:
        add(connection)


@contextmanager
def standing_still(connection):
    """Suspend the server's process at the other end."""
    process = connection.scalar(text("SELECT pg_backend_pid()"))
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


@pytest.mark.timeout(60)
def test_a_server_that_stands_still_is_given_up_and_used_again_when_it_goes_on(server):
    with (
        pytest.raises(StoreBusyError, match=r"not answered within 0\.3 s"),
        write(server) as connection,
        standing_still(connection),
    ):
        add(connection)
    assert count(server) == 0


def test_a_migration_may_take_longer_than_a_server_may_be_silent(server):
    with write(server) as connection:
        postgres_limits.lift_limits(connection)
        connection.execute(text("SELECT pg_sleep(0.6)"))
    with pytest.raises(StoreBusyError, match="not answered"), write(server) as connection:
        connection.execute(text("SELECT pg_sleep(0.6)"))


@pytest.mark.parametrize(
    ("url", "said"),
    [("not a url", "must be like"), ("mysql://host/name", "not mysql"), ("oracle+cx://host/name", "not oracle")],
)
def test_an_address_that_can_never_work_is_reported_in_one_line(url, said):
    with pytest.raises(StoreAddressError, match=said) as error:
        open_engine(url)
    assert "\n" not in str(error.value)


def test_without_its_driver_postgresql_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreAddressError, match=r"rankwatch\[postgres\]"):
        open_engine("postgresql://host/name")


def test_a_database_that_stays_locked_is_distinguished_from_a_broken_one(tmp_path, monkeypatch):
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


def test_nan_is_refused_in_a_json_column(sqlite):
    with pytest.raises(ValueError, match="JSON"):
        sqlite.dialect._json_serializer({"loss": float("nan")})


HOLDER = """
import sys, time
from rankwatch_service.store.engine import turn
with turn(sys.argv[1], 5.0):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_steady_writer_leaves_every_other_turn_to_who_waits(tmp_path):
    engine = open_engine(f"sqlite:///{tmp_path}/test.db")
    with write(engine) as connection:
        connection.execute(text("CREATE TABLE steady (id INTEGER PRIMARY KEY)"))
        connection.execute(text("CREATE TABLE other (id INTEGER PRIMARY KEY)"))
    stop = threading.Event()
    turns = 0

    def steady() -> None:
        nonlocal turns
        while not stop.is_set():
            with write(engine) as connection:
                connection.execute(text("INSERT INTO steady DEFAULT VALUES"))
            turns += 1

    writer = threading.Thread(target=steady)
    writer.start()
    try:
        while turns < 3:
            stop.wait(0.001)
        before = turns
        for _ in range(20):
            with write(engine) as connection:
                connection.execute(text("INSERT INTO other DEFAULT VALUES"))
        meanwhile = turns - before
    finally:
        stop.set()
        writer.join()
        engine.dispose()
    # One each would be ideal; who is between two tries is not waiting.
    assert meanwhile < 200


def test_the_turn_of_a_killed_process_is_free_at_once(tmp_path):
    database = str(tmp_path / "test.db")
    process = subprocess.Popen([sys.executable, "-c", HOLDER, database], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with turn(database, 30.0):
        pass


def test_where_no_files_can_be_made_there_are_no_turns(tmp_path):
    with turn(str(tmp_path / "missing" / "test.db"), 1.0):
        pass
    assert not (tmp_path / "missing").exists()


def test_a_database_in_memory_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in ("sqlite://", "sqlite:///:memory:"):
        engine = open_engine(url)
        with write(engine) as connection:
            connection.execute(text("SELECT 1"))
        engine.dispose()
    assert list(tmp_path.iterdir()) == []


LONG_S = 60.0


class Writers:
    """Threads that write to one database, in the order in which they did."""

    def __init__(self) -> None:
        self.queue = WriteQueue()
        self.wrote: list[str] = []
        self.threads: list[threading.Thread] = []

    def come(self, name: str, *, first: bool = False) -> None:
        """A thread begins to wait for its place; it leaves it as soon as it has written."""

        def write() -> None:
            with self.queue.place(LONG_S, first=first):
                self.wrote.append(name)

        waiting = self.queue._first if first else self.queue._others
        before = len(waiting)
        self.threads.append(threading.Thread(target=write))
        self.threads[-1].start()
        until(f"{name} waits", lambda: len(waiting) == before + 1)

    def join(self) -> list[str]:
        for thread in self.threads:
            thread.join(LONG_S)
        return self.wrote


def test_telemetry_goes_first_but_never_twice_in_a_row_while_others_wait():
    writers = Writers()
    with writers.queue.place(LONG_S, first=False):
        for name in ("comment", "silence"):
            writers.come(name)
        for name in ("batch 1", "batch 2", "batch 3"):
            writers.come(name, first=True)
    assert writers.join() == ["batch 1", "comment", "batch 2", "silence", "batch 3"]


def test_who_writes_alone_waits_for_nobody():
    queue = WriteQueue()
    for first in (True, True, False, False):
        with queue.place(LONG_S, first=first) as left_s:
            assert left_s > LONG_S / 2


def test_who_has_waited_too_long_asks_the_database_itself_and_leaves_the_place_to_others():
    writers = Writers()
    with writers.queue.place(LONG_S, first=False):
        with writers.queue.place(0.01, first=True) as left_s:
            assert left_s == 0.0
        writers.come("next")
        assert writers.wrote == []
    assert writers.join() == ["next"]


def test_a_write_that_fails_gives_its_place_back():
    queue = WriteQueue()
    with pytest.raises(ZeroDivisionError), queue.place(LONG_S, first=False) as left_s:
        assert left_s / 0
    with queue.place(LONG_S, first=False) as left_s:
        assert left_s > 0
