"""Reads a TOML file of rules on metrics for commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rankwatch_service.cli.errors import CliError, Status

if TYPE_CHECKING:
    from rankwatch_service.written_rule import WrittenRule


def read_rules(path: Path) -> list[WrittenRule]:
    """The rules of a file.

    Raises:
        CliError: it cannot be read, or a rule is wrong.
    """
    from rankwatch_service.written_rule import read_toml

    try:
        return read_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CliError(Status.USAGE, f"{path}: {error}") from error
