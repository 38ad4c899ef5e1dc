"""The token of agents in a file: created once, kept while it is valid, then replaced."""

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

    def kept() -> str:
        result = CliRunner().invoke(app, ["token", "ingest", str(file), "--data", str(tmp_path)])
        assert result.exit_code == 0, result.output
        assert file.stat().st_mode & 0o777 == 0o600
        return file.read_text().strip()

    first = kept()
    identity = Authenticator(engine, SystemClock()).authenticate(first)
    assert identity is not None
    assert identity.scopes == {Scope.INGEST}
    assert kept() == first
    with write(engine) as connection:
        revoke_token(connection, identity.id)
    assert kept() != first
    engine.dispose()
