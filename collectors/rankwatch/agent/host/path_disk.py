"""How long requests to the disk below one folder take: the folder in which a job saves its checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

from rankwatch.agent.host.files import as_number, text_of

_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_NFS: Final = frozenset({"nfs", "nfs4"})
_MOUNT_POINT, _DEVICE = 4, 2
"""Fields of a line of mountinfo."""


class _FileSystem(NamedTuple):
    point: str
    """As the kernel writes it, with white space as octal numbers."""
    device: str
    """Major and minor number."""
    kind: str
    source: str


class _Requests(NamedTuple):
    """Since the file system was mounted, or the host started."""

    disk: str
    done: float
    waited_ms: float


class PathDisk:
    """Reads the mean time of requests to the disk, partition or volume below a folder, or to its NFS server.

    Args:
        root: folder in which the host's /proc is.
        own: folder in which this process's own /proc and /dev are: it sees the folder as this process does.
    """

    def __init__(self, root: Path, own: Path) -> None:
        self._diskstats = root / "proc/diskstats"
        self._own = own
        self._before: _Requests | None = None

    def request_s(self, folder: str) -> float | None:
        """Mean seconds of the requests that ended since the call before.

        Args:
            folder: absolute, without symbolic links.

        Returns:
            None if there were none, the folder has come to lie on another disk, or its file system does not tell.
        """
        now, before = self._requests(folder), self._before
        self._before = now
        if now is None or before is None or now.disk != before.disk:
            return None
        done, waited_ms = now.done - before.done, now.waited_ms - before.waited_ms
        return waited_ms / done / 1e3 if done > 0 and waited_ms >= 0 else None

    def _requests(self, folder: str) -> _Requests | None:
        mount = self._mount_of(folder)
        if mount is None:
            return None
        return self._requests_by_nfs(mount) if mount.kind in _NFS else self._requests_of_disk(mount)

    def _mount_of(self, folder: str) -> _FileSystem | None:
        """The file system that the folder is on: of the longest mount point above it, the newest mount."""
        found: _FileSystem | None = None
        for line in (text_of(self._own / "proc/self/mountinfo") or "").splitlines():
            head, _, tail = line.partition(" - ")
            fields, kind_and_source = head.split(), tail.split()
            if len(fields) <= _MOUNT_POINT or len(kind_and_source) < 2:
                continue
            point = fields[_MOUNT_POINT]
            is_above = Path(folder).is_relative_to(_as_path(point))
            if is_above and (found is None or len(_as_path(point)) >= len(_as_path(found.point))):
                found = _FileSystem(point, fields[_DEVICE], *kind_and_source[:2])
        return found

    def _requests_of_disk(self, mount: _FileSystem) -> _Requests | None:
        # Some file systems, such as btrfs, have a device number of their own: their disk is known by its name alone.
        source = _as_path(mount.source)
        name = (self._own / source[1:]).resolve().name if source.startswith("/dev/") else ""
        for line in (text_of(self._diskstats) or "").splitlines():
            words = line.split()
            if len(words) < 11 or (":".join(words[:2]) != mount.device and words[2] != name):
                continue
            reads, _, _, reading_ms, writes, _, _, writing_ms = (as_number(word) or 0.0 for word in words[3:11])
            return _Requests(words[2], reads + writes, reading_ms + writing_ms)
        return None

    def _requests_by_nfs(self, mount: _FileSystem) -> _Requests | None:
        """Reads and writes, from when they were queued until they were answered."""
        done, waited_ms, is_it = 0.0, 0.0, False
        for line in (text_of(self._own / "proc/self/mountstats") or "").splitlines():
            words = line.split()
            if words[:1] == ["device"]:
                is_it = words[1:5] == [mount.source, "mounted", "on", mount.point]
            elif is_it and words[:1] in (["READ:"], ["WRITE:"]) and len(words) > 8:
                done += as_number(words[1]) or 0.0
                waited_ms += as_number(words[8]) or 0.0
        return _Requests(mount.source, done, waited_ms) if done else None


def _as_path(text: str) -> str:
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), text)
