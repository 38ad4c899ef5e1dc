"""The optional parts of an installation: what needs one that is missing says how to get it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

EXTRAS: Final[Mapping[str, str]] = {
    "kafka": "kafka",
    "psycopg": "postgres",
    "pyarrow": "replay",
    "tensorboard": "tensorboard",
    "torch": "torch",
}
"""The extra that brings a module."""


def require(module: str) -> None:
    """Fail now rather than in the processes that are about to be started.

    Raises:
        ModuleNotFoundError: as if it had been imported.
    """
    if find_spec(module) is None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def advice(error: ModuleNotFoundError) -> str | None:
    """What to do about a module that is missing; None for one that belongs to no extra."""
    module = (error.name or "").partition(".")[0]
    return f"this needs {module}: pip install 'rankwatch[{EXTRAS[module]}]'" if module in EXTRAS else None
