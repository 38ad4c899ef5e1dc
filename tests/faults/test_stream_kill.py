"""A real stream process is killed with SIGKILL while it works; what it leaves is what an undisturbed one leaves."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sqlalchemy import text

from rankwatch_service.store.engine import open_engine, read
from tests.support.recordings.recording import end_of, record_log, recording, results, stream_over, telemetry_records

ROOT = Path(__file__).parents[2]
ENTRIES = recording()
RECORDS = telemetry_records(ENTRIES)
KILLS = 8
DEADLINE_S = 90.0


def begin(database: Path) -> subprocess.Popen:
    end_ns = end_of(ENTRIES).unix_ns()
    command = [sys.executable, "-m", "tests.support.service.stream_process", f"sqlite:///{database}", str(end_ns), "5"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def position(engine) -> int:
    with read(engine) as connection:
        return connection.execute(text("SELECT max(position) FROM stream_position")).scalar() or 0


def wait_for(process, engine, target: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while position(engine) < target:
        assert process.poll() is None, "the stream ended by itself"
        assert time.monotonic() < deadline, f"stuck at {position(engine)} of {target}"
        time.sleep(0.002)


@pytest.mark.integration
@pytest.mark.ci
@pytest.mark.timeout(400)
def test_a_stream_killed_again_and_again_leaves_what_an_undisturbed_one_leaves(tmp_path):
    recorded = record_log(tmp_path, ENTRIES)
    (tmp_path / "killed").mkdir()
    (tmp_path / "whole").mkdir()
    killed = shutil.copy(recorded, tmp_path / "killed" / "rankwatch.db")
    whole = shutil.copy(recorded, tmp_path / "whole" / "rankwatch.db")

    engine = open_engine(f"sqlite:///{whole}")
    stream = stream_over(engine, end_of(ENTRIES))
    stream.start()
    while stream.step():
        pass
    reference = results(engine)
    engine.dispose()

    engine = open_engine(f"sqlite:///{killed}")
    for target in sorted(random.sample(range(RECORDS - 50), KILLS)):
        process = begin(killed)
        try:
            wait_for(process, engine, target)
        finally:
            process.kill()
            process.wait()
        with read(engine) as connection:
            assert connection.execute(text("PRAGMA integrity_check")).scalar() == "ok"
    process = begin(killed)
    try:
        wait_for(process, engine, RECORDS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    found = results(engine)
    engine.dispose()
    for name, rows in reference.items():
        assert found[name] == rows, name
