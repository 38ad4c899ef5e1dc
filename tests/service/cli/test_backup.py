"""A copy of the database, made while the service writes to it."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from sqlalchemy import insert, select

from rankwatch_service.cli.commands import database
from rankwatch_service.store.engine import open_engine, write
from rankwatch_service.store.migrate import check
from rankwatch_service.store.models import Job
from tests.support.store.database import add, job_row, new_database, values_of


def test_a_copy_has_what_was_committed_and_only_its_owner_reads_it(terminal, tmp_path: Path) -> None:
    engine, file = new_database(tmp_path), tmp_path / "copy.db"
    add(engine, Job, job_row("committed"))
    with write(engine) as connection:  # is not in the copy, and does not stop it
        connection.execute(insert(Job).values(**job_row("later")))
        status, _, said = terminal.run("db", "backup", str(file), "--data", str(tmp_path))
    engine.dispose()
    assert (status, "secret.key" in said) == (0, True)
    assert file.stat().st_mode & 0o777 == 0o600
    copied = open_engine(f"sqlite:///{file}")
    check(copied)
    assert values_of(copied, select(Job.name)) == ["committed"]
    copied.dispose()


def test_a_service_that_writes_all_the_time_does_not_hold_up_the_copy(terminal, monkeypatch, tmp_path: Path) -> None:
    engine, file, jobs = new_database(tmp_path), tmp_path / "copy.db", count()

    class Bar:
        """Writes a row whenever some pages are copied."""

        def __enter__(self):
            return lambda _done, _beside: add(engine, Job, job_row(f"job-{next(jobs)}"))

        def __exit__(self, *_error):
            pass

    monkeypatch.setattr(database, "BACKUP_PAGES", 8)
    monkeypatch.setattr(database.output, "progress", lambda *_what: Bar())
    assert terminal.run("db", "backup", str(file), "--data", str(tmp_path))[0] == 0
    written = next(jobs)
    assert written > 1
    copied = open_engine(f"sqlite:///{file}")
    assert values_of(copied, select(Job.name)) == []
    for one in (engine, copied):
        one.dispose()


def test_a_file_that_exists_is_left_as_it_is(terminal, tmp_path: Path) -> None:
    new_database(tmp_path).dispose()
    file = tmp_path / "copy.db"
    file.write_text("mine")
    status, _, said = terminal.run("db", "backup", str(file), "--data", str(tmp_path))
    assert (status, "File exists" in said, file.read_text()) == (2, True, "mine")
