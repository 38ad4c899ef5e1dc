import pytest
from sqlalchemy import func, select

from rankwatch_service.log import dead_letters
from rankwatch_service.log.base import Entry, RecordKind
from rankwatch_service.log.sql import SqlLog
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import DeadLetter
from tests.service.log.contract import LogContract, entry, values
from tests.support.clock import FakeClock
from tests.support.database import new_database


@pytest.fixture
def engine(tmp_path):
    engine = new_database(tmp_path)
    yield engine
    engine.dispose()


class TestOnePartition(LogContract):
    @pytest.fixture
    def log(self, engine):
        return SqlLog(engine, FakeClock())


class TestFourPartitions(LogContract):
    @pytest.fixture
    def log(self, engine):
        return SqlLog(engine, FakeClock(), partitions=4)


def add_and_fail(engine, log) -> None:
    with write(engine) as connection:
        log.append_in(connection, [entry(b"undone")])
        raise RuntimeError


def test_a_control_record_exists_only_if_the_row_it_explains_does(engine):
    log = SqlLog(engine, FakeClock())
    with pytest.raises(RuntimeError):
        add_and_fail(engine, log)
    assert log.end(0) == 0
    with write(engine) as connection:
        log.append_in(connection, [Entry("job", RecordKind.CONTROL, b"done")])
    assert values(log) == [b"done"]


def test_a_record_tells_when_the_service_took_it(engine):
    clock = FakeClock(unix_ns=42)
    log = SqlLog(engine, clock)
    log.append([entry(b"x")])
    assert log.read(0, 0, 1)[0].appended_unix_ns == 42


def test_dead_letters_are_bounded_in_number_and_size(engine, monkeypatch):
    monkeypatch.setattr(dead_letters, "ROWS_MAX", 3)
    with write(engine) as connection:
        for number in range(5):
            dead_letters.keep(connection, "api", "truncated", f"{number}", bytes(dead_letters.VALUE_BYTES_MAX + 1), 1)
    with read(engine) as connection:
        details = connection.scalars(select(DeadLetter.detail).order_by(DeadLetter.id)).all()
        longest = connection.scalar(select(func.max(func.length(DeadLetter.value))))
    assert details == ["2", "3", "4"]
    assert longest == dead_letters.VALUE_BYTES_MAX
