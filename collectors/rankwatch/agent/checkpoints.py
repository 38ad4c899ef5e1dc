"""Checkpoints of a job's ranks on this host: where they may lie, and whether they are still there.

The checkpoint roots of a job's ranks on this host, and whether a location that the service names is below one.

The roots are those that the ranks declare; if they declare none, the folders of what they saved, as their recorders
say. They lie in a file beside the recorders, since the advice for a relaunch arrives before the next launch has saved
anything. Local paths are compared with all links resolved, in threads, since a file system may not answer.

Notices when checkpoints that the ranks of this host have saved disappear from its file systems, and how full these
are.

Only what this agent has seen itself can disappear: a path that this host never had, as on another host's own disk, says
nothing. A file system that is unmounted or does not answer says nothing either, and URLs are never looked up.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote

from rankwatch import layout, wire
from rankwatch.agent.ranks import LocalRank
from rankwatch.locations import ROOTS_MAX, is_below, roots_with
from rankwatch.reader import Note

ANSWER_WITHIN_S: Final = 2.0
"""Longest wait for a file system. The order's agents wait as well, and a rank holds for 5 s."""
HOLDS_S: Final = 10.0
"""A result is used again for this long: orders come every 50 ms while they are carried out."""
CHECKS_MAX: Final = 16
"""Locations whose file systems have not answered yet, a thread for each; beyond, a location is refused at once."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Check:
    """One location on its way through the file system."""

    begun_s: float
    why_not: str | None = None


class CheckpointRoots:
    """Where one job's checkpoints may lie, as its ranks on this host have declared. Used by one thread."""

    def __init__(self, file: Path, now_s: Callable[[], float]) -> None:
        self.roots: tuple[str, ...] = ()
        self.trouble = ""
        """For people: what a rank saved outside of the roots that it declared."""
        self._file = file
        self._now_s = now_s
        self._declared = False
        self._launch = ""
        self._working_directory = ""
        self._checks: dict[str, _Check] = {}
        self._read()

    def meet(self, rank: LocalRank) -> None:
        """Add the roots that a living rank declares. Those of a new launch replace all earlier ones."""
        reported = tuple(map(str, rank.identity.get("checkpoint_roots", ())))
        if rank.launch != self._launch:
            self._launch, self._declared, self.trouble = rank.launch, bool(reported), ""
            self._change(reported or self.roots, rank)
        elif reported:
            before = self.roots if self._declared else ()
            self._declared = True
            fresh = [root for root in reported if root not in before]
            if fresh:
                self._change((*before, *fresh)[-ROOTS_MAX:], rank)

    def learn(self, rank: LocalRank, note: Note) -> None:
        """Store a rank's note of a save: where it is, and how many ranks save a part of it."""
        if note.kind != "checkpoint_saved":
            return
        shards, location = note.fields.get("shards"), str(note.fields.get("location", ""))
        if isinstance(shards, int) and shards > 0:
            rank.shards = shards
        try:
            if is_below(location, self.roots):
                return
            if not self._declared:
                self._change(roots_with(self.roots, location), rank)
                return
            why = f"it is not below a checkpoint root that the job declares ({', '.join(self.roots)})"
        except ValueError as error:
            why = str(error)
        self.trouble = f"the checkpoint at {location!r} will not be loaded: {why}"

    def why_not(self, location: str) -> str | None:
        """Why nothing may be loaded from a location; "" if it may, None while a file system has not answered."""
        try:
            if not is_below(location, self.roots):
                return f"it is not below a checkpoint root of this host ({', '.join(self.roots) or 'none is known'})"
        except ValueError as error:
            return str(error)
        return self._leads_out(location) if location else ""

    def path_of(self, location: str) -> str | None:
        """The absolute local path of a location; None if it has none, or the ranks' working directory is not known."""
        path = _path(location, self._working_directory) if location else None
        return path if path is not None and os.path.isabs(path) else None

    def _leads_out(self, location: str) -> str | None:
        path = _path(location, self._working_directory)
        if path is None:
            return ""
        if not os.path.isabs(path):
            return "it is a relative path, and the working directory of its ranks is not known"
        check, now_s = self._checks.get(location), self._now_s()
        if check is None or (check.why_not is not None and now_s - check.begun_s > HOLDS_S):
            self._checks = {where: one for where, one in self._checks.items() if one.why_not is None}
            if len(self._checks) >= CHECKS_MAX:
                return "file systems of this host do not answer"
            check = self._checks[location] = _Check(now_s)
            roots = [each for root in self.roots if (each := _path(root, self._working_directory)) is not None]
            threading.Thread(target=_resolve, args=(check, path, roots), daemon=True).start()
        if check.why_not is None and now_s - check.begun_s > ANSWER_WITHIN_S:
            return f"its file system has not answered for {ANSWER_WITHIN_S:g} s"
        return check.why_not

    def _change(self, roots: tuple[str, ...], rank: LocalRank) -> None:
        self.roots = roots
        self._checks.clear()
        try:
            self._working_directory = os.readlink(f"/proc/{rank.header.pid}/cwd")
        except OSError:
            _log.debug("the working directory of rank %d cannot be read", rank.rank)
        fresh = self._file.with_suffix(".new")
        kept = {"roots": roots, "declared": self._declared, "working_directory": self._working_directory}
        try:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
                json.dump({**kept, "launch": self._launch}, file)
            os.replace(fresh, self._file)
        except OSError as error:
            _log.warning("the checkpoint roots were not kept: %s", error)

    def _read(self) -> None:
        try:
            kept = json.loads(self._file.read_text())
            self.roots = tuple(map(str, kept["roots"]))
            self._declared, self._launch = bool(kept["declared"]), str(kept["launch"])
            self._working_directory = str(kept["working_directory"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("the checkpoint roots of earlier launches cannot be read: %r", error)


def roots_file(directory: Path, job: str) -> Path:
    """The file in which a job's checkpoint roots on this host lie."""
    return directory / f"{layout.file_stem(job)}.roots"


def _path(location: str, working_directory: str) -> str | None:
    """The local path of a location or root; None if it is a URL of something else."""
    scheme, found, rest = location.partition("://")
    if not found or "/" in scheme:
        return os.path.join(working_directory, location)
    if scheme.lower() != "file":
        return None
    return "/" + unquote(rest.partition("/")[2])


def _resolve(check: _Check, path: str, roots: list[str]) -> None:
    real = os.path.realpath(path)
    for root in map(os.path.realpath, filter(os.path.isabs, roots)):
        if root != "/" and os.path.commonpath((real, root)) == root:
            check.why_not = ""
            return
    check.why_not = f"it is at {real}, outside of the checkpoint roots of this host"


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

    def differs_from(self, reported: CheckpointDisk | None) -> bool:
        """Whether it is worth another report."""
        if reported is None or os.path.dirname(reported.path) != os.path.dirname(self.path):
            return True
        fits, fitted = (one.free_bytes >= one.save_bytes for one in (self, reported))
        return fits != fitted or abs(self.free_bytes - reported.free_bytes) >= FREE_STEP * self.total_bytes


@dataclass(slots=True)
class _Watched:
    """A checkpoint, as the looking thread found it."""

    path: str
    device: int | None = None
    """The device of its folder, once it was seen."""
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
        self._reported: CheckpointDisk | None = None
        self.place: tuple[str, int] | None = None
        """The folder of the newest save, or of a newer one that has failed, without symbolic links, and the free bytes
        of its file system; None: not known."""
        self._next_s = 0.0

    def learn(self, note: Note) -> None:
        """Watch what a rank notes that it has saved; where a save has failed, look at its file system at once."""
        if note.kind == "checkpoint_failed" and note.fields.get("what") == "save":
            self._failed = self._path_of(str(note.fields.get("location", ""))) or self._failed
            self._disk = self._reported = None
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
        if self._looking.is_set() or disk is None or not disk.differs_from(self._reported):
            return []
        self._reported = disk
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

    None if there is no path, or the file system does not report it.
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
