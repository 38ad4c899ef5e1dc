"""Exit statuses and errors of commands, and how to install an optional dependency that is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final


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


def did_you_mean(given: str, known: Iterable[str], otherwise: str = "") -> str:
    """The end of a sentence about a word that is not known.

    >>> did_you_mean("opne", ["open", "resolved"])
    "; did you mean 'open'?"
    """
    meant = get_close_matches(given, list(known), 1)
    return f"; did you mean {str(meant[0])!r}?" if meant else f"; {otherwise}" if otherwise else ""


def read_json(text: str, name: str) -> dict[str, Any]:
    """The object in a file.

    Raises:
        CliError: it is none.
    """
    try:
        found: Any = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise CliError(Status.USAGE, f"{name} is not JSON: it cannot be read from {where} on") from error
    if not isinstance(found, dict):
        raise CliError(Status.USAGE, f"{name} is not a JSON object")
    return found


def usage_error(error: Any) -> str:
    """What is wrong with a command line, of which typer has raised this error."""
    context: Any = getattr(error, "ctx", None)
    parameter: Any = getattr(error, "param", None)
    message = str(error.message)
    if hasattr(error, "possibilities"):
        text = f"there is no option {error.option_name}" + did_you_mean(error.option_name, error.possibilities or ())
    elif found := re.match(r"No such command '(.*?)'", message):
        text = f"there is no command {found[1]!r}" + did_you_mean(found[1], context.command.commands)
    elif parameter is None:
        text = message.removesuffix(".")
        text = re.sub(r"^Option '(.*)' requires an argument$", r"\1 needs a value", text)
        text = re.sub(r"^Got unexpected extra argument\(?s?\)? \((.*)\)$", r"there is no place for \1", text)
    else:
        name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.display_name_raw
        text = f"{name} is missing" if type(error).__name__ == "MissingParameter" else f"{name}: {_in_words(error)}"
    return text if context is None or text.endswith("?") else f"{text}; `{context.command_path} --help` shows how"


def _in_words(error: Any) -> str:
    """What is wrong with a value, without words of the library that found it."""
    message = str(error.message).removeprefix("Value error, ").removesuffix(".")
    for theirs, ours in _WORDS.items():
        message = re.sub(theirs, ours, message)
    found: Any = getattr(error.__cause__, "errors", list)()
    given = str(found[0]["input"]) if found else ""
    return message + did_you_mean(given, set(re.findall(r"'([^']+)'", message)) - {given})


_WORDS: Final[Mapping[str, str]] = {
    "^Input should be": "must be",
    "a valid (integer|number).*": "a number",
    r"greater than or equal to (\S+)": r"\1 or more",
    r"less than or equal to (\S+)": r"\1 or less",
    r"^'[^']*': No such file or directory": "there is no such file",
}
"""What typer and pydantic say of values, and how it is said here."""
