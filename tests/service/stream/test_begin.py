"""How a stream starts where the log is not as it was left: trimmed, replaced, or with other partitions."""

import numpy as np
import pytest
from sqlalchemy import insert, select, update

from rankwatch import wire
from rankwatch.kafka.settings import partition_of
from rankwatch_service.job import admission
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
from tests.support.trials.selection import in_ci
from tests.support.values.batches import progress, table


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
    world.append(ALL_JOBS, policy_record(Policy(hands_off=True)))
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
    world.append(ALL_JOBS, policy_record(Policy(hands_off=True)))
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
    world.append(ALL_JOBS, policy_record(Policy(hands_off=True)))
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


METRICS = {f"m{number}": 1.0 for number in range(20)}


def rows(step: int, reported: list[int], metrics: dict[str, float] = METRICS) -> wire.Table:
    return table([step] * len(reported), reported, **{name: [value] * len(reported) for name, value in metrics.items()})


def infos(reported: range, world_size: int) -> tuple[wire.RankInfo, ...]:
    return tuple(wire.RankInfo(rank, world_size, host=f"node-{rank // 8}", dp=rank) for rank in reported)


def forge(service: Service, job: str) -> None:
    """530 bytes that declare 131,072 ranks."""
    service.send(job, attempt=f"{job}.0", ranks=infos(range(1), 131_072), steps=rows(1, [0]))


def limits(service: Service) -> list[str]:
    found = select(models.Incident.job).where(models.Incident.kind == "limit_reached")
    return service.column(found.order_by(models.Incident.job))


def test_what_a_batch_declares_and_does_not_bring_takes_no_memory_and_opens_an_incident(service, stream):
    for number in range(20):
        forge(service, f"forged-{number:02}")
    service.train(1)
    service.second(stream)
    assert limits(service) == [f"forged-{number:02}" for number in range(20)]
    assert service.column(select(models.DeadLetter.reason)) == ["limit"] * 20
    held = [job.allowed.cells for name, job in stream.partition.jobs.items() if name != "gpt"]
    assert held == [admission.RANK_CELLS] * 20
    service.second(stream, 3.0)
    assert service.column(select(models.Attempt.job)) == ["gpt"], "no other attempt has begun"


def test_a_job_of_16384_ranks_whose_hosts_introduce_themselves_within_seconds_starts_as_before(service, stream):
    for half in (range(8_192), range(8_192, 16_384)):
        for low in range(half.start, half.stop, 2_048):
            reported = range(low, low + 2_048)
            service.send(
                "wide", ranks=infos(reported, 16_384), progress=tuple(progress(rank, 0) for rank in reported[:8])
            )
        service.second(stream)
    service.second(stream)
    assert service.column(select(models.Attempt.attempt)) == ["l.0"]
    assert service.column(select(models.Job.world_size)) == [16_384]
    assert service.column(select(models.DeadLetter.reason)) == []


def test_beside_a_flood_a_large_job_starts_once_a_64th_of_its_ranks_introduced_itself(service, monkeypatch):
    monkeypatch.setattr(admission, "SILENT_CELLS_MAX", 0)
    stream = service.started()
    for low in range(0, 32, 8):
        service.send("wide", ranks=infos(range(low, low + 8), 2_048), steps=rows(1, list(range(low, low + 8))))
    service.second(stream)
    service.second(stream, 2.0)
    assert service.column(select(models.DeadLetter.reason)) == ["limit"] * 3
    assert limits(service) == ["wide"]
    (attempt,) = service.column(select(models.Attempt.topology))
    assert len(attempt["ranks"]) == 32, "who the ranks are is known from refused batches too"


def test_an_attempt_that_runs_goes_on_without_the_metrics_that_it_may_not_have(service, stream, monkeypatch):
    service.send("gpt", ranks=infos(range(4), 4), steps=rows(1, [0, 1, 2, 3], {"loss": 2.0}))
    service.second(stream)
    monkeypatch.setattr(admission, "CELLS_MAX", stream.partition.jobs["gpt"].allowed.cells)
    service.send("gpt", steps=rows(2, [0, 1, 2, 3], {"loss": 2.0, "more": 1.0}))
    service.second(stream)
    assert limits(service) == ["gpt"]
    assert service.column(select(models.DeadLetter.reason)) == []
    (job,) = service.column(select(models.Job.dropped))
    assert job == {"names": 4}
    assert service.column(select(models.Job.step)) == [2]


def test_the_next_launch_of_a_job_may_have_what_the_last_one_had(service, stream, monkeypatch):
    service.send("wide", attempt="a.0", ranks=infos(range(2_048), 2_048), steps=rows(1, list(range(2_048))))
    service.second(stream)
    monkeypatch.setattr(admission, "SILENT_CELLS_MAX", 0)
    service.send("wide", attempt="b.0", ranks=infos(range(8), 2_048))
    service.second(stream)
    service.second(stream, 2.0)
    service.second(stream, 6.0)
    assert service.column(select(models.Attempt.attempt).order_by(models.Attempt.number)) == ["a.0", "b.0"]


@pytest.mark.parametrize("seed", [0, *in_ci(range(1, 4))])
def test_a_replay_from_snapshots_of_different_times_allows_the_same(service, monkeypatch, seed):
    """Jobs grow, are relaunched and are refused in turn; some have snapshots, which are of different places."""
    monkeypatch.setattr(admission, "CELLS_MAX", 2_000)
    monkeypatch.setattr(admission, "RESERVED_CELLS", 400)
    monkeypatch.setattr(admission, "SMALL_CELLS", 100)
    monkeypatch.setattr(admission, "SILENT_CELLS_MAX", 500)
    random = np.random.default_rng(seed)
    stream = service.started()
    for step in range(1, 60):
        job = f"job-{random.integers(6)}"
        size = int(random.choice([1, 8, 70, 200]))
        launch = f"{job}-{size}-{step // 20}"
        names = {f"m{number}": 1.0 for number in range(int(random.integers(1, 6)))}
        reported = range(min(size, int(random.choice([1, 8]))))
        service.send(job, attempt=f"{launch}.0", ranks=infos(reported, size), steps=rows(step, list(reported), names))
        if random.random() < 0.5:
            service.second(stream)
        if random.random() < 0.1 and stream.partition.jobs:
            stream.save(str(random.choice(sorted(stream.partition.jobs))))
    service.second(stream)
    assert "limit" in service.column(select(models.DeadLetter.reason))
    incidents = service.column(select(models.Incident.id))
    again = service.started()
    jobs = stream.partition.jobs
    assert again.partition.jobs.keys() == jobs.keys()
    assert {name: job.allowed for name, job in again.partition.jobs.items()} == {
        name: job.allowed for name, job in jobs.items()
    }
    for name, job in jobs.items():
        assert pack(again.partition.snapshot(name)) == pack(job.state()), name
    assert service.column(select(models.Incident.id)) == incidents
