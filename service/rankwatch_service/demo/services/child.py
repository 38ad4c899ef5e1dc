"""Child processes that are servers: waits until they answer, and ends them at the latest with this process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rankwatch_service.supervise import die_with_parent

LOOK_S: Final = 0.05
LOG_CHARS_MAX: Final = 2_000
"""Length of the end of a child's log that an error contains."""


class ChildError(Exception):
    """A child ended or did not answer in time; the message is the end of its log."""


def started(
    command: Sequence[str], log: Path, answers: Callable[[], bool], within_s: float, **how: Any
) -> subprocess.Popen[bytes]:
    """Start a child that the kernel ends with this process; returns when it answers.

    Args:
        command: program and arguments.
        log: file to which its output is appended.
        answers: returns whether the child answers requests.
        within_s: how long the child may take to answer, in seconds; after that it is killed.
        how: further arguments of `subprocess.Popen`: user, environment, folder.

    Raises:
        ChildError: the child ended, or does not answer.
    """
    with log.open("ab") as said:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            # Ctrl-C reaches only the parent, which then ends everything in order.
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - nothing but two system calls
            **how,
        )
    deadline_s = time.monotonic() + within_s
    while not answers():
        if child.poll() is not None or time.monotonic() > deadline_s:
            child.kill()
            child.wait()
            raise ChildError(log.read_text(errors="replace")[-LOG_CHARS_MAX:].strip())
        time.sleep(LOOK_S)
    return child


def end(child: subprocess.Popen[bytes], within_s: float, number: int = signal.SIGTERM) -> None:
    """End a child with a signal, and after `within_s` with SIGKILL."""
    child.send_signal(number)
    try:
        child.wait(within_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def free_port() -> int:
    """A free port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
