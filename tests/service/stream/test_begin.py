"""How a stream starts where the log is not as it was left: trimmed, replaced, or with other partitions."""

import pytest
from sqlalchemy import insert, select, update

from rankwatch.kafka.settings import partition_of
from rankwatch_service.log.base import Entry, Record
from rankwatch_service.log.control_log import trim
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.policy import Policy, policy_record
from rankwatch_service.store import models
from rankwatch_service.store.engine import write
from rankwatch_service.stream import partition
from rankwatch_service.stream.loop import SNAPSHOT_S, Stream
from rankwatch_service.stream.saved import pack
from tests.support.clock import FakeClock
from tests.support.service.stream import Service
from tests.support.store.database import new_database


class ForgetfulLog:
    """A log in memory that can lose its beginning, or everything."""

    def __init__(self, clock: FakeClock, partitions: int = 1) -> None:
        self.partitions = partitions
        self._clock = clock
        self.records: dict[int, list[Record]] = {number: [] for number in range(partitions)}
        self.first = dict.fromkeys(self.records, 0)
        self.misled: int | None = None
        """The partition into which records come, whatever their keys."""

    def partition_of(self, key: str) -> int:
        return partition_of(key, self.partitions)

    def append(self, entries: list[Entry]) -> None:
        for entry in entries:
            number = self.misled if self.misled is not None else self.partition_of(entry.key)
            record = Record(number, self.end(number), entry.key, entry.value, self._clock.unix_ns())
            self.records[number].append(record)

    def forget(self, before: int) -> None:
        self.records[0] = self.records[0][before - self.first[0] :]
        self.first[0] = before

    def begin(self, partition: int) -> int:
        return self.first[partition]

    def end(self, partition: int) -> int:
        return self.first[partition] + len(self.records[partition])

    def drained(self, partition: int, position: int) -> bool:
        return position >= self.end(partition)

    def read(self, partition: int, position: int, limit: int, wait_s: float = 0.0) -> list[Record]:
        index = max(position - self.first[partition], 0)
        return self.records[partition][index : index + limit]

    def processed(self, partition: int, committed: int, needed: int) -> None:
        """It forgets when it is told to."""


class World(Service):
    """Streams over such a log, by their partition."""

    def __init__(self, folder) -> None:
        super().__init__(new_database(folder))
        self.log = ForgetfulLog(self.clock)

    def go_on(self, steps: range) -> None:
        for step in steps:
            self.train(step)
            self.clock.advance(0.5)


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.engine.dispose()


def lived(world: World) -> Stream:
    """A stream that has processed 20 steps, with a snapshot after 10."""
    stream, _ = world.again()
    world.go_on(range(10))
    stream.step()
    for name in (ALL_JOBS, "gpt"):
        stream.save(name)
    world.go_on(range(10, 20))
    stream.step()
    return stream


def test_records_that_were_forgotten_unread_are_counted(world):
    lived(world)
    world.go_on(range(20, 40))
    world.log.forget(33)
    again, started = world.again()
    assert started.lost_records == 13
    assert again.step() == 7
    assert world.column(select(models.StreamPosition.position)) == [40]


@pytest.mark.parametrize("rests", [False, True], ids=["at work", "resting"])
def test_a_start_after_a_log_was_made_anew_goes_on_in_the_new_one(world, rests):
    old = lived(world)
    if rests:
        world.rest(old)
        old.save_due()
    world.log = ForgetfulLog(world.clock)
    world.go_on(range(20, 25))
    stream, _ = world.again()
    stream.step()
    for _ in range(3):
        world.clock.advance(SNAPSHOT_S)
        world.go_on(range(25, 26))
        stream.step()
        stream.save_due()
    needed = world.column(select(models.StreamPosition.position_needed))
    assert 0 < needed[0] <= 8
    world.go_on(range(26, 28))
    stream.step()
    again, started = world.again()
    assert started.jobs_without_snapshot == ()
    assert started.replayed_records <= 4
    assert pack(again.partition.snapshot("gpt")) == pack(stream.partition.snapshot("gpt"))


def test_an_idle_log_that_forgets_what_was_processed_long_ago_costs_no_job_its_state(world, monkeypatch):
    monkeypatch.setattr(partition, "JOBS_MAX", 1)
    stream = lived(world)
    world.rest(stream)
    stream.save_due()
    assert stream.partition.jobs == {}
    stream.close()
    world.log.forget(world.log.end(0))
    for _ in range(2):
        again = world.stream()
        assert again.start().jobs_without_snapshot == ()
        world.clock.advance(SNAPSHOT_S)
        again.step()
        again.save_due()
        again.close()
    world.train(1, job="other")
    again.step()
    assert world.column(select(models.DeadLetter.reason)) == []


def test_a_job_is_restored_from_the_tables_once_and_leaves_room_for_others(world, monkeypatch):
    monkeypatch.setattr(partition, "JOBS_MAX", 1)
    stream = lived(world)
    stream.close()
    world.go_on(range(20, 22))
    stream.step()
    world.log.forget(world.log.end(0))
    with write(world.engine) as connection:
        connection.execute(update(models.Snapshot).values(version="0"))
    again = world.stream()
    assert "gpt" in again.start().jobs_without_snapshot
    assert again.partition.jobs == {}
    world.train(1, job="other")
    again.step()
    assert world.column(select(models.DeadLetter.reason)) == []
    assert "gpt" not in world.stream().start().jobs_without_snapshot


@pytest.mark.parametrize("how", ["made anew", "forgotten"])
def test_what_people_had_set_outlives_the_log_of_telemetry(world, how):
    world.tell(ALL_JOBS, policy_record(Policy(hands_off=True)))
    stream = lived(world)
    for name in (ALL_JOBS, "gpt", ALL_JOBS, "gpt"):
        stream.save(name)
    with write(world.engine) as connection:
        assert trim(connection, before=1, limit=10) == 1
        connection.execute(update(models.StreamPosition).values(position_needed=15, control_needed=1))
    world.go_on(range(20, 22))
    stream.step()
    if how == "made anew":
        world.log = ForgetfulLog(world.clock)
    else:
        world.log.forget(world.log.end(0))
    for _ in range(2):
        again, _ = world.again()
        assert again.partition.settings.policy.hands_off


def test_a_partition_that_is_new_begins_with_what_people_had_set(world):
    world.tell(ALL_JOBS, policy_record(Policy(hands_off=True)))
    stream = lived(world)
    with write(world.engine) as connection:
        assert trim(connection, before=1, limit=10) == 1
    world.log = ForgetfulLog(world.clock, partitions=2)
    other = world.log.partition_of("gpt") ^ 1
    fresh, _ = world.again(other)
    assert fresh.partition.settings.policy.hands_off
    assert fresh.partition.settings.state() == stream.partition.settings.state()
    world.clock.advance(5.0)
    fresh.step()
    again, _ = world.again(other)
    assert again.partition.settings.policy.hands_off
    assert again.partition.offsets == fresh.partition.offsets


def test_a_job_that_moved_into_a_partition_which_had_others_before_is_restored_from_the_tables(world):
    count = next(count for count in range(2, 9) if ForgetfulLog(world.clock, partitions=count).partition_of("gpt"))
    before, after = (ForgetfulLog(world.clock, partitions=count) for _ in range(2))
    offsets = before.partition_of("gpt")
    world.log = before
    empty, _ = world.again(offsets)
    world.clock.advance(1.0)
    empty.step()
    empty.save(ALL_JOBS)
    world.log = ForgetfulLog(world.clock)
    lived(world)
    world.log = after
    again, started = world.again(offsets)
    assert started.jobs_without_snapshot == ("gpt",)
    assert not started.is_new_log
    row = select(models.Job.state, models.Job.step, models.Job.first_seen_unix_ns, models.Job.last_seen_unix_ns)
    known = world.rows(row)
    world.clock.advance(60.0)
    again.step()
    assert world.rows(row) == known, "nothing is said about a job that is not heard of"
    world.go_on(range(20, 23))
    world.clock.advance(1.0)
    again.step()
    ((state, step, first_seen_unix_ns, _),) = world.rows(row)
    assert (state, step, first_seen_unix_ns) == ("running", 22, known[0][2])


def test_partitions_that_the_log_had_once_keep_no_control_records(world):
    world.tell(ALL_JOBS, policy_record(Policy(hands_off=True)))
    with write(world.engine) as connection:
        old = {"partition": 7, "position": 5, "tick_number": 3, "epoch": 1, "control_needed": 0}
        connection.execute(insert(models.StreamPosition).values(**old))
    stream = lived(world)
    for name in (ALL_JOBS, "gpt", ALL_JOBS, "gpt"):
        stream.save(name)
    world.clock.advance(120.0)
    world.go_on(range(20, 22))
    stream.step()
    assert stream.save_due()
    assert world.column(select(models.ControlRecord.position)) == []


def test_a_record_that_came_into_the_wrong_partition_is_refused(world):
    world.log = ForgetfulLog(world.clock, partitions=2)
    wrong = world.log.partition_of("gpt") ^ 1
    stream, _ = world.again(wrong)
    world.log.misled = wrong
    world.train(1)
    stream.step()
    assert world.column(select(models.DeadLetter.reason)) == ["name"]
    assert world.column(select(models.Job.name)) == []
