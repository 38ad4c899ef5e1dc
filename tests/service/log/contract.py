"""What every log must do. A test class of one form inherits `LogContract` and provides the fixture `log`."""

import threading

from rankwatch_service.log.base import READ_BYTES_MAX, Entry, Log


def entry(value: bytes, key: str = "job") -> Entry:
    return Entry(key, value)


def values(log: Log, key: str = "job", position: int = 0, limit: int = 1_000) -> list[bytes]:
    return [record.value for record in log.read(log.partition_of(key), position, limit) if record.key == key]


class LogContract:
    def test_records_come_back_in_the_order_of_their_appending(self, log: Log):
        for number in range(5):
            log.append([entry(b"%d" % number), entry(b"%d+" % number)])
        assert values(log) == [b"0", b"0+", b"1", b"1+", b"2", b"2+", b"3", b"3+", b"4", b"4+"]

    def test_a_record_comes_back_as_it_was(self, log: Log):
        value = bytes(range(256)) * 10
        log.append([Entry("jöb", value)])
        (record,) = log.read(log.partition_of("jöb"), 0, 10)
        assert (record.key, record.value) == ("jöb", value)
        assert record.partition == log.partition_of("jöb")

    def test_reading_goes_on_behind_the_last_position(self, log: Log):
        log.append([entry(b"%d" % number) for number in range(10)])
        partition = log.partition_of("job")
        seen, position = [], log.begin(partition)
        while records := log.read(partition, position, 3):
            seen += [record.value for record in records]
            position = records[-1].position + 1
        assert seen == [b"%d" % number for number in range(10)]
        assert position == log.end(partition)

    def test_positions_grow_and_the_end_lies_behind_all_of_them(self, log: Log):
        log.append([entry(b"a"), entry(b"b")])
        log.append([entry(b"c")])
        partition = log.partition_of("job")
        positions = [record.position for record in log.read(partition, 0, 10)]
        assert positions == sorted(set(positions))
        assert log.end(partition) > positions[-1]

    def test_an_empty_log_reads_as_nothing(self, log: Log):
        assert log.read(0, 0, 10) == []
        assert log.begin(0) == log.end(0)

    def test_a_key_always_lies_in_one_partition(self, log: Log):
        for key in ("a", "b", "c", "d"):
            log.append([entry(key.encode(), key)])
        for key in ("a", "b", "c", "d"):
            assert 0 <= log.partition_of(key) < log.partitions
            assert values(log, key) == [key.encode()]

    def test_appends_from_several_threads_lose_and_double_nothing(self, log: Log):
        def work(name: int) -> None:
            for number in range(25):
                log.append([entry(b"%d:%d" % (name, number))])

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

    def test_one_read_is_bounded_in_bytes_but_never_stuck(self, log: Log):
        large = bytes(READ_BYTES_MAX // 2 + 1)
        log.append([entry(large), entry(large)])
        partition = log.partition_of("job")
        first = log.read(partition, 0, 10)
        assert len(first) == 1
        assert len(log.read(partition, first[-1].position + 1, 10)) == 1

    def test_trimming_forgets_the_oldest_and_keeps_positions(self, log: Log):
        log.append([entry(b"%d" % number) for number in range(10)])
        partition = log.partition_of("job")
        fifth = log.read(partition, 0, 10)[5].position
        assert log.trim(partition, fifth, limit=3) == 3
        assert values(log)[0] == b"3"
        assert log.trim(partition, fifth, limit=100) == 2
        assert log.trim(partition, fifth, limit=100) == 0
        assert log.begin(partition) == fifth
        end = log.end(partition)
        log.append([entry(b"after")])
        assert log.read(partition, end, 10)[0].value == b"after"
