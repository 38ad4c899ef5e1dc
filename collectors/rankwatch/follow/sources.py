"""Which file of a folder is followed, and in which format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from rankwatch.follow.record_logs import EventFile
from rankwatch.follow.rows import Entry, Parser
from rankwatch.follow.tables import CsvTables, TrainerState
from rankwatch.follow.tail import RewrittenFile, Tail
from rankwatch.follow.text_logs import FORMATS, TextLog

STATE_NAME: Final = "trainer_state.json"
FILES: Final[Mapping[str, str]] = {
    "tensorboard": "**/*tfevents*",
    "trainer_state": f"**/{STATE_NAME}",
    "csv": "**/*.csv",
    "text": "*.log",
}
"""By format, where its files lie in a folder; the first format that a folder has is followed."""
NAMES: Final = (*FORMATS, "tensorboard", "trainer_state", "csv")
"""What `--format` takes."""


class FollowedLog:
    """The newest file of one format, at a path or in a folder. A newer one takes its place, as of a restarted run."""

    def __init__(self, path: Path, name: str | None) -> None:
        """Choose nothing yet; the path need not exist.

        Args:
            path: a file or a folder.
            name: one of `NAMES`; None: as its name or its content shows.
        """
        self._path = path
        self._name = name
        self._open: Tail | RewrittenFile | None = None
        self.format = ""
        """The format being read; "" before there is a file."""

    def read(self) -> Iterator[Entry]:
        """The further entries.

        Raises:
            ValueError: the file is not of its format.
        """
        found = self._newest()
        if found is not None and (self._open is None or found[1] != self._open.path):
            if self._open is not None:
                yield from self._open.read()
                yield from self._open.flush()
                self._open.close()
            self.format = found[0]
            self._open = _opened(*found)
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
        wanted = {self._name: FILES.get(self._name, FILES["text"])} if self._name else FILES
        for name, pattern in wanted.items():
            newest = max(self._path.glob(pattern), key=_changed_ns, default=None)
            if newest is not None:
                return name, newest
        return None


def _opened(name: str, path: Path) -> Tail | RewrittenFile:
    if name == "trainer_state":
        return RewrittenFile(path, TrainerState)
    parsers: Mapping[str, Callable[[], Parser]] = {"tensorboard": EventFile, "csv": CsvTables()}
    return Tail(path, parsers.get(name) or (lambda: TextLog(None if name == "text" else name)))


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
