"""The service's settings, as commands use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rankwatch_service.cli.errors import CliError, Status

if TYPE_CHECKING:
    from rankwatch_service.settings import Settings


def configured_settings(**options: Any) -> Settings:
    """The service's settings; an option overrides the environment, which overrides `rankwatch.toml`.

    Args:
        options: options by the name of the setting; None if an option was not given.

    Raises:
        CliError: a setting is unknown or malformed.
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
    except SettingsError as error:
        raise CliError(Status.USAGE, f"settings: {error}; it must be JSON") from error
