"""The transaction of a batch."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import event, select

from rankwatch_service.store import models
from tests.support.service.stream import Service
from tests.support.store.database import new_database


def test_several_jobs_are_written_with_one_statement_for_each_table(tmp_path: Path) -> None:
    service = Service(new_database(tmp_path))
    stream = service.started()
    for job in ("gpt", "other", "third"):
        service.train(1, 2, job=job)
    statements: list[str] = []
    event.listen(service.engine, "before_cursor_execute", lambda *call: statements.append(call[2]))
    stream.step()
    for table in ("job", "attempt"):
        assert sum(text.startswith(f"INSERT INTO {table} ") for text in statements) == 1
    assert sorted(service.column(select(models.Job.name))) == ["gpt", "other", "third"]
    assert sorted(service.column(select(models.Attempt.job))) == ["gpt", "other", "third"]
    service.engine.dispose()
