"""The wheel and the sdist hold what an installed service needs and nothing of the workshop."""

import tarfile
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def wheel_names(built) -> set[str]:
    with zipfile.ZipFile(built.wheel) as archive:
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
    assert not any(name.startswith(("tests/", "benchmarks/", "suite/")) for name in wheel_names)


def test_the_sdist_has_what_it_takes_to_build_the_wheel_and_to_read_about_it(built):
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "docs/design.md"} <= names
    assert {"collectors/rankwatch/__init__.py", "service/rankwatch_service/__init__.py"} <= names
    assert not any(name.startswith((".ci/", ".git/", ".venv/")) for name in names)
