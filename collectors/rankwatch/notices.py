"""The agent's notices for the person who started the training: a rejected token, a full disk.

Each job has one small file beside its recorders, which exists as long as the trouble lasts. One rank of the host reads
it between steps and prints each notice once, and `rankwatch jobs` prints it on this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from rankwatch import layout
from rankwatch.folders import directories

SUFFIX: Final = ".notice"
TEXT_CHARACTERS_MAX: Final = 600
BYTES_MAX: Final = 8_192
LOOK_EVERY_NS: Final = 2_000_000_000
"""Interval between checks; one check of a missing file takes 3 µs."""
SAID_MAX: Final = 8
"""Different notices that one process prints: trouble whose text keeps changing must not flood the output."""


class Notice(NamedTuple):
    """What is wrong with a job's telemetry on this host."""

    job: str
    text: str
    unix_ns: int


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
        return Notice(str(fields["job"]), str(fields["text"]), int(fields["unix_ns"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    finally:
        os.close(descriptor)


def notices_here(env: Mapping[str, str], uid: int) -> list[Notice]:
    """The notices of all jobs of this user on this machine."""
    found = []
    for directory in directories(env, uid):
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(directory) if name.endswith(SUFFIX))
            found += [read_notice(os.path.join(directory, name)) for name in names]
    return [notice for notice in found if notice is not None]


class NoticeReader:
    """Prints each notice of a job once, in the training output."""

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._said: set[str] = set()

    def look(self) -> None:
        """Print a new notice. Never raises."""
        notice = read_notice(self._path)
        if notice is not None and notice.text not in self._said and len(self._said) < SAID_MAX:
            self._said.add(notice.text)
            self._say(notice.text)
