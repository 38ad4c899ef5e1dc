"""A training image installs rankwatch from the service that it will report to, by one line."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from rankwatch_service.api.routes.system import wheel
from tests.support.service.process import LOGIN, Http, Role, until
from tests.support.service.served_api import served_api

pytestmark = pytest.mark.integration

RECORD = """
import glob, os, sys
import rankwatch, rankwatch.agent.worker
assert rankwatch.__file__.startswith(sys.argv[1]), rankwatch.__file__
watch = rankwatch.start(job="installed", rank=0, world_size=1, agent=False)
for step in watch.steps(3):
    watch.log(loss=1.0)
print(len(glob.glob(os.path.join(os.environ["RANKWATCH_DIR"], "*.ring"))))
"""


def pip_install(target: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Real pip, which nothing on this machine configures."""
    command = [sys.executable, "-m", "pip", "install", "--isolated", "--disable-pip-version-check", "--no-cache-dir"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(target), "no_proxy": "*", "PIP_CONFIG_FILE": "/dev/null"}
    return subprocess.run(
        [*command, "--target", str(target), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )


def test_what_a_real_service_gives_records_steps_on_a_host_that_has_nothing_else(tmp_path: Path) -> None:
    role = Role(tmp_path, "up", "--data", str(tmp_path / "data"), "--port", "0")
    role.start()
    url = until("login link", lambda: LOGIN.findall(role.said()))[0][0]
    target = tmp_path / "installed"
    done = pip_install(target, "--no-deps", "--index-url", f"{url}/simple/", "rankwatch")
    client = Http(url)
    page = client.ask("GET", "/simple/rankwatch/").text
    client.close()
    assert role.stop() == 0
    assert done.returncode == 0, done.stderr
    assert "#sha256=" in page
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": f"{target}:{Path(msgspec.__file__).parents[1]}",
        "RANKWATCH_DIR": str(tmp_path / "rings"),
    }
    command = [sys.executable, "-c", RECORD, str(target)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "1"


@pytest.fixture
def other_packages(tmp_path: Path) -> Iterator[str]:
    """Stands for PyPI: an index with what rankwatch depends on, and with a newer rankwatch of somebody else."""
    for name, version in (("msgspec", "0.22.9"), ("rankwatch", "99.0")):
        folder = tmp_path / "simple" / name
        folder.mkdir(parents=True)
        info, file = f"{name}-{version}.dist-info", f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(folder / file, "w") as archive:
            archive.writestr(f"{name}.py", "stranger = True\n")
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        (folder / "index.html").write_text(f'<!DOCTYPE html><html><body><a href="{file}">{file}</a></body></html>')

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/simple"
    server.shutdown()
    server.server_close()


def test_one_line_takes_rankwatch_from_the_service_and_the_rest_from_elsewhere(
    tmp_path: Path, other_packages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel, "OTHER_PACKAGES", other_packages)
    target = tmp_path / "installed"
    with served_api(tmp_path) as (_, url):
        done = pip_install(target, "--index-url", f"{url}/simple/", "rankwatch")
    assert done.returncode == 0, done.stderr
    assert (target / "msgspec.py").read_text() == "stranger = True\n"
    assert (target / "rankwatch" / "watch.py").exists(), "the newer one of a stranger was not asked for"


def test_a_link_with_its_hash_is_refused_when_the_wheel_is_another(tmp_path: Path) -> None:
    with served_api(tmp_path) as (_, url):
        name = wheel.own_wheel().name
        link = f"{url}/simple/rankwatch/{name}#sha256="
        wrong = pip_install(tmp_path / "wrong", "--no-deps", link + "0" * 64)
        right = pip_install(tmp_path / "right", "--no-deps", link + wheel.own_wheel().sha256)
    assert "DO NOT MATCH THE HASHES" in wrong.stderr
    assert right.returncode == 0, right.stderr
