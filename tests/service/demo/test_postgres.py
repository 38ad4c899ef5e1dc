"""The demo's PostgreSQL server where its own user may not read what root installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from rankwatch_service.demo.services import postgres
from rankwatch_service.demo.services.postgres import PACKAGE, Postgres, PostgresError
from tests.support.store.postgres import let_others_through


@pytest.fixture
def private_programs(tmp_path: Path) -> Path:
    """The package as pip lays it out, in a folder of mode 0700 with a space in its name."""
    installed = postgres._programs()
    site = tmp_path / "site packages"
    site.mkdir(mode=0o700)
    shutil.copytree(installed.parent, site / PACKAGE / installed.parent.name)
    libraries = installed.parents[2] / f"{PACKAGE}.libs"
    shutil.copytree(libraries, site / libraries.name)
    return site / PACKAGE / installed.parent.name / installed.name


@pytest.mark.integration
def test_a_server_runs_from_programs_that_only_their_owner_may_read(
    tmp_path: Path, private_programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_others_through(tmp_path)
    monkeypatch.setattr(postgres, "_programs", lambda: private_programs)
    server = Postgres(tmp_path / "server", {"fsync": "off"})
    server.start()
    try:
        engine = create_engine(make_url(server.url()).set(drivername="postgresql+psycopg"))
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT 1")) == 1
        engine.dispose()
    finally:
        server.stop()


def test_a_folder_that_the_servers_user_cannot_enter_is_named(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    with pytest.raises(PostgresError, match=r"cannot enter .*: set TMPDIR to a folder"):
        postgres._require_way_through(private / "server")
