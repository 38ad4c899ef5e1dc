"""`rankwatch audit`, over a database of its own."""

import json
import stat

import pytest
from typer.testing import CliRunner

from rankwatch_service.cli.app import app
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import write
from tests.support.store.database import new_database

DAY_NS = 86_400 * 10**9


@pytest.fixture
def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    engine = new_database(tmp_path)
    with write(engine) as connection:
        for n in range(3):
            audit_trail.append(connection, n * DAY_NS, "ann", "job.archive", f"job {n}", "ok")
    yield engine
    engine.dispose()


def audit(engine, *arguments):
    url = engine.url.render_as_string(hide_password=False)
    result = CliRunner().invoke(app, ["audit", *arguments, "--database-url", url])
    return result.exit_code or int(result.exception is not None), str(result.exception or "") + result.output


def test_an_export_goes_to_a_private_file_that_is_never_overwritten(engine, tmp_path):
    kept = tmp_path / "kept.jsonl"
    assert audit(engine, "export", str(kept))[0] == 0
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert [json.loads(line)["target"] for line in kept.read_text().splitlines()] == ["job 0", "job 1", "job 2"]
    status, said = audit(engine, "export", str(kept))
    assert status != 0
    assert "name another file, or move this one away" in said


@pytest.mark.parametrize(
    ("time", "targets"),
    [
        ("1970-01-02T00:00:00Z", ["job 1", "job 2"]),
        ("1970-01-02T00:01", ["job 2"]),
        ("1970-01-02 00:00", ["job 1", "job 2"]),
        ("1970-01-02T01:30+01:30", ["job 1", "job 2"]),
        ("1970-01-01T23:30:00.5-00:45", ["job 2"]),
        ("0001-01-01T00:00+12:00", ["job 0", "job 1", "job 2"]),
        ("9999-12-31", []),
    ],
)
def test_an_export_begins_at_any_iso_time(engine, time, targets):
    status, said = audit(engine, "export", "--since", time)
    assert status == 0, said
    assert [json.loads(line)["target"] for line in said.splitlines()] == targets


def test_what_is_no_time_is_refused_with_an_example(engine):
    status, said = audit(engine, "export", "--since", "yesterday")
    assert (status, "2026-04-01T09:30+02:00" in said) == (1, True)


def test_an_export_to_stdout_begins_at_a_day(engine):
    status, said = audit(engine, "export", "--since", "1970-01-02")
    assert status == 0
    assert [json.loads(line)["target"] for line in said.splitlines()] == ["job 1", "job 2"]


def test_verify_names_the_first_row_that_does_not_fit(engine, tmp_path):
    kept = tmp_path / "kept.jsonl"
    audit(engine, "export", str(kept))
    assert audit(engine, "verify")[0] == audit(engine, "verify", str(kept))[0] == 0
    with write(engine) as connection:
        connection.exec_driver_sql("DELETE FROM audit WHERE id = 3")
    assert audit(engine, "verify")[0] == 0, "a chain does not show that it was cut at its end"
    status, said = audit(engine, "verify", str(kept))
    assert status != 0
    assert "row 3 is not in the database as it was exported" in said
    with write(engine) as connection:
        connection.exec_driver_sql("UPDATE audit SET actor = 'bob' WHERE id = 1")
    assert "row 1 was changed" in audit(engine, "verify")[1]


def test_a_file_is_verified_by_itself_where_there_is_no_database(engine, tmp_path):
    kept = tmp_path / "kept.jsonl"
    audit(engine, "export", str(kept))
    elsewhere = ["audit", "verify", str(kept), "--data", str(tmp_path / "elsewhere")]
    result = CliRunner().invoke(app, elsewhere)
    assert result.exit_code == 0
    assert "there is no database to compare it with" in result.output
    kept.write_text(kept.read_text().replace("job 1", "job 9"))
    result = CliRunner().invoke(app, elsewhere)
    assert "row 2 was changed" in str(result.exception)


def test_what_is_no_export_is_refused(engine, tmp_path):
    (tmp_path / "notes").write_text("hello")
    assert "line 1 is not a row" in audit(engine, "verify", str(tmp_path / "notes"))[1]
    assert "No such file" in audit(engine, "verify", str(tmp_path / "none"))[1]
