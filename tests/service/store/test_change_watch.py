import threading
import time

import pytest
from sqlalchemy import text

from rankwatch_service.store.change_watch import ChangeWatch
from rankwatch_service.store.engine import open_engine, write
from tests.support.store.postgres import postgres_server

DEADLINE_S = 60.0


def comes(watch) -> bool:
    """Whether a change is noticed before long; a notice of another process takes a moment."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not watch.changed():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.002)
    return True


def change(engine) -> None:
    with write(engine) as connection:
        connection.execute(text("UPDATE setting SET updated_unix_ns = updated_unix_ns + 1"))


def change_and_fail(engine) -> None:
    with write(engine) as connection:
        connection.execute(text("UPDATE setting SET updated_unix_ns = 7"))
        raise RuntimeError


def insert(engine) -> None:
    with write(engine) as connection:
        connection.execute(text("INSERT INTO setting VALUES ('a', '{}', 1)"))


def test_a_change_by_anyone_else_is_noticed_once(engine):
    insert(engine)
    watch = ChangeWatch(engine)
    assert comes(watch)
    change(engine)
    assert comes(watch)
    assert not watch.changed()
    watch.close()


def test_what_was_undone_is_no_change(engine):
    insert(engine)
    watch = ChangeWatch(engine)
    assert comes(watch)
    with pytest.raises(RuntimeError):
        change_and_fail(engine)
    time.sleep(0.1)
    assert not watch.changed()
    watch.close()


def test_a_change_of_another_process_is_noticed(database_url, engine):
    insert(engine)
    watch = ChangeWatch(engine)
    assert comes(watch)
    other = open_engine(database_url)
    thread = threading.Thread(target=change, args=[other])
    thread.start()
    thread.join()
    other.dispose()
    assert comes(watch)
    watch.close()


def test_a_watch_that_is_closed_holds_no_connection(engine):
    watch = ChangeWatch(engine)
    watch.close()
    assert engine.pool.checkedout() == 0
    assert "listen" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.integration
def test_a_watch_whose_server_died_watches_again_and_says_so():
    with postgres_server() as server:
        engine = open_engine(server.url())
        watch = ChangeWatch(engine)
        assert comes(watch)
        server.kill()
        server.start()
        assert comes(watch)  # what was committed in between was not heard
        other = open_engine(server.url())
        with write(other):
            pass
        assert comes(watch)
        watch.close()
        engine.dispose()
        other.dispose()
