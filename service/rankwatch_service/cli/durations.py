"""Durations as people type them."""

from __future__ import annotations

import re
from typing import Final

from rankwatch_service.cli.errors import CliError, Status

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
