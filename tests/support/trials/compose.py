"""docker-compose.yml for tests: parsed, and its services started without Docker by their own commands."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
REQUIRED = re.compile(r"\$\{([A-Z_]+):\?([^}]+)\}")


class MissingVariableError(Exception):
    """As `docker compose` would say it: the variable's own message."""


def services(variables: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """All services, with the variables in them replaced."""
    parsed: dict[str, dict[str, Any]] = yaml.safe_load(substituted(variables))["services"]
    return parsed


def substituted(variables: Mapping[str, str]) -> str:
    """The file's text with its variables replaced; comments are left out, as compose leaves them alone."""

    def value(found: re.Match[str]) -> str:
        if not variables.get(found[1]):
            raise MissingVariableError(f"required variable {found[1]} is missing a value: {found[2]}")
        return variables[found[1]]

    return REQUIRED.sub(value, (ROOT / "docker-compose.yml").read_text())


class Container:
    """One service as a process of this machine: names of other containers become addresses here."""

    def __init__(self, name: str, service: Mapping[str, Any], folder: Path, here: Mapping[str, str]) -> None:
        """`here`: what a text in the file is on this machine, longest first."""
        self.name = name
        self._service = service
        self._folder = folder / name
        self._here = here
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, *extra: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end; a service that ends by itself."""
        return self._run([*self._command(), *extra])

    def start(self, *extra: str) -> None:
        """Start it; `extra` arguments come behind its own."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "out.txt").open("ab") as out:
            self._process = subprocess.Popen(
                [*self._command(), *extra], env=self._environment(), cwd=self._folder, stdout=out, stderr=out
            )

    def lives(self) -> None:
        """Fail if it has ended."""
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} ended: {self.said()}"

    def healthy(self) -> bool:
        """Run its health check, once."""
        self.lives()
        kind, *command = self._service["healthcheck"]["test"]
        assert kind == "CMD"
        return self._run([self._mapped(part) for part in command]).returncode == 0

    def exec(self, *command: str) -> str:
        """`docker compose exec NAME …`"""
        done = self._run(list(command))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stop(self) -> int:
        """SIGTERM, and ten seconds, as `docker stop` gives it; its exit status."""
        if self._process is None:
            return 0
        self._process.terminate()
        try:
            return self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return -9

    def said(self) -> str:
        path = self._folder / "out.txt"
        return path.read_text(errors="replace")[-3_000:] if path.exists() else ""

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        self._folder.mkdir(parents=True, exist_ok=True)
        return subprocess.run(
            command, env=self._environment(), cwd=self._folder, capture_output=True, text=True, timeout=60, check=False
        )

    def _command(self) -> list[str]:
        entrypoint = self._service.get("entrypoint", ["rankwatch"])  # the image's own
        return [self._mapped(part) for part in [*entrypoint, *self._service["command"]]]

    def _environment(self) -> dict[str, str]:
        named = {name: self._mapped(str(value)) for name, value in self._service.get("environment", {}).items()}
        # What the image gives: its programs, an empty home; nothing of whoever runs the test.
        return {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(self._folder)} | named

    def _mapped(self, text: str) -> str:
        for there, here in self._here.items():
            text = text.replace(there, here)
        return text
