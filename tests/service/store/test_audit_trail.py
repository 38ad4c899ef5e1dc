import contextlib

import pytest
import structlog
from structlog.testing import LogCapture

from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Audit


def append(engine, at_unix_ns, target):
    with write(engine) as connection:
        audit_trail.append(connection, at_unix_ns, "me", "did", target, "ok", fields={"n": at_unix_ns})


@pytest.fixture
def lines():
    """Lines of the log."""
    captured = LogCapture()
    structlog.configure(processors=[captured])
    yield captured.entries
    structlog.reset_defaults()


def test_an_export_since_a_time_leaves_no_row_out_after_its_first(engine, monkeypatch):
    monkeypatch.setattr(audit_trail, "PAGE_ROWS", 2)
    for n in range(5):
        append(engine, n, f"thing {n}")
    append(engine, 0, "of a clock that is late")
    rows = list(audit_trail.export(engine))
    assert [row["target"] for row in rows] == [*(f"thing {n}" for n in range(5)), "of a clock that is late"]
    assert set(rows[0]) == set(Audit.__table__.columns.keys())
    assert [row["at_unix_ns"] for row in audit_trail.export(engine, 3)] == [3, 4, 0]
    assert list(audit_trail.export(engine, 5)) == []


def test_a_row_is_a_line_of_the_log_once_it_is_committed(engine, lines):
    with write(engine) as connection:
        audit_trail.append(connection, 7, "me", "did", "thing", "ok", source="10.0.0.1", fields={"n": 1})
        assert lines == []
    assert lines == [
        {"event": "audit", "log_level": "info", "at_unix_ns": 7, "actor": "me", "source": "10.0.0.1", "action": "did",
         "target": "thing", "outcome": "ok", "fields": {"n": 1}}
    ]  # fmt: skip


def test_a_row_that_was_undone_is_not_in_the_log(engine, lines):
    with contextlib.suppress(ZeroDivisionError), write(engine) as connection:
        audit_trail.append(connection, 7, "me", "did", "thing", "ok")
        _ = 1 / 0
    assert lines == []


def test_a_command_that_does_not_log_prints_nothing(engine, capsys):
    append(engine, 1, "thing")
    assert capsys.readouterr() == ("", "")
