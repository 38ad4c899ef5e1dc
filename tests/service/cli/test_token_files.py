"""The token of a job's agents in a file: created once, kept while it is valid, then replaced."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from rankwatch_service.access.identities import Authenticator
from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.tokens import revoke_token
from rankwatch_service.cli.app import app
from rankwatch_service.clock import SystemClock
from rankwatch_service.store.engine import open_engine, write
from rankwatch_service.store.migrate import upgrade


def test_a_valid_token_stays_and_a_revoked_one_is_replaced(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path}/rankwatch.db")
    upgrade(engine)
    file = tmp_path / "token"

    def kept(lasting: str = "1d") -> str:
        command = [
            "token",
            "job",
            "gpt",
            "--hosts",
            "2",
            "--for",
            lasting,
            "--file",
            str(file),
            "--data",
            str(tmp_path),
        ]
        result = CliRunner().invoke(app, command)
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
    engine = open_engine(f"sqlite:///{tmp_path}/rankwatch.db")
    upgrade(engine)
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
