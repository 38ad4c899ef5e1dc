"""Long ranges: what roll-ups say is what the raw chunks say."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, insert, select

from rankwatch_detectors.base import Frame, StepKind
from rankwatch_service.series import query
from rankwatch_service.series.chunks import blank
from rankwatch_service.series.query import Reduce, Side, heat_map, series
from rankwatch_service.series.rollups import LEVELS, Buckets, ValueMark, of_chunk
from rankwatch_service.series.rows import Tier, trim
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Attempt, SeriesChunk, SeriesRollup
from tests.support.clock import FakeClock
from tests.support.store.database import new_database

STEPS, RANKS = 5_000, 6
FOREVER = Tier(10**30, 10**18)


@pytest.fixture
def engine(tmp_path):
    engine = new_database(tmp_path)
    yield engine
    engine.dispose()


def frames(values: np.ndarray, first: int = 0, attempt: str = "l.0", name: str = "loss"):
    """Frames of [step, rank]; where a value is None-like (-1) it was not measured."""
    for step, row in enumerate(values, first):
        yield Frame(attempt, "steps", step, StepKind.TRAIN, 0.0, {name: row}, {name: row != -1})


def write_all(engine, *parts, clock=None) -> SeriesWriter:
    writer = SeriesWriter(engine, clock or FakeClock())
    for part in parts:
        for each in part:
            writer.add("gpt", each)
    writer.flush("gpt")
    return writer


@pytest.fixture
def measured() -> np.ndarray:
    """Powers of two and sums of few, so that 18 bits hold them exactly."""
    values = np.random.default_rng(4).integers(64, 128, (STEPS, RANKS)) / 64
    values[1_234, 2], values[2_000, 0], values[3_100, 5], values[4_000, 1] = 50.0, -7.0, math.nan, math.inf
    values[700:900, 4] = -1
    values[3_000, 3] = -math.inf
    return values


def drop(engine, model, *where) -> None:
    with write(engine) as connection:
        connection.execute(delete(model).where(*where))


@pytest.mark.parametrize("columns", [7, 30, 70])
def test_a_heat_map_of_a_long_range_shows_every_extreme_and_mark_of_the_raw_steps(engine, measured, columns):
    write_all(engine, frames(measured))
    drop(engine, SeriesChunk)  # now only roll-ups can answer
    for side, join in ((Side.HIGH, np.fmax), (Side.LOW, np.fmin)):
        found = heat_map(engine, "gpt", "loss", columns=columns, side=side)
        assert columns // 2 < len(found.step) <= columns
        edges = [*found.step.tolist(), STEPS]
        for column, (begin, end) in enumerate(pairwise(edges)):
            part = measured[begin:end]
            finite = np.where(np.isfinite(part) & (part != -1), part, np.nan)
            assert np.array_equal(join.reduce(finite, axis=0), found.value[:, column], equal_nan=True)
            assert (found.mark[:, column] == ValueMark.NAN).tolist() == np.isnan(part).any(axis=0).tolist()
    assert found.mark[1].max() == ValueMark.POSITIVE_INF
    assert found.mark[3].max() == ValueMark.NEGATIVE_INF
    assert (found.mark[4] == ValueMark.ABSENT).any() == (STEPS / columns < 100)


@pytest.mark.parametrize("reduce", [Reduce.MEAN, Reduce.FAN, Reduce.MIN])
def test_lines_of_a_long_range_enclose_exactly_what_the_raw_lines_say(engine, measured, reduce):
    write_all(engine, frames(measured))
    (raw,) = series(engine, "gpt", "loss", reduce=reduce, points=4_000, to_step=3_999)
    by_step = [
        series(engine, "gpt", "loss", reduce=reduce, from_step=at, to_step=at + 63)[0] for at in range(0, 3_968, 64)
    ]
    drop(engine, SeriesChunk)
    (rolled,) = series(engine, "gpt", "loss", reduce=reduce, points=62, to_step=3_967)
    assert rolled.step.tolist() == list(range(0, 3_968, 64))
    assert [line.name for line in rolled.lines] == [line.name for line in raw.lines]
    for at, line in enumerate(rolled.lines):
        for bucket, exact in enumerate(by_step):
            assert line.low[bucket] == np.nanmin(exact.lines[at].low)
            assert line.high[bucket] == np.nanmax(exact.lines[at].high)
            assert line.mark[bucket] == exact.lines[at].mark.max()


def test_the_line_of_one_rank_over_a_long_range_keeps_its_spike(engine, measured):
    write_all(engine, frames(measured))
    (segment,) = series(engine, "gpt", "loss", reduce=Reduce.NONE, ranks=[2], points=20)
    assert len(segment.step) <= 20
    assert np.nanmax(segment.lines[0].high) == 50.0


def test_the_band_of_some_ranks_holds_all_that_they_did(engine, measured):
    write_all(engine, frames(measured))
    (segment,) = series(engine, "gpt", "loss", reduce=Reduce.MEDIAN, ranks=[0, 2, 3], points=20)
    exact = np.median(measured[:, [0, 2, 3]], axis=1)
    edges = [*segment.step.tolist(), STEPS]
    for at, (begin, end) in enumerate(pairwise(edges)):
        part = exact[begin:end][np.isfinite(exact[begin:end])]
        assert segment.lines[0].low[at] <= part.min()
        assert segment.lines[0].high[at] >= part.max()


def test_steps_that_no_roll_up_knows_yet_are_drawn_from_the_raw_chunks(engine):
    clock = FakeClock()
    writer = write_all(engine, frames(np.full((3_000, 2), 1.0)), clock=clock)
    clock.advance(1)
    for each in frames(np.full((100, 2), 9.0), first=3_000):
        writer.add("gpt", each)
    writer.flush_due()
    found = heat_map(engine, "gpt", "loss", columns=20)
    assert found.value[:, -1].tolist() == [9.0, 9.0]
    (segment,) = series(engine, "gpt", "loss", points=20)
    assert segment.lines[0].high[-1] == 9.0


def test_where_the_raw_chunks_have_left_a_short_range_shows_the_roll_ups(engine):
    write_all(engine, frames(np.arange(640.0)[:, None] / 4))
    drop(engine, SeriesChunk, SeriesChunk.chunk < 3)
    (segment,) = series(engine, "gpt", "loss", to_step=255)
    assert segment.step.tolist() == [0, 64, 128, *range(192, 256)]
    assert segment.lines[0].high[:3].tolist() == [15.75, 31.75, 47.75]
    assert segment.missing.tolist() == []
    found = heat_map(engine, "gpt", "loss", to_step=255)
    assert found.value[0, :3].tolist() == [15.75, 31.75, 47.75]


def test_after_a_rollback_the_new_attempt_counts_from_where_it_began(engine):
    with write(engine) as connection:
        for number, (attempt, first) in enumerate((("l.0", 0), ("l.1", 2_000)), 1):
            row = {"started_unix_ns": 0, "ended_unix_ns": None, "world_size": 1, "last_step": None, "topology": {}}
            connection.execute(
                insert(Attempt).values(job="gpt", attempt=attempt, first_step=first, number=number, **row)
            )
    before, after = np.ones((3_000, 1)), np.ones((3_000, 1))
    before[1_990], before[2_500] = 7.0, math.nan
    write_all(engine, frames(before), frames(after, first=2_000, attempt="l.1"))
    found = heat_map(engine, "gpt", "loss", columns=20)
    assert np.nanmax(found.value) == 7.0
    assert not (found.mark == ValueMark.NAN).any()


def test_many_ranks_share_rows_of_which_the_highest_shows(engine):
    values = np.ones((3, 100))
    values[1, 57] = 8.0
    values[2, 99] = math.nan
    write_all(engine, frames(values))
    found = heat_map(engine, "gpt", "loss", rows=30)
    assert found.rank.tolist() == list(range(0, 100, 4))
    assert found.ranks == 100
    assert found.value[57 // 4].tolist() == [1.0, 8.0, 1.0]
    assert found.mark[-1].tolist() == [ValueMark.FINITE, ValueMark.FINITE, ValueMark.NAN]


def test_a_map_reads_a_coarser_level_when_there_are_too_many_cells(engine, monkeypatch):
    monkeypatch.setattr(query, "MAP_CELLS_MAX", 1_000)
    values = np.ones((5_000, 10))
    values[3_333, 7] = 5.0
    write_all(engine, frames(values))
    found = heat_map(engine, "gpt", "loss", columns=300)
    assert len(found.step) == 79
    assert np.nanmax(found.value[7]) == 5.0


def rollups(engine) -> list[tuple]:
    chosen = [column for column in SeriesRollup.__table__.c if column.name != "at_unix_ns"]
    with read(engine) as connection:
        return sorted(tuple(row) for row in connection.execute(select(*chosen)))


def test_a_replay_writes_the_same_roll_ups(engine, measured):
    write_all(engine, frames(measured))
    before = rollups(engine)
    assert {row[2] for row in before} == set(range(1, LEVELS + 1))
    write_all(engine, frames(measured[2_500:], first=2_500))
    assert rollups(engine) == before


def test_a_writer_that_begins_anew_goes_on_with_the_roll_ups_of_the_one_before(tmp_path, measured):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    whole, broken = new_database(tmp_path / "one"), new_database(tmp_path / "two")
    write_all(whole, frames(measured))
    write_all(broken, frames(measured[:2_777]))
    write_all(broken, frames(measured[2_700:], first=2_700))
    assert rollups(broken) == rollups(whole)
    whole.dispose()
    broken.dispose()


def test_a_metric_that_comes_back_after_a_restart_keeps_its_earlier_buckets(engine):
    write_all(engine, frames(np.full((300, 1), 3.0)), frames(np.full((1, 1), 5.0), name="eval_loss"))
    write_all(engine, frames(np.full((100, 1), 3.0), first=300))
    write_all(engine, frames(np.full((1, 1), 4.0), first=400, name="eval_loss"))
    drop(engine, SeriesChunk)
    (segment,) = series(engine, "gpt", "eval_loss")
    assert segment.lines[0].high.tolist() == [5.0, 4.0]


def test_a_late_value_whose_chunk_has_left_is_joined_to_its_bucket(engine):
    write_all(engine, frames(np.full((2_000, 2), 3.0)))
    drop(engine, SeriesChunk, SeriesChunk.chunk < 20)
    write_all(engine, frames(np.array([[9.0, -1]]), first=70))
    drop(engine, SeriesChunk)
    found = heat_map(engine, "gpt", "loss", to_step=127)
    assert found.step.tolist() == [0, 64]
    assert found.value.tolist() == [[3.0, 9.0], [3.0, 3.0]]


def test_raw_chunks_leave_by_age_and_roll_ups_stay(engine):
    clock = FakeClock()
    writer = write_all(engine, frames(np.ones((640, 1))), clock=clock)
    clock.advance(100)
    for each in frames(np.ones((64, 1)), first=640):
        writer.add("gpt", each)
    writer.flush("gpt")
    gone = trim(engine, Tier(50 * 10**9, 10**18), FOREVER, clock.unix_ns())
    assert (gone.chunks, gone.rollups) == (10, 0)
    assert heat_map(engine, "gpt", "loss").step.tolist() == [*range(0, 640, 64), *range(640, 704)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_buckets_join_to_the_bucket_of_all_their_steps(data):
    some = st.sampled_from([1.0, 2.0, -3.5, 0.0, math.inf, -math.inf, math.nan, None])
    block = blank(2, 64, 3)
    for place in data.draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 63), st.integers(0, 2)), max_size=40)):
        value = data.draw(some)
        if value is not None:
            block[place] = value
    parts = Buckets.blank(2, 8, 3)
    for at in range(8):
        part = np.ascontiguousarray(block[:, 8 * at : 8 * at + 8])
        parts.put(of_chunk(part), slice(at, at + 1))
    joined, whole = parts.joined(), of_chunk(block)
    for name in ("low", "high", "mark", "lines_low", "lines_high", "lines_mark"):
        assert np.array_equal(
            getattr(joined, name), getattr(whole, name), equal_nan=getattr(whole, name).dtype.kind == "f"
        )
