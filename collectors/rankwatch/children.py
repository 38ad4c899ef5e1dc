"""How child processes that run this product's code are started. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess


def python_module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter.

    It does not search the working directory: whoever can write there could have code of theirs run as this user.
    """
    return [sys.executable, "-P", "-m", name, *arguments]


def start(command: Sequence[str], *, cwd: str | None = "/", **options: Any) -> subprocess.Popen[Any]:
    """Start a child.

    Args:
        command: program and arguments.
        cwd: its working directory; None: this one, for a child that is given relative paths.
        options: further ones of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    import subprocess  # noqa: PLC0415 - a sixth of rankwatch's import time, and only one rank of a host needs it

    return subprocess.Popen(command, cwd=cwd, **options)
