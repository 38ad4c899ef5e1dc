"""Lines in the training output for the person who started it: few, at the start, and the agent's notices.

A notice is a problem of the agent: a rejected token, a full disk. Each job has one small file beside its recorders,
which exists as long as the trouble lasts, also after the agent has ended. One rank of the host reads it between steps
and prints each notice of its own launch once, and when telemetry flows again; `rankwatch jobs` prints it on this
machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from rankwatch import layout
from rankwatch.folders import directories, others_reach
from rankwatch.terminal import printable

SUFFIX: Final = ".notice"
TEXT_CHARACTERS_MAX: Final = 600
BYTES_MAX: Final = 8_192
LOOK_EVERY_NS: Final = 2_000_000_000
"""Interval between checks; one check of a missing file takes 3 µs."""
SAID_MAX: Final = 8
"""Notices that one process prints: trouble that comes and goes, or whose text keeps changing, must not flood the
output."""
FLOWS_AGAIN: Final = "telemetry reaches the service again, and what was kept on this host is sent"


def say(line: str) -> None:
    """Write one line to stderr, independent of logging. Never raises, even if the job has closed stderr."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"rankwatch: {printable(line)}\n")
        sys.stderr.flush()


class Notice(NamedTuple):
    """What is wrong with a job's telemetry on this host."""

    job: str
    text: str
    unix_ns: int
    """When it was written. An agent writes it again for each rank that it finds."""
    held: bool = False
    """Whether telemetry stays on this host for now."""


def notice_path(directory: str, job: str) -> str:
    """The file in which a job's agent keeps its notice."""
    return os.path.join(directory, layout.file_stem(job) + SUFFIX)


def write_notice(path: str, notice: Notice) -> None:
    """Replace the notice; one without a text removes it.

    Raises:
        OSError: the file cannot be written or removed.
    """
    if not notice.text:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    printable = "".join(sign if sign.isprintable() else " " for sign in notice.text[:TEXT_CHARACTERS_MAX])
    fresh = f"{path}.new"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
        json.dump(notice._replace(text=printable)._asdict(), file)
    os.replace(fresh, path)


def read_notice(path: str) -> Notice | None:
    """The notice; None if there is none, or it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fields: dict[str, Any] = json.loads(os.read(descriptor, BYTES_MAX))
        return Notice(str(fields["job"]), str(fields["text"]), int(fields["unix_ns"]), fields.get("held") is True)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        os.close(descriptor)


def notices_here(env: Mapping[str, str], uid: int) -> list[Notice]:
    """The notices of all jobs of this user on this machine."""
    found = []
    for directory in directories(env, uid):
        with contextlib.suppress(OSError):
            if others_reach(directory, uid):
                continue
            names = sorted(name for name in os.listdir(directory) if name.endswith(SUFFIX))
            found += [read_notice(os.path.join(directory, name)) for name in names]
    return [notice for notice in found if notice is not None]


class NoticeReader:
    """Prints each notice of a job once, in the training output, and when telemetry flows again after it."""

    def __init__(self, path: str, since_unix_ns: int, say: Callable[[str], None]) -> None:
        """Read nothing yet.

        Args:
            path: of the notice.
            since_unix_ns: when this process began to record; an older notice is of an earlier launch.
            say: prints one line.
        """
        self._path = path
        self._since_unix_ns = since_unix_ns
        self._say = say
        self._said: set[str] = set()
        self._left = SAID_MAX
        self._held = False

    def look(self) -> None:
        """Print what is new. Never raises."""
        notice = read_notice(self._path)
        if notice is not None and notice.unix_ns < self._since_unix_ns:
            return
        if self._held and not (notice and notice.held):
            self._held = False
            self._said.clear()  # the same trouble is told again if it comes back
            self._say(FLOWS_AGAIN)
        if notice is not None and notice.text not in self._said and self._left:
            self._said.add(notice.text)
            self._left -= 1
            self._held = notice.held
            self._say(notice.text)
