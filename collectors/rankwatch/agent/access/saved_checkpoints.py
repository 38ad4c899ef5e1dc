"""Notices when checkpoints that the ranks of this host have saved disappear from its file systems, and how full these
are.

Only what this agent has seen itself can disappear: a path that this host never had, as on another host's own disk, says
nothing. A file system that is unmounted or does not answer says nothing either, and URLs are never looked up.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from rankwatch import wire
from rankwatch.reader import Note

LOOK_EVERY_S: Final = 5.0
"""How often the paths are looked up, by a thread: one `stat` for each."""
WATCHED_MAX: Final = 64
"""Newest saves that are watched, beside the one that is advised for a relaunch."""
FREE_STEP: Final = 0.01
"""Changes of the free space that are reported, as a share of the file system."""
PARTS_MAX: Final = 4096
"""Files that are added up to the size of a save; of one with more the size is not known."""
MISSED_MIN: Final = 2
"""Looks in a row that must miss a checkpoint: a script may replace one by deleting it first."""


class MissingCheckpoint(NamedTuple):
    """A checkpoint that was on this host's file systems and is there no more."""

    checkpoint: str
    reason: str


class CheckpointDisk(NamedTuple):
    """The file system of the newest save, or of a newer one that has failed."""

    path: str
    free_bytes: int
    """For users without privileges."""
    total_bytes: int
    save_bytes: int
    """Size of the newest save; 0: not known."""

    def differs_from(self, told: CheckpointDisk | None) -> bool:
        """Whether it is worth another report."""
        if told is None or os.path.dirname(told.path) != os.path.dirname(self.path):
            return True
        fits, fitted = (one.free_bytes >= one.save_bytes for one in (self, told))
        return fits != fitted or abs(self.free_bytes - told.free_bytes) >= FREE_STEP * self.total_bytes


@dataclass(slots=True)
class _Watched:
    """A checkpoint, as the looking thread found it."""

    path: str
    device: int | None = None
    """Of the folder that it is in, once it was seen."""
    missed: int = 0
    size: int | None = None
    """Bytes, once they were added up; 0: too many files."""


class SavedCheckpoints:
    """The newest saves of one job's ranks on this host. Used by one thread, which it never lets wait."""

    def __init__(
        self,
        path_of: Callable[[str], str | None],
        now_s: Callable[[], float],
        begin: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Args:
        path_of: the local path of a location; None if it has none.
        now_s: the monotonic clock.
        begin: runs a look beside the caller; default: in a thread of its own.
        """
        self._path_of = path_of
        self._now_s = now_s
        self._begin = begin or _in_thread
        self._saved: OrderedDict[str, _Watched] = OrderedDict()
        self._advised: dict[str, _Watched] = {}
        self._failed = ""
        """The path of a save that has failed since the newest one."""
        self._looking = threading.Event()
        self._disk: CheckpointDisk | None = None
        self._told: CheckpointDisk | None = None
        self.place: tuple[str, int] | None = None
        """The folder of the newest save, or of a newer one that has failed, without symbolic links, and the free bytes
        of its file system; None: not known."""
        self._next_s = 0.0

    def learn(self, note: Note) -> None:
        """Watch what a rank notes that it has saved; where a save has failed, look at its file system at once."""
        if note.kind == "checkpoint_failed" and note.fields.get("what") == "save":
            self._failed = self._path_of(str(note.fields.get("location", ""))) or self._failed
            self._disk = self._told = None
            self._next_s = self._now_s()
            return
        checkpoint = str(note.fields.get("checkpoint", ""))
        if note.kind != "checkpoint_saved" or not checkpoint or checkpoint in self._saved:
            return
        if path := self._path_of(str(note.fields.get("location", ""))):
            self._saved[checkpoint], self._failed = _Watched(path), ""
            if len(self._saved) > WATCHED_MAX:
                self._saved.popitem(last=False)

    def advise(self, advice: wire.ResumeAdvice | None) -> None:
        """Watch what is advised for a relaunch, which an earlier launch may have saved."""
        if advice is None or advice.checkpoint in self._advised or advice.checkpoint in self._saved:
            return
        path = self._path_of(advice.location)
        self._advised = {advice.checkpoint: _Watched(path)} if path else {}

    def missing(self) -> list[MissingCheckpoint]:
        """The checkpoints found missing since the last call, each once. Begins the next look when it is due."""
        if self._looking.is_set():
            return []
        found = [*_taken_from(self._saved), *_taken_from(self._advised)]
        watching = [*self._advised.values(), *self._saved.values()]
        if (watching or self._failed) and self._now_s() >= self._next_s:
            self._next_s = self._now_s() + LOOK_EVERY_S
            self._looking.set()
            failed = self._failed
            self._begin(lambda: self._look(watching, failed))
        return found

    def disks(self) -> list[CheckpointDisk]:
        """The file system of the newest save, if it has changed since it was returned, or if a save has failed."""
        disk = self._disk
        if self._looking.is_set() or disk is None or not disk.differs_from(self._told):
            return []
        self._told = disk
        return [disk]

    def _look(self, watching: list[_Watched], failed: str) -> None:
        try:
            for one in watching:
                _look_at(one)
            found = _disk_of(watching[-1] if watching else None, failed)
            if found is not None:
                self._disk, self.place = found, (os.path.realpath(_folder_above(found.path)), found.free_bytes)
        finally:
            self._looking.clear()


def _taken_from(watched: dict[str, _Watched]) -> list[MissingCheckpoint]:
    names = [name for name, one in watched.items() if one.missed >= MISSED_MIN]
    return [MissingCheckpoint(name, f"it is not at {watched.pop(name).path} any more") for name in names]


def _look_at(one: _Watched) -> None:
    try:
        os.stat(one.path)
        one.device, one.missed = os.stat(os.path.dirname(one.path)).st_dev, 0
    except (FileNotFoundError, NotADirectoryError):
        # Where its file system is not mounted, the nearest folder is on another one.
        if one.device is not None and _device_above(one.path) == one.device:
            one.missed += 1
    except OSError:
        return


def _disk_of(newest: _Watched | None, failed: str) -> CheckpointDisk | None:
    """The file system of a save that has failed, else of the newest one, which shows how much a save takes.

    None if there is no path, or the file system does not say.
    """
    known = newest if newest is not None and newest.device is not None else None
    path = failed or (known.path if known is not None else "")
    if not path:
        return None
    try:
        if known is not None and known.size is None:
            known.size = _size_of(known.path)
        found = os.statvfs(_folder_above(path))
        free, total = (blocks * found.f_frsize for blocks in (found.f_bavail, found.f_blocks))
        return CheckpointDisk(path, free, total, known.size or 0 if known is not None else 0)
    except OSError:
        return None


def _size_of(path: str) -> int:
    """Bytes of a file, or of all files in a folder; 0 if there are too many."""
    if not os.path.isdir(path):
        return os.stat(path).st_size
    size, parts = 0, 0
    for folder, _, names in os.walk(path):
        parts += len(names)
        if parts > PARTS_MAX:
            return 0
        size += sum(os.lstat(os.path.join(folder, name)).st_size for name in names)
    return size


def _folder_above(path: str) -> str:
    """The nearest folder above that exists."""
    while not os.path.isdir(path := os.path.dirname(os.path.abspath(path))):
        pass
    return path


def _device_above(path: str) -> int | None:
    """The device of the nearest folder above that exists; None if it cannot be read."""
    while (above := os.path.dirname(path)) != path:
        path = above
        try:
            return os.stat(path).st_dev
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
    return None


def _in_thread(look: Callable[[], None]) -> None:
    threading.Thread(target=look, daemon=True).start()
