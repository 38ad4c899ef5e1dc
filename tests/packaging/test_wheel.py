"""The wheel and the sdist hold what an installed service needs and nothing of the workshop."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest


def test_the_wheel_has_the_packages_with_types_pages_and_migrations_and_no_tests(built):
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    packages = ("rankwatch", "rankwatch_detectors", "rankwatch_service")
    assert {f"{package}/{file}" for package in packages for file in ("__init__.py", "py.typed")} <= names
    shipped = {(*name.split("/")[:2], Path(name).suffix) for name in names if name.startswith("rankwatch_service/")}
    assert {("rankwatch_service", "dashboard", suffix) for suffix in (".js", ".css")} <= shipped
    assert any(name.startswith("rankwatch_service/migrations/versions/") and name.endswith(".py") for name in names)
    assert not any(name.startswith(("tests/", "benchmarks/", "suite/")) for name in names)


def test_the_sdist_has_what_it_takes_to_build_the_wheel_and_to_read_about_it(built):
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "docs/design.md"} <= names
    assert {"collectors/rankwatch/__init__.py", "service/rankwatch_service/__init__.py"} <= names
    assert not any(name.startswith((".ci/", ".git/", ".venv/")) for name in names)


def test_a_release_names_the_hashes_of_its_files(built):
    command = ["sha256sum", "--check", "SHA256SUMS"]
    done = subprocess.run(command, cwd=built.wheel.parent, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{built.wheel.name}: OK", f"{built.sdist.name}: OK"]


@pytest.mark.ci
@pytest.mark.integration
def test_a_training_script_runs_in_an_environment_that_has_the_wheel_alone(built, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=300)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(built.wheel)], check=True, timeout=300)
    script = 'import rankwatch\nwatch = rankwatch.start(job="bare", agent=False)\nprint(list(watch.steps(3)))'
    environment = {"PATH": "/usr/bin:/bin", "RANKWATCH_DIR": str(tmp_path / "rings")}
    done = subprocess.run(
        [python, "-I", "-c", script], check=True, capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout == "[0, 1, 2]\n"
