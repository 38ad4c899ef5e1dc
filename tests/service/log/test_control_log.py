"""Logs in the store: the control log and its tail, and dead letters."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import func, select

from rankwatch_service.log import control_log, sql_log
from rankwatch_service.log.base import Control, Entry
from rankwatch_service.log.control_log import ControlLog, ControlTail, trim
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import DeadLetter
from tests.support.clock import FakeClock


@pytest.fixture
def controls(engine):
    return ControlLog(engine, FakeClock(unix_ns=42))


def append(engine, controls, *values: bytes, key="job") -> None:
    with write(engine) as connection:
        controls.append_in(connection, [Entry(key, value) for value in values])


def test_records_come_back_as_they_were_in_the_order_of_their_appending(engine, controls):
    append(engine, controls, b"0", b"1")
    append(engine, controls, b"2", key=ALL_JOBS)
    assert controls.read(0, 10) == [Control(0, "job", b"0", 42), Control(1, "job", b"1", 42), Control(2, "*", b"2", 42)]
    assert [record.value for record in controls.read(1, 1)] == [b"1"]
    assert (controls.begin(), controls.end()) == (0, 3)


def add_and_fail(engine, controls) -> None:
    with write(engine) as connection:
        controls.append_in(connection, [Entry("job", b"undone")])
        raise RuntimeError


def test_a_record_exists_only_if_the_row_it_explains_does(engine, controls):
    with pytest.raises(RuntimeError):
        add_and_fail(engine, controls)
    assert (controls.read(0, 10), controls.end()) == ([], 0)


def test_positions_are_never_used_again_after_everything_was_forgotten(engine, controls):
    append(engine, controls, b"0", b"1", b"2")
    with write(engine) as connection:
        assert trim(connection, before=3, limit=2) == 2
        assert trim(connection, before=3, limit=2) == 1
        assert trim(connection, before=3, limit=2) == 0
    assert (controls.begin(), controls.end()) == (3, 3)
    append(engine, controls, b"3")
    assert [record.position for record in controls.read(0, 10)] == [3]


def test_appends_from_several_threads_lose_and_double_nothing(engine, controls):
    def work(name: int) -> None:
        for number in range(25):
            append(engine, controls, b"%d:%d" % (name, number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    found = [record.value for record in controls.read(0, 1_000)]
    assert len(found) == len(set(found)) == 100
    for name in range(4):
        assert [v for v in found if v.startswith(b"%d:" % name)] == [b"%d:%d" % (name, n) for n in range(25)]


def values(source, position: int, limit: int = 100) -> list[bytes]:
    return [record.value for record in source.read(position, limit)]


def test_a_tail_reads_as_the_log_does_once_it_was_refreshed(engine, controls):
    append(engine, controls, b"0", b"1")
    tail = ControlTail(controls)
    assert values(tail, 0) == [b"0", b"1"]
    tail.refresh()
    append(engine, controls, b"2", b"3")
    assert values(tail, 2) == []
    tail.refresh()
    assert values(tail, 2) == [b"2", b"3"]
    assert values(tail, 3) == [b"3"]
    assert values(tail, 2, limit=1) == [b"2"]
    assert values(tail, 4) == []
    assert values(tail, 1) == [b"1", b"2", b"3"]


def test_a_tail_is_bounded_and_what_left_it_comes_from_the_store(engine, controls, monkeypatch):
    monkeypatch.setattr(control_log, "TAIL_MAX", 3)
    tail = ControlTail(controls)
    tail.refresh()
    append(engine, controls, *[b"%d" % number for number in range(8)])
    tail.refresh()
    assert len(tail._records) == 3
    for position in range(9):
        assert values(tail, position) == [b"%d" % number for number in range(position, 8)]


def test_dead_letters_are_bounded_in_number_and_size(engine, monkeypatch):
    monkeypatch.setattr(sql_log, "ROWS_MAX", 3)
    with write(engine) as connection:
        for number in range(5):
            sql_log.keep(connection, "api", "truncated", f"{number}", bytes(sql_log.VALUE_BYTES_MAX + 1), 1)
    with read(engine) as connection:
        details = connection.scalars(select(DeadLetter.detail).order_by(DeadLetter.id)).all()
        longest = connection.scalar(select(func.max(func.length(DeadLetter.value))))
    assert details == ["2", "3", "4"]
    assert longest == sql_log.VALUE_BYTES_MAX
