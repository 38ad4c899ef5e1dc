"""Which file of a folder is followed, and in which format.

Reads a file while it grows: what was appended, also after it was cut, replaced by another, or not there yet.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from rankwatch.follow.hints import Hints
from rankwatch.follow.intake import LogIntake, PassedOver
from rankwatch.follow.reader import LogReader
from rankwatch.follow.record_logs import EventFile
from rankwatch.follow.rows import Entry, Parser
from rankwatch.follow.text_logs import STATE_BYTES_MAX, TextLogs, TrainerState

READ_BYTES: Final = 1 << 20
"""Read at once: a long log is read in parts, so that its rows can be recorded in between."""
HEAD_BYTES: Final = 1024
"""First bytes of a file that are compared before each reading: a file whose begin is another was written anew. Long
enough for the header of a table, by which such files differ, and read in 1 us."""


def opened_regular(path: Path) -> int:
    """A descriptor of a regular file; opening waits for nobody.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is a pipe, a device or something else that is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise ValueError("only regular files are followed, and this is none")


class Tail:
    """One growing file. A file that begins anew is read by a new parser."""

    def __init__(self, path: Path, parser: Callable[[], Parser], passed_over: PassedOver) -> None:
        self.path = path
        self._new_intake: Callable[[], LogIntake] = lambda: LogIntake(parser(), passed_over)
        self._intake = self._new_intake()
        self._descriptor = -1
        self._at = 0
        self._head = b""
        self.behind = False
        """There was more than was read at once."""

    def read(self) -> Iterator[Entry]:
        """The entries that were appended since the last call; at most `READ_BYTES` of them.

        Raises:
            ValueError: the file is not of the parser's format, or no regular file.
            OSError: it cannot be read.
        """
        data = self._appended()
        self.behind = len(data) == READ_BYTES
        if data:
            yield from self._intake.feed(data)
        if not self.behind and self._is_replaced():
            self.close()

    def flush(self) -> Iterator[Entry]:
        """The entries that only a further one would have completed."""
        return self._intake.flush()

    def close(self) -> None:
        """Close the file; the next call of `read` begins with the file that is there then."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _appended(self) -> bytes:
        if self._descriptor >= 0:
            try:
                return self._more()
            except OSError:  # on a network file system another client has replaced it, or the server is away
                self.close()
                return b""
        try:
            self._descriptor = opened_regular(self.path)
        except FileNotFoundError:
            return b""
        self._begin()
        return self._more()

    def _more(self) -> bytes:
        if os.fstat(self._descriptor).st_size < self._at or self._head != self._begins_with(len(self._head)):
            self._begin()
        data = os.pread(self._descriptor, READ_BYTES, self._at)
        self._at += len(data)
        if len(self._head) < HEAD_BYTES:
            self._head = self._begins_with(min(self._at, HEAD_BYTES))
        return data

    def _begins_with(self, size: int) -> bytes:
        return os.pread(self._descriptor, size, 0)

    def _begin(self) -> None:
        self._at, self._head = 0, b""
        self._intake = self._new_intake()

    def _is_replaced(self) -> bool:
        """Whether there is another file at the path; while there is none, the old one may yet grow."""
        if self._descriptor < 0:
            return False
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except OSError:
            return False


class RewrittenFile:
    """A file that is replaced as a whole, and read again when it has changed."""

    def __init__(self, path: Path, parser: Callable[[], Parser], passed_over: PassedOver) -> None:
        self.path = path
        self.behind = False
        self._intake = LogIntake(parser(), passed_over)
        self._seen: tuple[int, int] | None = None

    def read(self) -> Iterator[Entry]:
        """The further entries, if the file has changed.

        Raises:
            ValueError: it is no regular file.
        """
        try:
            found = os.stat(self.path)
            if (found.st_mtime_ns, found.st_ino) == self._seen:
                return
            with open(opened_regular(self.path), "rb") as file:
                data = file.read(STATE_BYTES_MAX + 1)
        except OSError:
            return
        self._seen = found.st_mtime_ns, found.st_ino
        yield from self._intake.feed(data)

    def flush(self) -> Iterator[Entry]:
        """The entries that only a further one would have completed."""
        return self._intake.flush()

    def close(self) -> None:
        """Nothing is open."""


STATE_NAME: Final = "trainer_state.json"
FILES: Final[Mapping[str, str]] = {
    "tensorboard": "**/*tfevents*",
    "trainer_state": f"**/{STATE_NAME}",
    "csv": "**/*.csv",
    "text": "*.log",
}
"""Where its files lie in a folder, by format; the first format that a folder has is followed."""
NAMES: Final = tuple(FILES)
"""What `--format` takes."""


class FollowedLog:
    """The newest file of one format, at a path or in a folder. A newer one takes its place, as of a restarted run."""

    def __init__(self, path: Path, name: str | None, hints: Hints | None = None) -> None:
        """Choose nothing yet; the path need not exist.

        Args:
            path: a file or a folder.
            name: one of `NAMES`; None: as its name shows.
            hints: what a person says of its lines.
        """
        self._path = path
        self._hints = hints or Hints()
        self._name = name
        self._open: Tail | RewrittenFile | None = None
        self.format = ""
        """The format being read; "" before there is a file."""
        self.passed_over = PassedOver()

    def read(self) -> Iterator[Entry]:
        """The further entries.

        Raises:
            ValueError: the file is not of its format, or no regular file.
            OSError: it cannot be read.
        """
        found = self._newest()
        if found is not None and (self._open is None or found[1] != self._open.path):
            if self._open is not None:
                yield from self._open.read()
                yield from self._open.flush()
                self._open.close()
            self.format = found[0]
            self._open = self._opened(*found)
        if self._open is not None:
            yield from self._open.read()

    def flush(self) -> Iterator[Entry]:
        """The entries that only a further one would have completed."""
        return self._open.flush() if self._open is not None else iter(())

    @property
    def path(self) -> Path:
        """The file being read; before there is one, what is waited for."""
        return self._path if self._open is None else self._open.path

    @property
    def behind(self) -> bool:
        """There is more to read now."""
        return self._open is not None and self._open.behind

    def _newest(self) -> tuple[str, Path] | None:
        if not self._path.is_dir():
            return (self._name or _format_of(self._path), self._path) if self._path.exists() else None
        wanted = {self._name: FILES[self._name]} if self._name else FILES
        for name, pattern in wanted.items():
            newest = max(filter(Path.is_file, self._path.glob(pattern)), key=_changed_ns, default=None)
            if newest is not None:
                return name, newest
        return None

    def _opened(self, name: str, path: Path) -> Tail | RewrittenFile:
        if name == "trainer_state":
            return RewrittenFile(
                path, lambda: TrainerState(LogReader(self._hints.wanted, is_table=True)), self.passed_over
            )
        if name == "tensorboard":
            return Tail(path, lambda: EventFile(LogReader(self._hints.wanted, is_table=True)), self.passed_over)
        return Tail(path, TextLogs(self._hints, is_table=name == "csv"), self.passed_over)


def _format_of(path: Path) -> str:
    """The format that a file's name shows."""
    if path.name == STATE_NAME:
        return "trainer_state"
    if "tfevents" in path.name:
        return "tensorboard"
    return {".csv": "csv", ".tsv": "csv"}.get(path.suffix, "text")


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
