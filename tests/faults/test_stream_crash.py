"""Crashes of the stream at any moment: afterwards everything is as it would have been without them.

The reference is the run of the same recorded log without faults. Ticks are derived from the records, so they are the
same in every run too. Both forms: everything in SQLite, and Kafka with PostgreSQL.
"""

import gc
import random

import pytest

from rankwatch_service.stream import kafka_source, loop
from tests.support.kafka.broker import missing, shared
from tests.support.recordings.forms import KafkaForm, SqliteForm
from tests.support.recordings.recording import recording, results
from tests.support.service.stream_process import recorded_unix_ns
from tests.support.store.faulty_calls import CrashError, Faults, When
from tests.support.trials.selection import ALL, trials

# A client of Kafka that is closed while it connects leaves a socket to whoever collects it.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket.socket:ResourceWarning")

ENTRIES = recording()
CRASH_TRIALS = {"sqlite": trials(10, 100), "kafka": trials(10, 20)}


@pytest.fixture(
    scope="module", params=["sqlite", pytest.param("kafka", marks=(pytest.mark.integration, pytest.mark.ci))]
)
def form(request, tmp_path_factory):
    if request.param == "sqlite":
        yield SqliteForm(tmp_path_factory.mktemp("recorded"), ENTRIES)
        return
    postgres = request.getfixturevalue("postgres")
    broker = shared(request, "noida" if missing("apache") else "apache")
    with pytest.MonkeyPatch.context() as patch, postgres.migrated() as url:
        patch.setattr(kafka_source, "appended_unix_ns", recorded_unix_ns)
        yield KafkaForm(postgres, broker, url, ENTRIES)


@pytest.fixture(autouse=True)
def no_socket_outlives_its_test():
    yield
    gc.collect()


@pytest.fixture(scope="module")
def reference(form):
    with form.copied(form.url) as url, form.opened(url) as (engine, stream):
        stream.start()
        run_to_the_end(stream)
        yield results(engine)


def run_to_the_end(stream, records_max=loop.RECORDS_MAX) -> None:
    while stream.step(records_max):
        pass


def assert_equal(found, reference) -> None:
    for table, rows in reference.items():
        assert found[table] == rows, table


def test_the_recording_holds_what_it_should(reference):
    kinds = {(row["job"], row["kind"]) for row in reference["incident"]}
    found = {("nan", "nonfinite"), ("slow", "straggler"), ("hang", "hang"), ("hang", "rank_lost")}
    assert kinds == found | {(job, kind) for job in ("slow", "hang") for kind in ("metric", "alert")}
    assert {row["action"] for row in reference["command"]} == {"rollback", "relaunch", "stacks"}
    assert {row["type"] for row in reference["announcement"]} >= {"incident.opened", "incident.resolved"}
    assert {row["what"] for row in reference["incident_transition"]} >= {"acknowledged", "commented", "resolved"}
    assert {row["value"] for row in reference["dead_letter"]} == {b"rubbish"}
    by_settings = [row for row in reference["incident"] if row["kind"] not in ("metric", "alert")]
    versions = {row["job"]: row["evidence"].get("tuning_version") for row in by_settings}
    assert versions == {"nan": 2, "slow": 1, "hang": 2}
    assert all(row["state"] == "resolved" for row in reference["incident"])


@pytest.mark.parametrize("records_max", [1, 7, 256])
def test_how_records_are_batched_decides_nothing(form, reference, records_max):
    with form.copied(form.url) as url, form.opened(url) as (engine, stream):
        stream.start()
        run_to_the_end(stream, records_max)
        # Rows that show the newest state are written once for each batch: only what they end with is the same.
        assert_equal(results(engine), reference)


@pytest.mark.timeout(400)
def test_random_crashes_change_nothing(form, reference, monkeypatch):
    # Short pauses between snapshots, so that starts find them at all ages, also half written ones.
    monkeypatch.setattr(loop, "SNAPSHOT_S", 3.0)
    monkeypatch.setattr("rankwatch_service.stream.saved.CHUNK_BYTES", 4_096)
    wanted = CRASH_TRIALS["sqlite" if isinstance(form, SqliteForm) else "kafka"]
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    crashes, over = 0, False
    with form.copied(form.url) as url:
        while not over:
            faults = Faults()
            with form.opened(url, faults) as (engine, stream):
                if crashes < wanted:
                    faults.arm(chance.randint(1, 400), chance.choice(list(When)))
                try:
                    stream.start()
                    while stream.step(chance.randint(1, 6)):
                        stream.save_due()
                    if crashes >= wanted:
                        found, over = results(engine), True
                    else:
                        # The end came before the fault did: only what is left to crash is the beginning.
                        stream.close()
                except CrashError:
                    crashes += 1
    assert crashes == wanted
    assert_equal(found, reference)


AHEAD = 80
"""Records after the one that opens the incident: a resolution, an acknowledgement and a comment are among them."""


@pytest.fixture(scope="module")
def before_the_nan(form, reference):
    """A database in which the next records open an incident, order a rollback and notify a receiver; where to stop."""
    opened_ns = next(row["detected_unix_ns"] for row in reference["incident"] if row["kind"] == "nonfinite")
    with form.copied(form.url) as url:
        with form.opened(url) as (_engine, stream):
            stream.start()
            while stream.partition.now_ns < opened_ns - 10**9:
                stream.step(8)
            for name in ("*", *stream.partition.jobs):
                stream.save(name)
            stop = stream.partition.offsets.position + AHEAD
        yield url, stop


def run_to(stream, stop: int) -> None:
    while (left := stop - stream.partition.offsets.position) > 0:
        stream.step(min(left, 8))


def start_and_run_to(stream, stop: int) -> None:
    stream.start()
    run_to(stream, stop)


@pytest.mark.timeout(400)
def test_each_call_of_the_commits_around_an_incident_may_fail_once(form, before_the_nan):
    source, stop = before_the_nan
    faults = Faults()
    with form.copied(source) as url, form.opened(url, faults) as (engine, stream):
        stream.start()
        begun, opened = faults.calls, 0
        while stream.partition.offsets.position < stop:
            before = faults.calls
            stream.step(min(8, stop - stream.partition.offsets.position))
            if not opened and stream.partition.jobs["nan"].correlator.open:
                begun, opened = before, faults.calls
        whole = results(engine)
    assert {row["kind"] for row in whole["incident"]} >= {"nonfinite"}
    assert opened - begun > 10
    for call in range(begun + 1, opened + 1):
        # `make test` lets each call fail in one of the two ways, `make faults` in both.
        for when in When if ALL else (random.choice(list(When)),):
            with form.copied(source) as url:
                faults = Faults()
                with form.opened(url, faults) as (_engine, stream):
                    faults.arm(call, when)
                    with pytest.raises(CrashError):
                        start_and_run_to(stream, stop)
                with form.opened(url) as (engine, stream):
                    start_and_run_to(stream, stop)
                    assert_equal(results(engine), whole)
