"""When steps were made, from when their chunks were written."""

import numpy as np
import pytest
from sqlalchemy import insert

from rankwatch_detectors.base import Frame, StepKind
from rankwatch_service.series.query import STEP_MAX
from rankwatch_service.series.read import ROWS_MAX, Range, StepTimes
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt, SeriesRollup
from tests.support.clock import FakeClock

S = 10**9


def attempt(engine, name: str, began_s: float, first: int, last: int, number: int = 1) -> None:
    times = {"started_unix_ns": int(began_s * S), "ended_unix_ns": None}
    with write(engine) as connection:
        connection.execute(
            insert(Attempt).values(
                job="gpt", attempt=name, world_size=1, first_step=first, last_step=last, topology={}, number=number,
                **times,
            )
        )  # fmt: skip


def train(engine, clock: FakeClock, name: str, steps, step_s: float) -> None:
    """Each step takes `step_s`; what is due is written after each."""
    writer = SeriesWriter(engine, clock)
    for step in steps:
        clock.advance(step_s)
        writer.add(
            "gpt", Frame(name, "steps", step, StepKind.TRAIN, 0.0, {"loss": np.ones(1)}, {"loss": np.ones(1, bool)})
        )
        writer.flush_due()
    writer.flush("gpt")


def seconds(engine, name: str, steps, first: int = 0) -> list[float]:
    found = StepTimes(engine, Range("gpt", "loss", first, STEP_MAX)).of(name, np.array(steps))
    return [round(one / S, 3) for one in found.tolist()]


def test_steps_are_spread_between_the_moments_at_which_chunks_were_written(engine):
    clock = FakeClock()
    began = clock.unix_ns() / S
    attempt(engine, "l.0", began, 0, 299)
    train(engine, clock, "l.0", range(128), 2.0)
    clock.advance(600.0)  # it stood still
    train(engine, clock, "l.0", range(128, 300), 2.0)
    found = seconds(engine, "l.0", [0, 63, 127, 191, 299])
    assert found == sorted(found)
    for got, made in zip(found, (began + 2, began + 128, began + 256, began + 984, began + 1_200), strict=True):
        assert got == pytest.approx(made, abs=4.0)


def test_an_attempt_that_repeats_steps_has_times_of_its_own(engine):
    clock = FakeClock()
    began = clock.unix_ns() / S
    attempt(engine, "l.0", began, 0, 127)
    train(engine, clock, "l.0", range(128), 1.0)
    attempt(engine, "l.1", began + 128, 64, 127, number=2)
    train(engine, clock, "l.1", range(64, 128), 1.0)
    assert seconds(engine, "l.0", [127]) == [pytest.approx(began + 128, abs=2)]
    assert seconds(engine, "l.1", [64, 127]) == [pytest.approx(began + 128, abs=2), pytest.approx(began + 192, abs=2)]
    assert seconds(engine, "unknown", [1]) == []


def test_a_long_range_reads_rows_of_rollups(engine):
    last = 2 * 64 * ROWS_MAX - 1
    attempt(engine, "l.0", 1_000, 0, last)
    common = {"job": "gpt", "metric": "loss", "level": 1, "attempt": "l.0", "ranks": 1, "size_bytes": 4}
    parts = dict.fromkeys(("low", "high", "mark", "lines"), b"x")
    with write(engine) as connection:
        rows = [{**common, **parts, "chunk": n, "at_unix_ns": (2_000 + n) * S} for n in range(2 * ROWS_MAX // 8)]
        connection.execute(insert(SeriesRollup), rows)
    assert seconds(engine, "l.0", [0, 511, last]) == [1_000, 2_000, 2_000 + 2 * ROWS_MAX // 8 - 1]
