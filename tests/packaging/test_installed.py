"""rankwatch as it is installed, beside this and the newest Python, and those between that this machine has.

Nothing here sees the checkout: every module imports, a rank records and a reader reads it, and the same simulated job
leads to the same incidents on every version.
"""

import glob
import json
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.trials.selection import long_trial

pytestmark = [pytest.mark.integration, pytest.mark.ci]

EXTRAS = "service,replay"
INSTALL_S, RUN_S = 600, 300
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"
SCENARIO = ("--ranks", "8", "--steps", "160", "--fault", "straggler:rank=5,at=80", "--fault", "nonfinite:rank=3,at=120")

IMPORT_ALL = """
import importlib, pkgutil, sys
OPTIONAL = {"torch", "kafka", "pynvml", "psycopg"}
def names(package):
    yield package
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not found.name.endswith("__main__"):
            yield found.name
count = 0
for package in ("rankwatch", "rankwatch_detectors", "rankwatch_service"):
    for name in names(package):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name.split(".")[0] not in OPTIONAL:
                raise
        count += 1
print(count)
"""

RECORD = """
import glob, os, sys
import rankwatch
from rankwatch.reader import RingReader
watch = rankwatch.start(job="smoke", rank=0, world_size=1)
for step in range(20):
    with watch.step(step):
        with watch.phase("forward"):
            watch.log(loss=1.0 / (step + 1))
(path,) = glob.glob(os.path.join(os.environ["RANKWATCH_DIR"], "*.ring"))
reader = RingReader(path)
entries = reader.poll().entries
print(len([entry for entry in entries if hasattr(entry, "busy_s")]))
"""


def interpreter(version: str) -> str | None:
    """A Python of this version: on the PATH, of pyenv, or one that uv knows."""
    home = pwd.getpwuid(os.getuid()).pw_dir
    root = os.environ.get("PYENV_ROOT", f"{home}/.pyenv")
    found = [shutil.which(f"python{version}"), *sorted(glob.glob(f"{root}/versions/{version}.*/bin/python"))]
    if uv := shutil.which("uv"):
        known = subprocess.run(
            [uv, "python", "find", "--no-python-downloads", version], capture_output=True, text=True, check=False
        )
        found.append(known.stdout.strip())
    return next((path for path in found if path and answers(path, version)), None)


def answers(path: str, version: str) -> bool:
    """A shim of a version manager may be there without what it stands for."""
    command = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except OSError:
        return False
    return said.strip() == version


@pytest.fixture(
    scope="module",
    params=[THIS, pytest.param("3.12", marks=long_trial), pytest.param("3.13", marks=long_trial), "3.14"],
)
def python(request, built, tmp_path_factory) -> str:
    """A virtual environment with the wheel in it."""
    version = request.param
    folder = tmp_path_factory.mktemp(f"python{version}")
    if version == THIS:
        found, wanted = sys.executable, [str(built.wheel), "--no-deps"]
    elif found := interpreter(version):
        wanted = [f"{built.wheel}[{EXTRAS}]"]
    else:
        pytest.skip(f"no Python {version} on this machine")
    subprocess.run([found, "-m", "venv", str(folder / "venv")], check=True, timeout=INSTALL_S)
    python = str(folder / "venv" / "bin" / "python")
    if version == THIS:
        # What it depends on is here already, in versions that were tried.
        (packages,) = (folder / "venv" / "lib").glob("*/site-packages")
        (packages / "here.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--prefer-binary", *wanted],
        capture_output=True,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return python


def run(python: str, *arguments: str, folder: Path) -> str:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "RANKWATCH_DIR": str(folder / "rings")}
    done = subprocess.run(
        [python, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_module_imports(python, tmp_path):
    assert int(run(python, "-c", IMPORT_ALL, folder=tmp_path)) > 300


def test_a_rank_records_and_a_reader_reads_it(python, tmp_path):
    assert run(python, "-c", RECORD, folder=tmp_path).split()[-1] == "20"


def test_the_same_job_leads_to_the_same_incidents(python, tmp_path):
    rankwatch = str(Path(python).with_name("rankwatch"))
    reports = []
    for name, *start in (("installed", python, rankwatch), ("checkout", sys.executable, "-m", "rankwatch_service.cli")):
        folder = tmp_path / name
        folder.mkdir()
        run(*start, "simulate", *SCENARIO, "-o", "job.csv.gz", folder=folder)
        lines = [json.loads(line) for line in run(*start, "replay", "job.csv.gz", "--json", folder=folder).splitlines()]
        reports.append([line for line in lines if "kind" in line])  # the last line says how long it took
    assert reports[0] == reports[1]
    assert {"straggler", "nonfinite"} <= {line.get("kind") for line in reports[0]}
