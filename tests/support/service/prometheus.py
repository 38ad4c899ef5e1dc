"""A real Prometheus with one group of rules, which sends its alerts to one URL."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import yaml

from tests.support.service.process import free_port, until

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no Prometheus is installed (Debian: prometheus)"
)


class Prometheus:
    """A process, whose rules are evaluated and whose alerts are repeated several times a second. It finds its
    Alertmanagers 5 s after each start and reload."""

    def __init__(self, folder: Path, alertmanager: str, token: str) -> None:
        self._rules = folder / "rules.yml"
        self._url = f"http://127.0.0.1:{free_port()}"
        target = {
            "authorization": {"credentials": token},
            "static_configs": [{"targets": [urlsplit(alertmanager).netloc]}],
        }
        config = {
            "global": {"evaluation_interval": "200ms"},
            "rule_files": [str(self._rules)],
            "alerting": {"alertmanagers": [target]},
        }
        self._config = folder / "prometheus.yml"
        self._config.write_text(yaml.safe_dump(config))
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def rule(self, rules: Sequence[dict[str, Any]]) -> None:
        """Let these rules hold from now on."""
        self._rules.write_text(
            yaml.safe_dump({"groups": [{"name": "test", "interval": "200ms", "rules": list(rules)}]})
        )
        if self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def start(self) -> None:
        options = [
            f"--config.file={self._config}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={urlsplit(self._url).netloc}",
            "--rules.alert.resend-delay=200ms",
        ]
        with (self._folder / "prometheus.txt").open("wb") as out:
            self._process = subprocess.Popen(["prometheus", *options], stdout=out, stderr=out)
        until("Prometheus answers", self._is_ready)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _is_ready(self) -> bool:
        try:
            return httpx2.get(f"{self._url}/-/ready").is_success
        except httpx2.HTTPError:
            return False


@contextmanager
def running_prometheus(
    folder: Path, alertmanager: str, token: str, rules: Sequence[dict[str, Any]]
) -> Iterator[Prometheus]:
    """A Prometheus that sends to `alertmanager` with a token."""
    prometheus = Prometheus(folder, alertmanager, token)
    prometheus.rule(rules)
    try:
        prometheus.start()
        yield prometheus
    finally:
        prometheus.stop()
