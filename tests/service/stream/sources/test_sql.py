import pytest

from rankwatch_service.stream import sources
from rankwatch_service.stream.saved import FencedError
from rankwatch_service.stream.sources import SqlSource
from tests.service.stream.sources.contract import SourceContract, entry, values
from tests.support.clock import FakeClock


class TestSqlSource(SourceContract):
    @pytest.fixture
    def log(self, engine):
        return SqlSource(engine, FakeClock())

    @pytest.fixture
    def append(self, log):
        return log.append


def test_a_record_tells_when_the_service_took_it(engine):
    clock = FakeClock(unix_ns=42)
    log = SqlSource(engine, clock)
    log.append([entry(b"x")])
    assert log.read(0, 0, 1)[0].appended_unix_ns == 42


def test_trimming_forgets_the_oldest_and_keeps_positions(engine):
    log = SqlSource(engine, FakeClock())
    log.append([entry(b"%d" % number) for number in range(10)])
    assert log.trim(0, before=5, limit=3) == 3
    assert values(log)[0] == b"3"
    assert log.trim(0, before=5, limit=100) == 2
    assert log.trim(0, before=5, limit=100) == 0
    assert log.begin(0) == 5
    end = log.end(0)
    log.append([entry(b"after")])
    assert log.read(0, end, 10)[0].value == b"after"


def test_what_no_start_needs_any_more_is_removed(engine, monkeypatch):
    monkeypatch.setattr(sources, "TRIM_RECORDS", 3)
    log = SqlSource(engine, FakeClock())
    log.append([entry(b"%d" % number) for number in range(10)])
    log.processed(0, committed=9, needed=8)
    assert log.begin(0) == 8
    log.processed(0, committed=9, needed=8)
    assert [record.value for record in log.read(0, 0, 10)] == [b"8", b"9"]


def test_its_process_ends_when_another_reads_it(engine):
    with pytest.raises(FencedError, match="another stream process"):
        SqlSource(engine, FakeClock()).fenced(0)
