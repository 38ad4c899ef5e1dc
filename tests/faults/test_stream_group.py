"""Stream processes, alone over SQLite or as a consumer group, while they and the broker die, freeze and come back.

The reference is the run of the same recording by one process to which nothing happens; what is left must be equal row
by row.
"""

import contextlib
import fcntl
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import select, text

from rankwatch_service.settings import Settings
from rankwatch_service.store import models
from rankwatch_service.store.engine import open_engine, read
from tests.support.kafka.broker import kafka_broker, new_prefix, read_topic
from tests.support.recordings.recording import (
    end_of,
    record_controls,
    record_log,
    recording,
    results,
    telemetry_records,
)
from tests.support.service.process import is_stopped
from tests.support.service.stream_process import record_topic
from tests.support.store.database import new_database
from tests.support.trials.selection import long_trial

pytestmark = [pytest.mark.integration, pytest.mark.ci, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
ENTRIES = recording()
RECORDS = telemetry_records(ENTRIES)
PARTITIONS = 4
KILLS = 8
DEADLINE_S = 240.0
RECORDS_MAX = 12
"""In a batch of a member: few enough that members come and go while there is still work."""
REFERENCE_RECORDS_MAX = 256


@pytest.fixture(scope="module")
def broker():
    with kafka_broker("apache") as broker:
        yield broker


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """A database with what people did in the recording, and nothing that stream makes of it."""
    folder = tmp_path_factory.mktemp("empty")
    engine = new_database(folder)
    record_controls(engine, ENTRIES)
    engine.dispose()
    return folder / "rankwatch.db"


class Group:
    """Stream processes, by name, over one database and the topic of a broker; without one, over the log in it."""

    def __init__(self, broker, database: Path, folder: Path, records_max: int = RECORDS_MAX) -> None:
        self._arguments = [str(end_of(ENTRIES).unix_ns()), str(records_max)]
        if broker is not None:
            settings = Settings(kafka=broker.bootstrap, kafka_prefix=new_prefix(), kafka_partitions=PARTITIONS)
            record_topic(settings, ENTRIES)
            self.settings = settings
            self._arguments += [broker.bootstrap, settings.kafka_prefix]
        self.url = f"sqlite:///{shutil.copy(database, folder / 'group.db')}"
        self.engine = open_engine(self.url)
        self.folder = folder
        self.members: dict[str, subprocess.Popen] = {}

    def start(self, name: str) -> None:
        command = [sys.executable, "-m", "tests.support.service.stream_process", self.url, *self._arguments]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.members[name] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def freeze(self, name: str) -> None:
        """Stop a process between its writes: stopped inside one, it would hold SQLite's lock against all others."""
        self.until(lambda: self._frozen_between_writes(name), f"{name} never rests between two writes")

    def _frozen_between_writes(self, name: str) -> bool:
        self.members[name].send_signal(signal.SIGSTOP)
        self.until(lambda: is_stopped(self.members[name].pid), f"{name} goes on")
        if all(_is_free(self.folder / f"group.db-{lock}") for lock in ("next", "turn")):
            return True
        self.thaw(name)
        return False

    def thaw(self, name: str) -> None:
        self.members[name].send_signal(signal.SIGCONT)

    def kill(self, name: str) -> None:
        process = self.members.pop(name)
        process.kill()
        process.wait()

    def leave(self, name: str) -> None:
        process = self.members.pop(name)
        process.terminate()
        assert process.wait(60) == 0, self.said()

    def rows(self, model) -> list:
        with read(self.engine) as connection:
            return list(connection.execute(select(model.__table__)).mappings())

    def processed(self) -> int:
        return sum(row["position"] for row in self.rows(models.StreamPosition))

    def epochs(self) -> dict[int, int]:
        return {row["partition"]: row["epoch"] for row in self.rows(models.StreamPosition)}

    def until(self, condition, what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            dead = [name for name, process in self.members.items() if process.poll() is not None]
            assert not dead, f"{dead} ended by itself: {self.said()}"
            assert time.monotonic() < deadline, f"{what}; at {self.processed()} of {RECORDS}: {self.said()}"
            time.sleep(0.01)

    def until_processed(self, records: int) -> None:
        self.until(lambda: self.processed() >= records, f"stuck before {records}")

    def said(self, name: str = "*") -> str:
        files = sorted(self.folder.glob(f"{name}.log"))
        return "\n".join(f"{file.name}:\n{file.read_text()[-3_000:]}" for file in files)

    def close(self) -> None:
        for process in self.members.values():
            process.kill()
            process.wait()
        self.engine.dispose()


def _is_free(path: Path) -> bool:
    with path.open("ab") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def undisturbed(broker, database, folder):
    group = Group(broker, database, folder, REFERENCE_RECORDS_MAX)
    try:
        group.start("only")
        group.until_processed(RECORDS)
        group.leave("only")
        return results(group.engine)
    finally:
        group.close()


@pytest.fixture(scope="module")
def reference(broker, empty, tmp_path_factory):
    return undisturbed(broker, empty, tmp_path_factory.mktemp("reference"))


@pytest.fixture
def group(broker, empty, reference, tmp_path):
    group = Group(broker, empty, tmp_path)
    yield group
    group.close()


def assert_equal(group: Group, reference) -> None:
    found = results(group.engine)
    for table, rows in reference.items():
        assert found[table] == rows, table


def test_one_over_sqlite_that_is_killed_again_and_again(tmp_path):
    recorded = record_log(tmp_path, ENTRIES)
    (tmp_path / "whole").mkdir()
    reference = undisturbed(None, recorded, tmp_path / "whole")
    group = Group(None, recorded, tmp_path, 5)
    try:
        for target in (*sorted(random.sample(range(RECORDS - 50), KILLS)), RECORDS):
            group.start("only")
            group.until_processed(target)
            group.leave("only") if target == RECORDS else group.kill("only")
            with read(group.engine) as connection:
                assert connection.execute(text("PRAGMA integrity_check")).scalar() == "ok"
        assert_equal(group, reference)
    finally:
        group.close()


def test_members_join_leave_and_are_killed_in_the_middle_of_it(group, reference):
    group.start("a")
    group.until_processed(100)
    group.start("b")
    group.until_processed(300)
    group.kill("a")
    group.start("c")
    group.until_processed(600)
    group.leave("b")
    group.until_processed(RECORDS)
    group.leave("c")
    assert_equal(group, reference)
    topic = group.settings.kafka_settings().dead_letters_topic
    letters = read_topic(group.settings.kafka, topic, enough=bool)
    assert {(letter.value, letter.headers["reason"]) for letter in letters} == {(b"rubbish", "malformed")}


@long_trial
def test_a_member_that_was_frozen_commits_nothing_of_what_it_lost_and_takes_part_again(group, reference):
    group.start("frozen")
    group.until_processed(150)
    group.freeze("frozen")
    before = group.processed()
    epochs = group.epochs()
    group.start("other")
    group.until_processed(before + 200)
    assert all(group.epochs()[partition] > epoch for partition, epoch in epochs.items())
    group.thaw("frozen")
    group.until(lambda: "partition_unassigned" in group.said("frozen"), "what was lost was not let go")
    group.kill("other")
    group.until_processed(RECORDS)
    group.leave("frozen")
    assert_equal(group, reference)


@long_trial
def test_a_broker_that_is_started_again_is_gone_on_with(group, reference, broker):
    group.start("a")
    group.start("b")
    group.until_processed(200)
    broker.kill()
    broker.start()
    group.until_processed(RECORDS)
    group.leave("a")
    group.leave("b")
    assert_equal(group, reference)
