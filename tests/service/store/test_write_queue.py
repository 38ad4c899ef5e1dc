import subprocess
import sys
import threading

from sqlalchemy import text

from rankwatch_service.store.engine import open_engine, turn, write

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


def test_who_never_gets_a_turn_goes_ahead_and_lets_the_database_decide(tmp_path):
    database = str(tmp_path / "test.db")
    with turn(database, 1.0), turn(database, 0.01):
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
