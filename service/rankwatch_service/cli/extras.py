"""Optional dependencies, and how to install one that is missing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

EXTRAS: Final[Mapping[str, str]] = {
    "kafka": "kafka",
    "psycopg": "postgres",
    "pyarrow": "replay",
    "torch": "torch",
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
