"""Tokens that are made, listed and kept in files on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import select, update
from typer.testing import CliRunner

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Authenticator
from rankwatch_service.access.tokens import revoke_token
from rankwatch_service.cli.app import app
from rankwatch_service.cli.errors import CliError
from rankwatch_service.clock import SystemClock
from rankwatch_service.policy.policy import Policy
from rankwatch_service.store.engine import open_engine, write
from rankwatch_service.store.models import Outbox, Receiver, Token
from rankwatch_service.store.settings_rows import write_policy
from tests.support.service.webhook_receiver import route_all
from tests.support.store.database import add, change, new_database, values_of
from tests.support.values.incidents import receiver_row


@pytest.fixture
def data(tmp_path: Path) -> Path:
    new_database(tmp_path).dispose()
    return tmp_path


def invoke(data: Path, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["token", *arguments, "--data", str(data)])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_list_tells_expired_tokens_from_valid_and_revoked_ones(data: Path) -> None:
    for name, lasting in {"over": "1s", "ended": "1d", "good": "never"}.items():
        invoke(data, "create", name, "--scope", "read", "--for", lasting)
    engine = open_engine(f"sqlite:///{data}/rankwatch.db")
    change(engine, update(Token).where(Token.name == "over").values(expires_unix_ns=1))
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


def test_where_two_people_are_wanted_receivers_hear_of_a_token_that_can_approve(data: Path) -> None:
    engine = open_engine(f"sqlite:///{data}/rankwatch.db")
    with write(engine) as connection:
        write_policy(connection, Policy(two_people=True), 1)
    add(engine, Receiver, receiver_row("pager"))
    invoke(data, "create", "grafana", "--scope", "read")
    text = invoke(data, "create", "eve", "--scope", "command").strip()
    invoke(data, "login")
    route_all(engine)
    bodies = values_of(engine, select(Outbox.body).order_by(Outbox.created_unix_ns))
    message, login = map(json.loads, bodies)
    assert "first login" in login["data"]["text"]
    assert message["type"] == "command.not_approved"
    assert message["data"]["text"].startswith('DONE WITHOUT APPROVAL for all jobs: make_token with name "eve"')
    assert Authenticator(engine, SystemClock()).authenticate(text) is not None
    engine.dispose()


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
        reported = " ".join(result.stderr.split())
        assert admits in reported
        assert database in reported
    invoke(data, "create", "sam", "--scope", "read")
    table = invoke(data, "list").splitlines()
    assert sorted(line[table[0].index("hosts") :].split()[0] for line in table[1:]) == ["16", "any", "–"]


def test_the_token_of_a_job_names_the_service_of_rankwatch_up(data, tmp_path, monkeypatch):
    monkeypatch.setenv("RANKWATCH_INGEST_CONFIG", str(tmp_path / "ingest.json"))
    places = {"database_url": f"sqlite:///{data}/rankwatch.db", "data_dir": str(data)}
    (tmp_path / "local.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "token": "t", **places}))
    result = CliRunner().invoke(app, ["token", "job", "gpt"])
    assert "of the service at http://127.0.0.1:9" in " ".join(result.stderr.split())


def test_tokens_are_made_listed_and_revoked_in_the_database(terminal, tmp_path):
    where = ("--data", str(tmp_path))
    assert terminal.run("db", "check", *where)[0] == 1
    assert terminal.run("db", "upgrade", *where)[0] == 0
    assert terminal.run("db", "check", *where)[0] == 0
    status, out, _ = terminal.run("token", "create", "sam", "--scope", "read", "--for", "1h", *where)
    assert (status, out.startswith("rankwatch_api_")) == (0, True)
    token_id = out.split("_")[2]
    secret = out.strip().split("_", 3)[3]
    status, out, _ = terminal.run("token", "list", "--json", *where)
    assert json.loads(out)["name"] == "sam"
    assert secret not in out
    assert "sha256" not in out
    assert terminal.run("token", "revoke", token_id, *where)[0] == 0
    assert "revoked" in terminal.run("token", "list", *where)[1]
    assert terminal.run("token", "create", "sam", "--scope", "everything", *where)[0] == 2
    assert terminal.run("token", "revoke", "nope", *where)[0] == 2


def test_a_valid_token_stays_and_a_revoked_one_is_replaced(tmp_path: Path) -> None:
    engine = new_database(tmp_path)
    file = tmp_path / "token"

    def kept(lasting: str = "1d") -> str:
        places = ("--file", str(file), "--data", str(tmp_path))
        result = CliRunner().invoke(app, ["token", "job", "gpt", "--hosts", "2", "--for", lasting, *places])
        assert result.exit_code == 0, result.output
        assert "rankwatch_" not in result.stdout
        assert file.stat().st_mode & 0o777 == 0o600
        return file.read_text().strip()

    first = kept()
    identity = Authenticator(engine, SystemClock()).authenticate(first)
    assert identity is not None
    assert (identity.scopes, identity.jobs.only, identity.hosts_max) == ({Scope.INGEST}, "gpt", 2)
    assert kept() == kept("1h") == first
    with write(engine) as connection:
        revoke_token(connection, identity.id)
    second = kept()
    assert second != first
    third = kept("30d")
    assert third != second, "it had less than half of the lifetime that is asked for"
    file.write_text(first)
    assert kept() not in {first, second, third}
    engine.dispose()


def test_a_token_of_another_project_is_replaced_in_its_file(tmp_path: Path) -> None:
    engine = new_database(tmp_path)
    command = ["token", "job", "gpt", "--file", str(tmp_path / "token"), "--data", str(tmp_path)]

    def kept(*more: str) -> str:
        assert CliRunner().invoke(app, [*command, *more]).exit_code == 0
        return (tmp_path / "token").read_text().strip()

    first, theirs = kept(), kept("--project", "nlp", "--owner", "ann")
    assert first != theirs == kept("--project", "nlp", "--owner", "ann")
    identity = Authenticator(engine, SystemClock()).authenticate(theirs)
    assert identity is not None
    assert (identity.project, identity.owner, identity.jobs.project) == ("nlp", "ann", "")
    made = CliRunner().invoke(app, ["token", "create", "t", "--scope", "read", "--project", "vision", *command[-2:]])
    identity = Authenticator(engine, SystemClock()).authenticate(made.stdout.strip())
    assert identity is not None
    assert str(identity.jobs) == "project 'vision'"
    engine.dispose()
    refused = CliRunner().invoke(app, [*command, "--project", "a/b"])
    assert "cannot be the name" in str(refused.exception)
