"""The first hour on the machine of `rankwatch up`: commands need neither address nor token nor `--data`."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rankwatch.agent.endpoint import Endpoint, find_endpoint
from rankwatch.trust import Trust, split_token
from rankwatch_service.cli.app import app
from rankwatch_service.clock import SystemClock
from rankwatch_service.settings import Settings
from rankwatch_service.up import UpError, prepare
from tests.support.service.process import LOGIN, Role, until


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments])
    return result.exit_code, str(result.exception or "") + result.output


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user who never used rankwatch: nothing in the environment, an empty home."""
    for name in [name for name in os.environ if name.startswith("RANKWATCH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def up(user: Path) -> Iterator[Role]:
    role = Role(user, "up", "--data", str(user / "elsewhere"), "--port", "0")
    role.start()
    until("login link", lambda: LOGIN.findall(role.said()))
    yield role
    role.stop()


def command(up: Role, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rankwatch_service", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=up.folder,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ci
@pytest.mark.integration
def test_commands_find_the_service_with_its_own_folder_and_port(up: Role, user: Path) -> None:
    assert command(up, "jobs", "--json") == ""
    assert command(up, "incidents", "--json") == ""
    made = command(up, "token", "create", "ci", "--scope", "read").strip()
    url = LOGIN.findall(up.said())[-1][0]
    assert command(up, "jobs", "--url", url, "--token", made, "--json") == ""
    assert "command line" not in command(up, "token", "list")
    assert not (user / "data").exists(), "a command made a database of its own"


@pytest.mark.parametrize(
    "arguments",
    [
        ("token", "create", "ci", "--scope", "read"),
        ("token", "list"),
        ("token", "revoke", "x"),
        ("token", "job", "gpt", "--file", "file"),
        ("db", "check"),
    ],
)
def test_a_command_never_makes_a_database(user: Path, arguments: tuple[str, ...]) -> None:
    for more in ((), ("--data", str(user / "other"))):
        status, said = invoke(*arguments, *more)
        assert status != 0
        assert "there is no database" in said
        assert "rankwatch up" in said
    assert [path.name for path in user.iterdir()] == []


def test_the_files_of_up_are_private_and_stay_valid(user: Path) -> None:
    settings = Settings(data_dir=user / "elsewhere", port=8123)
    settings.data_dir.mkdir()
    prepare(settings, SystemClock())
    local = user / "config" / "rankwatch" / "local.json"
    assert stat.S_IMODE(local.stat().st_mode) == 0o600
    first = json.loads(local.read_text())
    assert first["url"] == "http://127.0.0.1:8123"
    prepare(settings, SystemClock())
    assert json.loads(local.read_text()) == first


def test_agents_read_the_address_file_that_up_writes(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = user / "shared" / "ingest.json"
    monkeypatch.setenv("RANKWATCH_INGEST_CONFIG", str(named))
    settings = Settings(data_dir=user / "elsewhere")
    settings.data_dir.mkdir()
    prepare(settings, SystemClock())
    token, _, key = split_token(json.loads(named.read_text())["token"])
    assert key, "so that they know the service"
    endpoint = Endpoint(settings.public_url, token, Trust(enrolment_key=key))
    assert find_endpoint(None, None, os.environ) == endpoint
    # The address alone is enough where the token that goes with it lies here.
    assert find_endpoint(settings.public_url + "/", None, os.environ) == endpoint
    with pytest.raises(ValueError, match="no token"):
        find_endpoint("http://127.0.0.1:9", None, os.environ)


def test_agents_and_up_agree_on_the_users_folder_without_home(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rankwatch.agent.endpoint import configuration_path

    monkeypatch.delenv("XDG_CONFIG_HOME")
    for home in (str(user), None):
        if home is None:
            monkeypatch.delenv("HOME")
        else:
            monkeypatch.setenv("HOME", home)
        assert configuration_path(os.environ) == Settings().ingest_config


def test_a_configuration_folder_that_cannot_be_written_is_named(user: Path) -> None:
    (user / "config").write_text("a file, no folder")
    settings = Settings(data_dir=user / "elsewhere")
    settings.data_dir.mkdir()
    with pytest.raises(UpError, match=r"ingest\.json cannot be written .*RANKWATCH_INGEST_CONFIG"):
        prepare(settings, SystemClock())
