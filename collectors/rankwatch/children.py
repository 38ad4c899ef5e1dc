"""The command of child processes that run this product's code. Standard library only."""

from __future__ import annotations

import sys


def python_module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter.

    It does not search the working directory: whoever can write there could have code of theirs run as this user.
    """
    return [sys.executable, "-P", "-m", name, *arguments]
