"""How a command reports failure."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path


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
