"""The wheel holds what an installed service needs and nothing of the workshop."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory) -> set[str]:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "-w",
            str(out),
            str(ROOT),
        ],
        check=True,
        timeout=110,
    )
    (wheel,) = out.glob("rankwatch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_three_packages_lose_their_folder_prefix(wheel_names):
    assert {"rankwatch/__init__.py", "rankwatch_detectors/__init__.py", "rankwatch_service/__init__.py"} <= wheel_names


def test_the_migrations_are_shipped(wheel_names):
    assert any(
        name.startswith("rankwatch_service/migrations/versions/") and name.endswith(".py") for name in wheel_names
    )


def test_the_dashboard_is_shipped(wheel_names):
    suffixes = {Path(name).suffix for name in wheel_names if name.startswith("rankwatch_service/dashboard/")}
    assert {".js", ".css"} <= suffixes


def test_type_markers_are_shipped_and_tests_are_not(wheel_names):
    assert {
        f"{package}/py.typed" for package in ("rankwatch", "rankwatch_detectors", "rankwatch_service")
    } <= wheel_names
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in wheel_names)
