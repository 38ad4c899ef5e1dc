"""Tokens that are made and listed on the command line."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from rankwatch_service.access.tokens import DEFAULT_S
from rankwatch_service.cli.app import app
from rankwatch_service.cli.errors import CliError
from rankwatch_service.store.engine import open_engine, write
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.store.models import Token


@pytest.fixture
def data(tmp_path: Path) -> Path:
    engine = open_engine(f"sqlite:///{tmp_path}/rankwatch.db")
    upgrade(engine)
    engine.dispose()
    return tmp_path


def invoke(data: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["token", *arguments, "--data", str(data)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_token_expires_after_90_days_unless_another_time_or_never_is_asked_for(data: Path) -> None:
    for name, more in {"usual": (), "short": ("--for", "1h"), "lasting": ("--for", "never")}.items():
        invoke(data, "create", name, "--scope", "read", *more)
    listed = {one["name"]: one for one in map(json.loads, invoke(data, "list", "--json").splitlines())}
    left_s = {name: (one["expires_unix_ns"] or 0) / 1e9 - time.time() for name, one in listed.items()}
    assert left_s["usual"] == pytest.approx(DEFAULT_S, abs=300)
    assert left_s["short"] == pytest.approx(3_600, abs=300)
    assert listed["lasting"]["expires_unix_ns"] is None
    assert {one["state"] for one in listed.values()} == {"valid"}


def test_the_list_tells_expired_tokens_from_valid_and_revoked_ones(data: Path) -> None:
    for name, lasting in {"over": "1s", "ended": "1d", "good": "never"}.items():
        invoke(data, "create", name, "--scope", "read", "--for", lasting)
    engine = open_engine(f"sqlite:///{data}/rankwatch.db")
    with write(engine) as connection:
        connection.execute(update(Token).where(Token.name == "over").values(expires_unix_ns=1))
    engine.dispose()
    rows = {one["name"]: one for one in map(json.loads, invoke(data, "list", "--json").splitlines())}
    invoke(data, "revoke", rows["ended"]["id"])
    table = {line.split()[2]: line for line in invoke(data, "list").splitlines()[1:]}
    assert {name: line.split()[-1] for name, line in table.items()} == {
        "over": "expired",
        "ended": "revoked",
        "good": "valid",
    }
    assert table["good"].count("never") == 2, "it never expires, and was never used"


@pytest.mark.parametrize("command", [("create", "x", "--scope", "read"), ("job", "gpt")])
@pytest.mark.parametrize("lasting", ["0s", "00d", "-1d"])
def test_a_token_that_would_have_expired_is_refused(data: Path, command: tuple[str, ...], lasting: str) -> None:
    result = CliRunner().invoke(app, ["token", *command, f"--for={lasting}", "--data", str(data)])
    assert isinstance(result.exception, CliError)
    assert lasting in str(result.exception)
    assert invoke(data, "list") == ""


def test_whoever_makes_the_token_of_a_job_learns_what_it_admits_and_where_it_is_good(data: Path) -> None:
    database = f"in the database {data}/rankwatch.db"
    for more, admits in {("--hosts", "16"): "for 16 agents at a time", (): "for as many agents as come"}.items():
        result = CliRunner().invoke(app, ["token", "job", "gpt", *more, "--data", str(data)])
        assert result.stdout.startswith("rankwatch_job_")
        assert len(result.stdout.splitlines()) == 1
        told = " ".join(result.stderr.split())
        assert admits in told
        assert database in told
    invoke(data, "create", "sam", "--scope", "read")
    table = invoke(data, "list").splitlines()
    assert sorted(line[table[0].index("hosts") :].split()[0] for line in table[1:]) == ["16", "any", "–"]


def test_the_token_of_a_job_names_the_service_of_rankwatch_up(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKWATCH_INGEST_CONFIG", str(tmp_path / "ingest.json"))
    places = {"database_url": f"sqlite:///{data}/rankwatch.db", "data_dir": str(data)}
    (tmp_path / "local.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "token": "t", **places}))
    result = CliRunner().invoke(app, ["token", "job", "gpt"])
    assert "of the service at http://127.0.0.1:9" in " ".join(result.stderr.split())
