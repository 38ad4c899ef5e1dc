"""A real Alertmanager, whose receivers are paths of one server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.support.service.process import free_port, until

PROGRAM = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
needs_alertmanager = pytest.mark.skipif(
    PROGRAM is None or shutil.which("amtool") is None,
    reason="no Alertmanager is installed (Debian: prometheus-alertmanager)",
)
needs_amtool = pytest.mark.skipif(
    shutil.which("amtool") is None, reason="amtool is not installed (Debian: prometheus-alertmanager)"
)


@contextmanager
def running_alertmanager(folder: Path, routes: Mapping[str, Any], receivers: list[str], hook: str) -> Iterator[str]:
    """An Alertmanager with these routes, each receiver of which is a path of the server at `hook`; yields its URL."""
    named = [
        {"name": name, "webhook_configs": [{"url": f"{hook}/{name}", "send_resolved": True}]} for name in receivers
    ]
    config = folder / "alertmanager.yml"
    config.write_text(yaml.safe_dump({**routes, "receivers": named}))
    url = f"http://127.0.0.1:{free_port()}"
    places = [f"--config.file={config}", f"--storage.path={folder / 'data'}"]
    listens = [f"--web.listen-address={url.removeprefix('http://')}", "--cluster.listen-address="]
    with (folder / "alertmanager.txt").open("wb") as out:
        process = subprocess.Popen([str(PROGRAM), *places, *listens], stdout=out, stderr=out)
    try:
        until("Alertmanager answers", lambda: _is_ready(url))
        yield url
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/-/ready").is_success
    except httpx2.HTTPError:
        return False


def amtool(url: str, *arguments: str) -> str:
    """What amtool says of the Alertmanager at a URL."""
    command = ["amtool", f"--alertmanager.url={url}", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
