import threading

import pytest

from rankwatch_service.log.base import Control, Entry
from rankwatch_service.log.control_log import ControlLog, trim
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.store.engine import write
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
    assert controls.read(0, 10) == [
        Control(0, "job", b"0", 42),
        Control(1, "job", b"1", 42),
        Control(2, "*", b"2", 42),
    ]
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

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [record.value for record in controls.read(0, 1_000)]
    assert len(found) == len(set(found)) == 100
    for name in range(4):
        assert [v for v in found if v.startswith(b"%d:" % name)] == [b"%d:%d" % (name, n) for n in range(25)]
