"""Whoever can write into the folder in which somebody starts rankwatch has neither code run nor settings believed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankwatch.children import python_module
from rankwatch_service.cli.configuration import configured_settings
from rankwatch_service.cli.errors import CliError

ROOT = Path(__file__).parents[2]
NOBODY = 65_534


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with modules of the names that Python itself imports; the file `ran` tells that one was."""
    for name in ("argparse", "json", "logging", "sqlite3", "msgspec"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nraise SystemExit(0)\n")
    return tmp_path


@pytest.mark.parametrize(
    ("module", "argument"),
    [("rankwatch.agent", "--help"), ("rankwatch.agent.host", "/"), ("rankwatch_service", "--help")],
)
def test_a_module_in_the_working_directory_is_not_run(planted: Path, module: str, argument: str) -> None:
    done = subprocess.run(python_module(module, argument), cwd=planted, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not (planted / "ran").exists()
    subprocess.run([sys.executable, "-m", module, argument], cwd=planted, capture_output=True, check=False, timeout=60)
    assert (planted / "ran").exists(), "without -P it is"


def test_every_child_is_started_by_the_one_function() -> None:
    product = [path for folder in ("collectors", "detectors", "service") for path in (ROOT / folder).rglob("*.py")]
    assert [path.name for path in product if '"-m"' in path.read_text()] == ["children.py"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a settings file that somebody else may have written."""
    place = tmp_path / "shared"
    place.mkdir(mode=0o755)
    (place / "rankwatch.toml").write_text('public_url = "https://evil.example"\n')
    (place / "rankwatch.toml").chmod(0o600)
    monkeypatch.chdir(place)
    monkeypatch.delenv("RANKWATCH_PUBLIC_URL", raising=False)
    return place


def test_a_settings_file_of_ones_own_is_read(folder: Path) -> None:
    assert configured_settings().public_url == "https://evil.example"
    folder.chmod(0o1777)
    assert configured_settings().public_url == "https://evil.example", "as in /tmp, where nobody else can replace it"


@pytest.mark.parametrize(("what", "mode"), [("rankwatch.toml", 0o666), ("rankwatch.toml", 0o602), (".", 0o777)])
def test_a_settings_file_that_others_can_write_or_replace_is_not_read(folder: Path, what: str, mode: int) -> None:
    (folder / what).chmod(mode)
    with pytest.raises(CliError, match=r"rankwatch\.toml is not read, as others can write .* must be this user's or"):
        configured_settings()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize("what", ["rankwatch.toml", "."])
def test_a_settings_file_or_folder_of_another_user_is_not_read(folder: Path, what: str) -> None:
    os.chown(folder / what, NOBODY, NOBODY)
    with pytest.raises(CliError, match=f"is not read, as .* belongs to user {NOBODY}"):
        configured_settings()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")
def test_a_group_of_several_may_not_write_it(folder: Path) -> None:
    (folder / "rankwatch.toml").chmod(0o620)
    assert configured_settings().public_url == "https://evil.example", "of a group of this user alone"
    os.chown(folder / "rankwatch.toml", -1, NOBODY)
    with pytest.raises(CliError, match="others can write"):
        configured_settings()


def test_a_link_is_judged_by_what_it_leads_to(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.toml"
    (folder / "rankwatch.toml").rename(elsewhere)
    (folder / "rankwatch.toml").symlink_to(elsewhere)
    assert configured_settings().public_url == "https://evil.example"
    elsewhere.chmod(0o666)
    with pytest.raises(CliError, match="others can write"):
        configured_settings()
