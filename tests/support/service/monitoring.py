"""A real Prometheus with one group of rules, which sends its alerts to one URL, and a real Alertmanager."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import yaml

from tests.support.service.process import free_port, until

ALERTMANAGER = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
Rules = Sequence[dict[str, Any]]
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no Prometheus is installed (Debian: prometheus)"
)
needs_amtool = pytest.mark.skipif(
    shutil.which("amtool") is None, reason="amtool is not installed (Debian: prometheus-alertmanager)"
)
needs_alertmanager = pytest.mark.skipif(
    ALERTMANAGER is None or shutil.which("amtool") is None,
    reason="no Alertmanager is installed (Debian: prometheus-alertmanager)",
)


@contextmanager
def running_prometheus(folder: Path, alertmanager: str, token: str, rules: Rules) -> Iterator[Callable[[Rules], None]]:
    """Yields how other rules are set. Rules are evaluated and alerts repeated several times a second; its Alertmanagers
    are found 5 s after each start and reload."""
    rules_file, config_file, url = folder / "rules.yml", folder / "prometheus.yml", _free_url()
    target = {"authorization": {"credentials": token}, "static_configs": [{"targets": [urlsplit(alertmanager).netloc]}]}
    config = {
        "global": {"evaluation_interval": "200ms"},
        "rule_files": [str(rules_file)],
        "alerting": {"alertmanagers": [target]},
    }
    config_file.write_text(yaml.safe_dump(config))

    def write_rules(rules: Rules) -> None:
        group = {"name": "test", "interval": "200ms", "rules": list(rules)}
        rules_file.write_text(yaml.safe_dump({"groups": [group]}))

    def change_rules(rules: Rules) -> None:
        write_rules(rules)
        process.send_signal(signal.SIGHUP)

    write_rules(rules)
    listens = [f"--web.listen-address={urlsplit(url).netloc}", "--rules.alert.resend-delay=200ms"]
    places = [f"--config.file={config_file}", f"--storage.tsdb.path={folder / 'data'}"]
    with _running(["prometheus", *places, *listens], url, folder) as process:
        yield change_rules


@contextmanager
def running_alertmanager(folder: Path, routes: Mapping[str, Any], receivers: list[str], hook: str) -> Iterator[str]:
    """An Alertmanager with these routes, each receiver of which is a path of the server at `hook`; yields its URL."""
    named = [
        {"name": name, "webhook_configs": [{"url": f"{hook}/{name}", "send_resolved": True}]} for name in receivers
    ]
    config, url = folder / "alertmanager.yml", _free_url()
    config.write_text(yaml.safe_dump({**routes, "receivers": named}))
    places = [f"--config.file={config}", f"--storage.path={folder / 'data'}"]
    listens = [f"--web.listen-address={urlsplit(url).netloc}", "--cluster.listen-address="]
    with _running([str(ALERTMANAGER), *places, *listens], url, folder):
        yield url


def amtool(url: str, *arguments: str) -> str:
    """What amtool says of the Alertmanager at a URL."""
    command = ["amtool", f"--alertmanager.url={url}", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def _free_url() -> str:
    return f"http://127.0.0.1:{free_port()}"


@contextmanager
def _running(command: list[str], url: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "out.txt").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        until(f"{command[0]} answers", lambda: _is_ready(url))
        yield process
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/-/ready").is_success
    except httpx2.HTTPError:
        return False
