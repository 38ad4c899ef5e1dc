"""Starts every child process of this product. Standard library only.

Children start in `/`, so that whoever can write to the folder in which somebody starts training or the service has no
code run there: `.` and relative entries of PATH, PYTHONPATH and LD_LIBRARY_PATH lead nowhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import subprocess

    Child = subprocess.Popen[bytes]

_PATHS: Final = {
    "RANKWATCH_CA_FILE", "RANKWATCH_DIR", "RANKWATCH_HOST_ROOT", "RANKWATCH_INGEST_CONFIG", "RANKWATCH_SPOOL",
    "RANKWATCH_KAFKA_SSL_CAFILE", "RANKWATCH_KAFKA_SSL_CERTFILE", "RANKWATCH_KAFKA_SSL_KEYFILE",
    "SSL_CERT_FILE",
}  # fmt: skip
"""Variables that name a file or folder: for a child they are absolute. Those of `Settings` are so by themselves."""


def python_module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter, which does not search the working directory."""
    return [sys.executable, "-P", "-m", name, *arguments]


def start(command: Sequence[str], env: Mapping[str, str] | None = None, **how: Any) -> Child:
    """Start a child.

    Args:
        command: absolute path of a program, and its arguments, in which paths are absolute too.
        env: its environment; None: that of this process.
        how: further arguments of `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    import subprocess  # noqa: PLC0415 - a sixth of rankwatch's import time, and only one rank of a host needs it

    return subprocess.Popen(command, env=_environment(command, env), cwd="/", **how)


def run(
    command: Sequence[str], env: Mapping[str, str] | None = None, *, check: bool, **how: Any
) -> subprocess.CompletedProcess[Any]:
    """Start a child and wait for its end; see `start` and `subprocess.run`.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be started, fails, or takes too long.
    """
    import subprocess  # noqa: PLC0415

    return subprocess.run(command, check=check, env=_environment(command, env), cwd="/", **how)


def _environment(command: Sequence[str], env: Mapping[str, str] | None) -> dict[str, str]:
    assert os.path.isabs(command[0]), f"{command[0]} is searched for"
    variables = os.environ if env is None else env
    return {name: absolute(value) if value and name in _PATHS else value for name, value in variables.items()}


def absolute(path: str) -> str:
    """The path, from `/`. Unlike `os.path.abspath` it leads where the path does, also if `..` follows a link."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


def program(name: str) -> str | None:
    """The path of a program in PATH, of which relative entries do not count; None if there is none."""
    import shutil  # noqa: PLC0415 - as above

    return shutil.which(name, path=os.pathsep.join(filter(os.path.isabs, os.get_exec_path())))
