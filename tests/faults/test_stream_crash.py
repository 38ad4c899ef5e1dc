"""Crashes of the stream at any moment: afterwards everything is as it would have been without them.

The reference is the run of the same recorded log without faults. Ticks are derived from the records, so they are the
same in every run too.
"""

import random
import shutil

import pytest
from sqlalchemy import event

from rankwatch_service.store.engine import open_engine
from rankwatch_service.stream import loop
from tests.support.faulty_sqlite import CrashError, Faults, When
from tests.support.recording import end_of, record_log, recording, results, stream_over

ENTRIES = recording()
CRASH_TRIALS = 100


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record_log(tmp_path_factory.mktemp("recorded"), ENTRIES)


@pytest.fixture(scope="module")
def reference(recorded, tmp_path_factory):
    engine, stream = open_copy(recorded, tmp_path_factory.mktemp("reference"))
    stream.start()
    run_to_the_end(stream)
    found = results(engine)
    engine.dispose()
    return found


def open_copy(recorded, folder, faults=None):
    shutil.copy(recorded, folder / "rankwatch.db")
    return open_again(folder, faults)


def open_again(folder, faults=None):
    engine = open_engine(f"sqlite:///{folder}/rankwatch.db")
    # Processes crash here, the machine does not.
    event.listen(engine, "connect", lambda connection, _record: connection.execute("PRAGMA synchronous=OFF"))
    if faults is not None:
        faults.install(engine)
    return engine, stream_over(engine, end_of(ENTRIES))


def run_to_the_end(stream, records_max=loop.RECORDS_MAX) -> None:
    while stream.step(records_max):
        pass


def assert_equal(found, reference) -> None:
    for table, rows in reference.items():
        assert found[table] == rows, table


def test_the_recording_holds_what_it_should(reference):
    kinds = {(row["job"], row["kind"]) for row in reference["incident"]}
    assert kinds == {("nan", "nonfinite"), ("slow", "straggler"), ("hang", "hang"), ("hang", "rank_lost")}
    assert {row["action"] for row in reference["command"]} == {"rollback", "relaunch", "stacks"}
    assert {row["state"] for row in reference["outbox"]} == {"waiting", "silenced"}
    assert {row["what"] for row in reference["incident_transition"]} >= {"acknowledged", "commented", "resolved"}
    assert len(reference["dead_letter"]) == 1
    assert all(row["state"] == "resolved" for row in reference["incident"])


@pytest.mark.parametrize("records_max", [1, 7, 256])
def test_how_records_are_batched_decides_nothing(recorded, reference, tmp_path, records_max):
    engine, stream = open_copy(recorded, tmp_path)
    stream.start()
    run_to_the_end(stream, records_max)
    found = results(engine)
    engine.dispose()
    # Rows that show the newest state are written once for each batch: only what they end with is the same.
    assert_equal(found, reference)


@pytest.mark.timeout(400)
def test_a_hundred_random_crashes_change_nothing(recorded, reference, tmp_path, monkeypatch):
    # Short pauses between snapshots, so that starts find them at all ages, also half written ones.
    monkeypatch.setattr(loop, "SNAPSHOT_S", 3.0)
    monkeypatch.setattr("rankwatch_service.stream.snapshots.CHUNK_BYTES", 4_096)
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    faults = Faults()
    engine, stream = open_copy(recorded, tmp_path, faults)
    crashes = 0
    alive = False
    while True:
        if crashes < CRASH_TRIALS:
            faults.arm(chance.randint(1, 400), chance.choice(list(When)))
        else:
            faults.disarm()
        try:
            if not alive:
                engine.dispose()
                engine, stream = open_again(tmp_path, faults)
                stream.start()
                alive = True
            while stream.step(chance.randint(1, 6)):
                stream.save_due()
            if crashes >= CRASH_TRIALS:
                break
            # The end came before the fault did: only what is left to crash is the beginning.
            stream.close()
            alive = False
        except CrashError:
            crashes += 1
            alive = False
    found = results(engine)
    engine.dispose()
    assert crashes == CRASH_TRIALS
    try:
        assert_equal(found, reference)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}: {error}") from error


AHEAD = 80
"""Records after the one that opens the incident: a resolution, an acknowledgement and a comment are among them."""


@pytest.fixture(scope="module")
def before_the_nan(recorded, reference, tmp_path_factory):
    """A database in which the next records open an incident, order a rollback and tell a receiver; where to stop."""
    opened_ns = next(row["detected_unix_ns"] for row in reference["incident"] if row["kind"] == "nonfinite")
    folder = tmp_path_factory.mktemp("before")
    engine, stream = open_copy(recorded, folder)
    stream.start()
    while stream.partition.now_ns < opened_ns - 10**9:
        stream.step(8)
    for name in ("*", *stream.partition.jobs):
        stream.save(name)
    stop = stream.partition.place.position + AHEAD
    engine.dispose()
    return folder / "rankwatch.db", stop


def run_to(stream, stop: int) -> None:
    while (left := stop - stream.partition.place.position) > 0:
        stream.step(min(left, 8))


def start_and_run_to(stream, stop: int) -> None:
    stream.start()
    run_to(stream, stop)


@pytest.mark.timeout(400)
def test_each_call_of_the_commits_around_an_incident_may_fail_once(before_the_nan, tmp_path):
    database, stop = before_the_nan
    (tmp_path / "whole").mkdir()
    faults = Faults()
    engine, stream = open_copy(database, tmp_path / "whole", faults)
    stream.start()
    begun, opened = faults.calls, 0
    while stream.partition.place.position < stop:
        before = faults.calls
        stream.step(min(8, stop - stream.partition.place.position))
        if not opened and stream.partition.jobs["nan"].correlator.open:
            begun, opened = before, faults.calls
    whole = results(engine)
    engine.dispose()
    assert {row["kind"] for row in whole["incident"]} >= {"nonfinite"}
    assert opened - begun > 15
    for call in range(begun + 1, opened + 1):
        for when in When:
            folder = tmp_path / f"{call}-{when.value}"
            folder.mkdir()
            faults = Faults()
            engine, stream = open_copy(database, folder, faults)
            faults.arm(call, when)
            with pytest.raises(CrashError):
                start_and_run_to(stream, stop)
            engine.dispose()
            engine, stream = open_again(folder)
            start_and_run_to(stream, stop)
            found = results(engine)
            engine.dispose()
            assert_equal(found, whole)
            shutil.rmtree(folder)
