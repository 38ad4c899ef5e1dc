"""How long series are kept, of all jobs and of those of a project, on both databases."""

import pytest
from pydantic import ValidationError
from sqlalchemy import insert, select

from rankwatch_service.series import rows
from rankwatch_service.series.rows import tiers, trim
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import JobOwnership, SeriesChunk, SeriesRollup
from tests.support.clock import FakeClock

HOUR_NS = 3_600 * 10**9
ROLLUP = dict.fromkeys(("low", "high", "mark", "lines"), b"x")


def store(engine, clock, job, size_bytes=10):
    """A chunk and a roll-up that are written now."""
    times = {"at_unix_ns": clock.unix_ns(), "size_bytes": size_bytes, "ranks": 1}
    keys = {"job": job, "attempt": "l.0", "metric": "loss", "chunk": clock.unix_ns()}
    with write(engine) as connection:
        connection.execute(insert(SeriesChunk).values(**keys, **times, first_step=0, steps=1, data=b"x"))
        connection.execute(insert(SeriesRollup).values(**keys, **times, **ROLLUP, level=1))


def hours_left(engine, clock, model=SeriesChunk):
    """By job, the ages of what is kept, in hours."""
    with read(engine) as connection:
        rows = connection.execute(select(model.job, model.at_unix_ns).order_by(model.at_unix_ns)).all()
    found = {}
    for job, at_unix_ns in rows:
        found.setdefault(job, []).append((clock.unix_ns() - at_unix_ns) // HOUR_NS)
    return found


@pytest.fixture
def world(engine):
    """A clock, and three jobs with rows of every hour: of project short, of project long, and of none."""
    clock = FakeClock()
    with write(engine) as connection:
        for project in ("short", "long"):
            connection.execute(insert(JobOwnership).values(job=f"of-{project}", project=project, owner=""))
    for _ in range(6):
        for job in ("of-short", "of-long", "of-none"):
            store(engine, clock, job)
        clock.advance(3_600.0)
    return engine, clock


def settings(tmp_path, **more):
    return Settings(data_dir=tmp_path, **more)


def test_each_project_keeps_its_series_as_long_as_it_says_and_the_rest_as_long_as_all(world, tmp_path):
    engine, clock = world
    projects = {"short": {"series_raw_hours": 2}, "long": {"series_raw_hours": 5, "series_rollup_days": 1}}
    gone = trim(engine, *tiers(settings(tmp_path, series_raw_hours=3, projects=projects)), clock.unix_ns())
    kept = {"of-short": [2, 1], "of-none": [3, 2, 1], "of-long": [5, 4, 3, 2, 1]}
    assert hours_left(engine, clock) == kept
    assert (gone.chunks, gone.rollups) == (8, 0)
    clock.advance(20 * 3_600.0)
    assert (
        trim(engine, *tiers(settings(tmp_path, series_raw_hours=300, projects=projects)), clock.unix_ns()).rollups == 2
    )
    assert {job: len(ages) for job, ages in hours_left(engine, clock, SeriesRollup).items()} == {
        "of-short": 6,
        "of-none": 6,
        "of-long": 4,
    }


def test_the_limit_of_size_is_that_of_all_jobs_whatever_a_project_keeps(world, tmp_path):
    engine, clock = world
    projects = {"long": {"series_raw_hours": 1_000}}
    trim(engine, *tiers(settings(tmp_path, series_raw_bytes=60, projects=projects)), clock.unix_ns())
    assert hours_left(engine, clock) == {job: [2, 1] for job in ("of-short", "of-long", "of-none")}


def test_one_pass_removes_so_many_rows_and_the_next_goes_on(world, tmp_path, monkeypatch):
    engine, clock = world
    monkeypatch.setattr(rows, "PASS_ROWS", 4)
    monkeypatch.setattr(rows, "TRIM_ROWS", 3)
    limits = tiers(settings(tmp_path, series_raw_hours=1, projects={"short": {"series_raw_hours": 1}}))
    assert [trim(engine, *limits, clock.unix_ns()).chunks for _ in range(5)] == [4, 4, 4, 3, 0]


def test_projects_are_read_from_the_file_and_a_misspelled_setting_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rankwatch.toml").write_text("[projects.nlp]\nseries_raw_hours = 24\n")
    raw, rolled = tiers(settings(tmp_path))
    assert (raw.projects_keep_ns, rolled.projects_keep_ns) == ({"nlp": 24 * HOUR_NS}, {})
    with pytest.raises(ValidationError, match="series_hours"):
        settings(tmp_path, projects={"nlp": {"series_hours": 1}})
