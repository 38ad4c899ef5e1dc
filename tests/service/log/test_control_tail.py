import pytest

from rankwatch_service.log import control_log
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog, ControlTail
from rankwatch_service.store.engine import write
from tests.support.clock import FakeClock


@pytest.fixture
def controls(engine):
    return ControlLog(engine, FakeClock())


def append(engine, controls, *values: bytes) -> None:
    with write(engine) as connection:
        controls.append_in(connection, [Entry("job", value) for value in values])


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
