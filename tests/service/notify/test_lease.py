import os
import subprocess
import sys
import threading

import pytest
from sqlalchemy import select, update

from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.lease import LEASE_S, Lease, LeaseLostError, has_ended, this_process
from rankwatch_service.store.engine import open_engine, read, write
from rankwatch_service.store.models import Lease as Row
from tests.support.clock import FakeClock
from tests.support.store.database import new_database


def lease(engine, holder, clock=None):
    return Lease(engine, "notify", clock or SystemClock(), holder)


def run_out(engine):
    """As if the holder had not renewed it for too long."""
    with write(engine) as connection:
        connection.execute(update(Row).values(expires_unix_ns=1))


def stored(engine):
    with read(engine) as connection:
        return connection.execute(select(Row.__table__)).one()


def test_the_first_has_it_and_keeps_it_by_renewing(engine):
    first, second = lease(engine, "first"), lease(engine, "second")
    assert first.hold()
    assert not second.hold()
    assert first.hold()
    assert (first.valid, second.valid) == (True, False)
    assert (stored(engine).holder, stored(engine).epoch) == ("first", 1)


def test_one_that_has_run_out_is_taken_over_under_the_next_epoch(engine):
    first, second = lease(engine, "first"), lease(engine, "second")
    first.hold()
    run_out(engine)
    assert second.hold()
    assert (stored(engine).holder, stored(engine).epoch) == ("second", 2)
    assert not first.hold()
    assert not first.valid


def test_who_was_only_late_with_renewing_has_it_still(engine):
    first = lease(engine, "first")
    first.hold()
    run_out(engine)
    assert first.hold()
    assert stored(engine).epoch == 1


def test_a_released_one_is_free_at_once(engine):
    first, second = lease(engine, "first"), lease(engine, "second")
    first.hold()
    first.release()
    assert not first.valid
    assert second.hold()


def test_nothing_is_written_in_the_name_of_a_lost_lease(engine):
    first, second = lease(engine, "first"), lease(engine, "second")
    first.hold()
    with write(engine) as connection:
        first.confirm(connection)
    run_out(engine)
    second.hold()
    with pytest.raises(LeaseLostError), write(engine) as connection:
        first.confirm(connection)
    assert not first.valid
    with write(engine) as connection:
        second.confirm(connection)


def test_who_never_held_it_can_confirm_nothing(engine):
    with pytest.raises(LeaseLostError), write(engine) as connection:
        lease(engine, "nobody").confirm(connection)


def test_of_many_that_want_it_at_once_one_has_it(database_url, engine):
    held = []

    def want(number):
        own = open_engine(database_url)
        mine = lease(own, f"holder {number}")
        ready.wait()
        if mine.hold():
            held.append(number)
        own.dispose()

    for _ in range(3):
        held.clear()
        ready = threading.Barrier(6)
        threads = [threading.Thread(target=want, args=[number]) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 1
        run_out(engine)


def test_it_is_valid_for_as_long_as_nobody_else_can_take_it(tmp_path):
    engine = new_database(tmp_path)
    clock = FakeClock()
    first, second = lease(engine, "first", clock), lease(engine, "second", clock)
    first.hold()
    clock.advance(LEASE_S - 0.001)
    assert first.valid
    assert not second.hold()
    clock.advance(0.002)
    assert not first.valid
    assert second.hold()
    engine.dispose()


def test_the_lease_of_a_process_that_has_ended_on_this_machine_is_free_at_once(engine):
    script = "from rankwatch_service.notify.lease import *; print(this_process(), flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", script], **pipes)
    holder = process.stdout.readline().strip()
    assert lease(engine, holder).hold()
    mine = lease(engine, "mine")
    try:
        assert not mine.hold()
    finally:
        process.communicate("\n")
    assert mine.hold()


def test_only_what_is_seen_from_here_counts_as_ended():
    assert not has_ended(this_process())
    machine, pid, started = this_process().rsplit(" ", 2)
    assert int(pid) == os.getpid()
    assert has_ended(f"{machine} {pid} {int(started) + 1}")  # another process had this pid before
    assert not has_ended(f"elsewhere {machine} {pid} {int(started) + 1}")
    assert not has_ended("a name of any kind")
    assert not has_ended("")
