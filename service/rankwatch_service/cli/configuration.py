"""The service's settings, rules in files and durations, as commands read them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rankwatch_service.cli.errors import CliError, Status

if TYPE_CHECKING:
    from rankwatch_service.settings import Settings
    from rankwatch_service.written_rule import WrittenRule


def configured_settings(**options: Any) -> Settings:
    """The service's settings; an option overrides the environment, which overrides `rankwatch.toml`.

    Args:
        options: options by the name of the setting; None if an option was not given.

    Raises:
        CliError: a setting is unknown or malformed, or others could have written the file.
    """
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from rankwatch_service.settings import Settings

    try:
        return Settings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        wrong = "; ".join(
            ": ".join([*map(str, one["loc"]), one["msg"].removeprefix("Value error, ")]) for one in error.errors()
        )
        raise CliError(Status.USAGE, f"settings: {wrong}") from error
    except PermissionError as error:
        raise CliError(Status.USAGE, f"settings: {error}") from error
    except SettingsError as error:
        raise CliError(Status.USAGE, f"settings: {error}; it must be JSON") from error


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


_UNITS_S: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def seconds(duration: str) -> int:
    """Parse a duration such as 90s, 30m, 2h or 1d, in seconds.

    Raises:
        CliError: the text is not a duration, or its end would be now.
    """
    found = re.fullmatch(r"(\d+)([smhd])", duration)
    if found is None:
        raise CliError(Status.USAGE, f"{duration!r} is not a duration such as 90s, 30m, 2h or 1d")
    if not int(found[1]):
        raise CliError(Status.USAGE, f"{duration!r} would be over at once: give at least 1s")
    return int(found[1]) * _UNITS_S[found[2]]
