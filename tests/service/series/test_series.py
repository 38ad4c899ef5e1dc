import math

import numpy as np
import pytest
from sqlalchemy import insert, select

from rankwatch_detectors.base import Frame, StepKind
from rankwatch_service.series.chunks import CHUNK_STEPS
from rankwatch_service.series.query import STEP_MAX, Reduce, heat_map, metrics, series
from rankwatch_service.series.read import ROWS_MAX, Range, StepTimes
from rankwatch_service.series.rollups import ValueMark
from rankwatch_service.series.writer import OPEN_CHUNKS, WAITING_FRAMES, SeriesWriter
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Attempt, SeriesChunk, SeriesRollup
from tests.support.clock import FakeClock


def frame(step: int, values: list[float | None], attempt: str = "l.0", name: str = "loss") -> Frame:
    present = np.array([value is not None for value in values])
    cells = np.array([0.0 if value is None else value for value in values])
    return Frame(attempt, "steps", step, StepKind.TRAIN, 0.0, {name: cells}, {name: present})


def write_all(engine, frames: list[Frame]) -> None:
    writer = SeriesWriter(engine, FakeClock())
    for each in frames:
        writer.add("gpt", each)
    writer.flush("gpt")


def rows(engine) -> list[tuple]:
    with read(engine) as connection:
        query = select(SeriesChunk.attempt, SeriesChunk.metric, SeriesChunk.chunk, SeriesChunk.data)
        return [tuple(row) for row in connection.execute(query.order_by(SeriesChunk.attempt, SeriesChunk.chunk))]


def test_single_ranks_come_back_as_they_were_measured(engine):
    write_all(engine, [frame(5, [1.0, None]), frame(6, [math.nan, 4.0])])
    (segment,) = series(engine, "gpt", "loss", reduce=Reduce.NONE, ranks=[0, 1])
    assert segment.step.tolist() == [5, 6]
    first, second = segment.lines
    assert (first.name, second.name) == ("rank:0", "rank:1")
    assert first.mark.tolist() == [ValueMark.FINITE, ValueMark.NAN]
    assert second.mark.tolist() == [ValueMark.ABSENT, ValueMark.FINITE]
    assert first.high[0] == 1.0
    assert second.high[1] == 4.0


def test_a_spike_and_a_nan_survive_any_downsampling(engine):
    values = [1.0] * 3_000
    values[1_234], values[2_000], values[2_500] = 50.0, -7.0, math.nan
    write_all(engine, [frame(step, [value]) for step, value in enumerate(values)])
    (segment,) = series(engine, "gpt", "loss", points=100)
    (line,) = segment.lines
    assert len(segment.step) <= 100
    assert np.nanmax(line.high) == 50.0
    assert np.nanmin(line.low) == -7.0
    assert np.count_nonzero(line.mark == ValueMark.NAN) == 1


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        (Reduce.MEAN, {"mean": 3.0}),
        (Reduce.MEDIAN, {"median": 2.0}),
        (Reduce.MIN, {"min": 1.0}),
        (Reduce.MAX, {"max": 6.0}),
        (Reduce.FAN, {"p5": 1.0, "p50": 2.0, "p95": 6.0, "max": 6.0}),
    ],
)
def test_ranks_are_reduced_over_those_that_reported(engine, reduce, expected):
    write_all(engine, [frame(1, [1.0, None, 6.0, 2.0])])
    (segment,) = series(engine, "gpt", "loss", reduce=reduce)
    assert {line.name: line.high[0] for line in segment.lines} == expected


@pytest.mark.parametrize(
    ("steps", "lacking", "points", "gaps"),
    [
        *((range(337), (), points, []) for points in (13, 320, 400)),  # points of uneven width are no gaps
        (range(337), (100, *range(200, 250)), 320, [100, 200]),
        (range(0, 600, 10), (300,), 20, [300]),
    ],
)
def test_a_step_without_a_value_is_a_gap_where_steps_like_it_have_one(engine, steps, lacking, points, gaps):
    write_all(engine, [frame(step, [1.0]) for step in steps if step not in lacking])
    (segment,) = series(engine, "gpt", "loss", points=points)
    assert segment.missing.tolist() == gaps


def test_a_nan_of_one_rank_is_seen_in_the_mean_of_all(engine):
    write_all(engine, [frame(1, [1.0, math.nan])])
    (segment,) = series(engine, "gpt", "loss")
    assert segment.lines[0].mark.tolist() == [ValueMark.NAN]


def test_each_attempt_is_a_segment_of_its_own(engine):
    write_all(engine, [frame(1, [1.0]), frame(2, [2.0]), frame(1, [3.0], "l.1")])
    segments = series(engine, "gpt", "loss")
    assert [(s.attempt, s.step.tolist(), s.lines[0].high.tolist()) for s in segments] == [
        ("l.0", [1, 2], [1.0, 2.0]),
        ("l.1", [1], [3.0]),
    ]


def test_only_the_steps_asked_for_are_read(engine):
    write_all(engine, [frame(step, [float(step)]) for step in range(200)])
    (segment,) = series(engine, "gpt", "loss", from_step=100, to_step=103)
    assert segment.step.tolist() == [100, 101, 102, 103]


def test_in_a_heat_map_repeated_steps_show_the_newest_attempt(engine):
    write_all(engine, [frame(1, [1.0, 1.0]), frame(2, [2.0, 2.0]), frame(2, [9.0, None, 5.0], "l.1")])
    found = heat_map(engine, "gpt", "loss")
    assert found.step.tolist() == [1, 2]
    assert found.value[0].tolist() == [1.0, 9.0]
    assert found.mark[1].tolist() == [ValueMark.FINITE, ValueMark.ABSENT]
    assert found.mark[2].tolist() == [ValueMark.ABSENT, ValueMark.FINITE]


def test_a_heat_map_has_no_more_columns_than_asked_for_and_hides_no_extreme(engine):
    frames = [frame(step, [1.0, 100.0 if step == 777 else 1.0]) for step in range(1_000)]
    write_all(engine, frames)
    found = heat_map(engine, "gpt", "loss", columns=30)
    assert found.value.shape[1] <= 30
    assert np.nanmax(found.value[1]) == 100.0
    assert np.nanmax(found.value[0]) == 1.0


def test_an_unknown_job_has_no_series(engine):
    assert series(engine, "nobody", "loss") == []
    assert heat_map(engine, "nobody", "loss").step.tolist() == []
    assert metrics(engine, "nobody") == []


def test_writing_the_same_frames_again_gives_the_same_rows(engine):
    frames = [frame(step, [step + 0.5, -1.0]) for step in range(100)]
    write_all(engine, frames)
    before = rows(engine)
    write_all(engine, frames)
    assert rows(engine) == before


def test_a_new_writer_keeps_what_an_earlier_one_wrote_of_a_chunk(engine):
    write_all(engine, [frame(1, [1.0])])
    write_all(engine, [frame(2, [2.0, 3.0])])
    (segment,) = series(engine, "gpt", "loss", reduce=Reduce.MAX)
    assert segment.lines[0].high.tolist() == [1.0, 3.0]


def test_a_chunk_is_written_when_later_ones_have_begun(engine):
    writer = SeriesWriter(engine, FakeClock())
    for step in range(OPEN_CHUNKS * CHUNK_STEPS):
        writer.add("gpt", frame(step, [1.0]))
    assert rows(engine) == []
    for step in range(OPEN_CHUNKS * CHUNK_STEPS, OPEN_CHUNKS * CHUNK_STEPS + WAITING_FRAMES):
        writer.add("gpt", frame(step, [1.0]))
    assert [row[2] for row in rows(engine)] == [0]


def test_a_record_that_comes_after_its_chunk_was_written_is_added_to_it(engine):
    writer = SeriesWriter(engine, FakeClock())
    for step in range(8 * CHUNK_STEPS):
        writer.add("gpt", frame(step, [1.0, None]))
    writer.add("gpt", frame(3, [None, 7.0]))
    writer.flush("gpt")
    (segment,) = series(engine, "gpt", "loss", to_step=4, reduce=Reduce.MAX)
    assert segment.lines[0].high.tolist() == [1.0, 1.0, 1.0, 7.0, 1.0]


def test_unfinished_chunks_are_written_every_second(engine):
    clock = FakeClock()
    writer = SeriesWriter(engine, clock)
    writer.add("gpt", frame(0, [1.0]))
    writer.flush_due()
    assert len(rows(engine)) == 1
    writer.add("gpt", frame(1, [2.0]))
    writer.flush_due()
    assert series(engine, "gpt", "loss")[0].step.tolist() == [0]
    clock.advance(1.0)
    writer.flush_due()
    assert series(engine, "gpt", "loss")[0].step.tolist() == [0, 1]


def test_a_value_beyond_float32_is_infinite_on_a_chart(engine):
    write_all(engine, [frame(1, [1e300])])
    assert series(engine, "gpt", "loss")[0].lines[0].mark.tolist() == [ValueMark.POSITIVE_INF]


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
