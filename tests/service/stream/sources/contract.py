"""What every source must do.

A test class of one form inherits `SourceContract` and provides the fixtures `log`, the source, and `append`, which puts
entries into it: they can be read when it returns.
"""

import threading
from collections.abc import Callable, Sequence

from rankwatch_service.log.base import Entry
from rankwatch_service.stream.sources import Source

Append = Callable[[Sequence[Entry]], None]

WAIT_S = 15.0
"""How long a read may wait for what lies there; it comes at once as a rule."""


def entry(value: bytes, key: str = "job") -> Entry:
    return Entry(key, value)


def values(log: Source, key: str = "job", position: int = 0, limit: int = 1_000) -> list[bytes]:
    """As many records as there are, up to `limit`; a single read may bring fewer."""
    partition, found = log.partition_of(key), list[bytes]()
    while records := log.read(partition, position, limit - len(found), WAIT_S):
        position = records[-1].position + 1
        found += [record.value for record in records if record.key == key]
        if len(found) >= limit:
            break
    return found


def read(log: Source, partition: int, position: int, limit: int):
    return log.read(partition, position, limit, WAIT_S)


class SourceContract:
    def test_records_come_back_in_the_order_of_their_appending(self, log: Source, append: Append):
        for number in range(5):
            append([entry(b"%d" % number), entry(b"%d+" % number)])
        assert values(log) == [b"0", b"0+", b"1", b"1+", b"2", b"2+", b"3", b"3+", b"4", b"4+"]

    def test_a_record_comes_back_as_it_was(self, log: Source, append: Append):
        value = bytes(range(256)) * 10
        append([Entry("jöb", value)])
        (record,) = read(log, log.partition_of("jöb"), 0, 10)
        assert (record.key, record.value) == ("jöb", value)
        assert record.partition == log.partition_of("jöb")

    def test_reading_goes_on_behind_the_last_position(self, log: Source, append: Append):
        append([entry(b"%d" % number) for number in range(10)])
        partition = log.partition_of("job")
        seen, position = [], log.begin(partition)
        while records := read(log, partition, position, 3):
            seen += [record.value for record in records]
            position = records[-1].position + 1
        assert seen == [b"%d" % number for number in range(10)]
        assert position == log.end(partition)

    def test_positions_grow_and_the_end_lies_behind_all_of_them(self, log: Source, append: Append):
        append([entry(b"a"), entry(b"b")])
        append([entry(b"c")])
        partition = log.partition_of("job")
        positions, position = [], 0
        while records := read(log, partition, position, 10):
            positions += [record.position for record in records]
            position = positions[-1] + 1
        assert positions == sorted(set(positions))
        assert log.end(partition) > positions[-1]

    def test_an_empty_log_reads_as_nothing(self, log: Source):
        assert read(log, 0, 0, 10) == []
        assert log.begin(0) == log.end(0)
        assert log.drained(0, 0)

    def test_it_is_known_whether_anything_lies_behind_a_position(self, log: Source, append: Append):
        append([entry(b"a"), entry(b"b")])
        partition = log.partition_of("job")
        assert values(log) == [b"a", b"b"]
        assert not log.drained(partition, 0)
        assert log.drained(partition, log.end(partition))

    def test_what_was_read_can_be_read_again(self, log: Source, append: Append):
        append([entry(b"%d" % number) for number in range(10)])
        assert values(log, position=4, limit=3) == [b"4", b"5", b"6"]
        assert values(log, position=2, limit=3) == [b"2", b"3", b"4"]
        assert values(log, position=7) == [b"7", b"8", b"9"]

    def test_a_key_always_lies_in_one_partition(self, log: Source, append: Append):
        for key in ("a", "b", "c", "d"):
            append([entry(key.encode(), key)])
        for key in ("a", "b", "c", "d"):
            assert values(log, key) == [key.encode()]

    def test_appends_from_several_threads_lose_and_double_nothing(self, log: Source, append: Append):
        def work(name: int) -> None:
            for number in range(25):
                append([entry(b"%d:%d" % (name, number))])

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = values(log)
        assert len(found) == len(set(found)) == 100
        for name in range(4):
            own = [value for value in found if value.startswith(b"%d:" % name)]
            assert own == [b"%d:%d" % (name, number) for number in range(25)]

    def test_one_read_is_bounded_in_bytes_but_never_stuck(self, log: Source, append: Append, monkeypatch):
        for module in ("log.sql_log", "stream.kafka_source"):
            monkeypatch.setattr(f"rankwatch_service.{module}.READ_BYTES_MAX", 100)
        append([entry(bytes(60)), entry(bytes(60)), entry(bytes(200))])
        partition, position, sizes = log.partition_of("job"), 0, []
        while records := read(log, partition, position, 10):
            position = records[-1].position + 1
            sizes.append([len(record.value) for record in records])
        assert sizes == [[60], [60], [200]]
