"""`rankwatch trace` and `rankwatch commands trace` at a terminal."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rankwatch_service.orders import traces
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt, Job
from tests.support.store.rows import add, attempt_row, job_row, report
from tests.support.values.traces import trace_answer


@pytest.fixture(scope="module", autouse=True)
def filled(api):
    report(api.engine, "j")
    add(api.engine, Job, job_row("j", world_size=1))
    ranks = [{"rank": 0, "host": "h", "tp": 0, "pp": 0, "cp": 0, "ep": 0}]
    add(api.engine, Attempt, attempt_row("j", ranks=ranks, can=["trace"], world_size=1))


@pytest.fixture
def answering(api) -> Iterator[Any]:
    """A rank that answers the next trace; with an error, if it is given one."""
    over = threading.Event()
    threads = []

    def answering(error: str = "") -> None:
        def answer() -> None:
            while not over.wait(0.05):
                for command in api.get("/api/v1/commands", params={"job": "j", "state": "sent"}).json()["items"]:
                    with write(api.engine) as connection:
                        traces.store(connection, [trace_answer(command["id"], 0, error)])

        threads.append(threading.Thread(target=answer))
        threads[0].start()

    yield answering
    over.set()
    for thread in threads:
        thread.join()


def test_a_trace_is_shown_as_tables_and_can_be_shown_again(rankwatch, api, answering):
    answering()
    status, out, err = rankwatch("trace", "j", "--steps", "2")
    assert (status, "trace j: applied" in err) == (0, True)
    for text in ("41 to 43", "500.000 ms", "12.5%", "matmul", "60.0%", "mesh_dp", "12.58 MB", "sm80_gemm"):
        assert text in out
    newest = api.get("/api/v1/commands").json()["items"][0]
    assert newest["params"] == {"ranks": [0], "steps": 2}
    status, again, _ = rankwatch("commands", "trace", newest["short_id"])
    assert (status, again) == (0, out)
    status, out, _ = rankwatch("commands", "trace", newest["short_id"], "--json")
    assert (status, json.loads(out)["summary"]["spans"]) == (0, 1_000)


def test_a_trace_that_nobody_recorded_says_why_and_fails(rankwatch, answering):
    answering("a profiler of the script's own runs")
    status, out, err = rankwatch("trace", "j", "--ranks", "0")
    assert (status, out) == (1, "")
    assert "trace j: failed: rank 0: a profiler of the script's own runs" in err


def test_ranks_that_are_no_numbers_are_a_wrong_use(rankwatch):
    status, _, err = rankwatch("trace", "j", "--ranks", "0,x")
    assert (status, "--ranks is a list of numbers like 0,3, not '0,x'" in err) == (2, True)
