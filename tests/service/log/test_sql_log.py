import pytest
from sqlalchemy import func, select

from rankwatch_service.log import dead_letters
from rankwatch_service.log.sql_log import SqlLog
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import DeadLetter
from tests.service.log.contract import LogContract, entry, values
from tests.support.clock import FakeClock


class TestSqlLog(LogContract):
    @pytest.fixture
    def log(self, engine):
        return SqlLog(engine, FakeClock())

    @pytest.fixture
    def append(self, log):
        return log.append


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


def test_trimming_forgets_the_oldest_and_keeps_positions(engine):
    log = SqlLog(engine, FakeClock())
    log.append([entry(b"%d" % number) for number in range(10)])
    assert log.trim(0, before=5, limit=3) == 3
    assert values(log)[0] == b"3"
    assert log.trim(0, before=5, limit=100) == 2
    assert log.trim(0, before=5, limit=100) == 0
    assert log.begin(0) == 5
    end = log.end(0)
    log.append([entry(b"after")])
    assert log.read(0, end, 10)[0].value == b"after"
