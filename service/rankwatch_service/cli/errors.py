"""Exit statuses and errors of commands, and how to install an optional dependency that is missing."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Final


class Status(IntEnum):
    """Exit statuses."""

    FINE = 0
    FINDINGS = 1
    USAGE = 2
    UNREACHABLE = 3
    DENIED = 4


class CliError(Exception):
    """Ends the process with `status` and one line on stderr."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


def file_exists(file: Path) -> CliError:
    """The error of an export to a file that exists."""
    message = f"{file} exists, and an export overwrites nothing: name another file, or move this one away"
    return CliError(Status.USAGE, message)


EXTRAS: Final[Mapping[str, str]] = {
    "kafka": "kafka",
    "psycopg": "postgres",
    "pyarrow": "replay",
    "torch": "torch",
    "typer": "service",
}
"""Module to the extra that installs it."""


def require(module: str) -> None:
    """Fail here, and not in the processes that are about to be started.

    Raises:
        ModuleNotFoundError: the module is not installed.
    """
    if find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def advice(error: ModuleNotFoundError) -> str | None:
    """How to install a missing module; None if it belongs to no extra."""
    module = (error.name or "").partition(".")[0]
    return f"this needs {module}: pip install 'rankwatch[{EXTRAS[module]}]'" if module in EXTRAS else None
