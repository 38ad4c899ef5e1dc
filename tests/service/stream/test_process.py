"""The loop over partitions, with streams and a source of the test's own; and how its process is tuned."""

import gc
import platform
import subprocess
import sys

import pytest
from sqlalchemy import select

from rankwatch_service.log.base import LogError, Offsets
from rankwatch_service.log.control_log import ControlLog, ControlTail
from rankwatch_service.store import models
from rankwatch_service.store.engine import read
from rankwatch_service.stream import process
from rankwatch_service.stream.loop import Started
from rankwatch_service.stream.process import Stop, StreamProcess, new_counts
from rankwatch_service.stream.saved import FencedError
from rankwatch_service.stream.serve import YOUNG_MAX
from tests.support.clock import FakeClock
from tests.support.store.database import new_database


class OneStream:
    """Counts what is asked of it and fails when it is told to."""

    def __init__(self, partition: int, fails: dict[int, Exception]) -> None:
        self.number = partition
        self.epoch = 1
        self.steps = 0
        self.closed = False
        self.now_ns = 5
        self._fails = fails

    @property
    def partition(self):
        self.offsets = Offsets(self.steps, 0, 0)
        return self

    def start(self) -> Started:
        return Started()

    def step(self) -> int:
        if self.number in self._fails:
            raise self._fails[self.number]
        self.steps += 1
        return 0

    def save_due(self) -> int:
        return 0

    def take_lost(self) -> int:
        return 1 if self.steps == 1 else 0

    def close(self) -> None:
        self.closed = True


class Script:
    """A source whose assignment changes from turn to turn; asks to stop after the last."""

    def __init__(self, clock: FakeClock, turns: list) -> None:
        self.stop = Stop()
        self.fenced_in: list[int] = []
        self.only_reader = False
        self._clock = clock
        self._turns = iter(turns)
        self.assigned: frozenset[int] = frozenset()

    def wait(self, idle, changes) -> bool:
        self._clock.advance(1.0)
        turn = next(self._turns, None)
        if turn is None:
            self.stop.ask()
        elif isinstance(turn, Exception):
            raise turn
        elif callable(turn):
            turn()
        else:
            self.assigned = frozenset(turn)
        return False

    def last_known_end(self, partition) -> int:
        return 100

    def fenced(self, partition) -> None:
        self.fenced_in.append(partition)
        self.assigned -= {partition}
        if self.only_reader:
            raise FencedError("another reads it")


class World:
    def __init__(self, folder) -> None:
        self.engine = new_database(folder)
        self.clock = FakeClock()
        self.made: list[OneStream] = []
        self.fails: dict[int, Exception] = {}

    def run(self, *turns, only_reader=False) -> Script:
        self.source = Script(self.clock, list(turns))
        self.source.only_reader = only_reader
        self.counts = new_counts()
        self.counts["rebuilds"] = 3  # by the source
        controls = ControlTail(ControlLog(self.engine, self.clock))
        process = StreamProcess(self.engine, self.source, controls, self.clock, self.make, self.counts)
        process.run(self.source.stop)
        return self.source

    def make(self, partition: int) -> OneStream:
        self.made.append(OneStream(partition, self.fails))
        return self.made[-1]

    def rows(self, model) -> list:
        with read(self.engine) as connection:
            return list(connection.execute(select(model.__table__)).mappings())


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.engine.dispose()


def test_each_partition_that_is_ours_has_a_stream_as_long_as_it_is_ours(world):
    world.run([0, 1], [0, 1], [1, 2], [1, 2])
    assert [stream.number for stream in world.made] == [0, 1, 2]
    assert {stream.number: stream.steps for stream in world.made} == {0: 2, 1: 5, 2: 3}
    assert {stream.number: stream.closed for stream in world.made} == {0: False, 1: True, 2: True}


def test_a_stream_that_fails_is_begun_anew_after_ever_longer_pauses_and_the_others_go_on(world):
    world.fails[0] = RuntimeError("the database is gone")
    world.run([0, 1], *[[0, 1]] * 20)
    begun = sum(stream.number == 0 for stream in world.made)
    assert begun == 5  # after 1, 2, 4 and 8 s
    assert world.counts["restarts"] == 5
    assert [stream.steps for stream in world.made if stream.number == 1] == [22]


def test_a_stream_that_works_again_forgets_its_failures(world):
    world.fails[0] = RuntimeError("once")
    world.run([0], [0], world.fails.clear, [0], [0], lambda: world.fails.update({0: RuntimeError("again")}), [0], [0])
    assert len(world.made) == 5  # at 1, 2, 4, 7 and 9 s


def test_a_partition_that_another_took_is_claimed_again_only_when_it_is_assigned_again(world):
    world.fails[0] = FencedError("taken")
    nothing = lambda: None  # noqa: E731 - the assignment stays as the source left it
    world.run([0], *[nothing] * 10)
    assert len(world.made) == 1
    assert world.counts["fenced"] == 1
    assert world.source.fenced_in == [0]
    world.made.clear()
    world.run([0], nothing, nothing, [0])
    assert len(world.made) == 2


def test_the_only_reader_of_a_log_ends_when_another_takes_it(world):
    world.fails[0] = FencedError("taken")
    with pytest.raises(FencedError):
        world.run([0], [0], only_reader=True)


def test_a_log_that_does_not_answer_is_waited_for(world):
    world.run([0], LogError("no broker"), LogError("no broker"), [0])
    assert world.counts["away"] == 2
    assert [stream.steps for stream in world.made] == [5]


def test_it_tells_how_far_it_is(world):
    world.run([3], *[[3]] * int(process.REPORT_S))
    [partition] = world.rows(models.StreamReport)
    assert (partition["partition"], partition["epoch"], partition["end"]) == (3, 1, 100)
    assert 0 < partition["position"] <= process.REPORT_S + 1
    assert partition["lost_records"] == 1
    [row] = world.rows(models.StreamProcess)
    assert row["owner"] == partition["owner"]
    assert row["counters"] == {"restarts": 0, "fenced": 0, "away": 0, "rebuilds": 3, "lost_records": 1}


BATCH_AFTER_BATCH = """
import gc, resource
import numpy as np
from rankwatch_service.stream.serve import tune
def batch():
    return [np.ones(40_000) for _ in range(64)]
def new_pages():
    for _ in range(3):
        batch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        batch()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
usual = new_pages()
print(usual, tune(), new_pages(), gc.isenabled(), *gc.get_threshold())
"""


def test_young_objects_are_collected_seldom_and_with_glibc_the_pages_of_one_batch_serve_the_next():
    command = [sys.executable, "-c", BATCH_AFTER_BATCH]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    usual_pages, reported, pages, enabled, *thresholds = done.stdout.split()
    assert (reported == "True") == (platform.libc_ver()[0] == "glibc")
    assert reported == "False" or int(pages) < int(usual_pages) / 10
    assert (enabled, *map(int, thresholds)) == ("True", YOUNG_MAX, *gc.get_threshold()[1:])
