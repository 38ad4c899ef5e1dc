"""The agent's bounded buffer on disk while the service does not answer.

Messages are kept in segment files, oldest first, each framed with its length and checksum. A kill during a write leaves
a torn last frame, which is skipped: its records were not settled and are read from the ring again. Messages of the
oldest segment may be sent twice after a kill; their numbers make that harmless. There is no fsync: the spool survives
the death of every process, and a host that crashes loses its ranks' unread recorders too.

At the size limit, step and values records of the oldest segments are dropped first; events, progress and the ranks'
identities last. Every drop is counted in `losses`.
"""

from __future__ import annotations

import errno
import os
import struct
from collections import deque
from pathlib import Path
from typing import Final
from zlib import crc32

from rankwatch.agent.parcel import Losses, all_records, without_records

SPOOL_BYTES_MAX: Final = 64 * 1024 * 1024
"""8 ranks x 10 steps/s x 80 bytes = 6.4 KB/s: nearly three hours; 64 ranks: 21 min of all records, days of events."""
SEGMENT_BYTES: Final = 256 * 1024
"""Bounds what is sent twice after a kill, and what is held in memory while it is sent."""

_FRAME: Final = struct.Struct("<II")
_FULL: Final = ".seg"
_STRIPPED: Final = ".rest"
"""Suffix of a segment whose records were dropped."""


class Spool:
    """A first-in, first-out queue of encoded batches in a folder. Used by one thread."""

    def __init__(self, folder: Path, bytes_max: int = SPOOL_BYTES_MAX) -> None:
        """Open the spool in this folder and find what an earlier agent left there.

        Raises:
            OSError: the folder cannot be created or read.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._bytes_max = bytes_max
        self._segments: deque[tuple[Path, int]] = deque()
        """Oldest first, with sizes; the segment whose messages are in `_head` is not included."""
        self._head: deque[bytes] = deque()
        self._head_path: Path | None = None
        self._writing: Path | None = None
        self._next = 0
        self.losses = Losses()
        for path in sorted(folder.iterdir()):
            if path.suffix in (_FULL, _STRIPPED) and path.stem.isdecimal():
                self._segments.append((path, path.stat().st_size))
                self._next = int(path.stem) + 1
        self.bytes = sum(size for _, size in self._segments)

    def __bool__(self) -> bool:
        return bool(self._segments or self._head)

    def append(self, body: bytes) -> None:
        """Append one message; at the size limit the oldest records are dropped.

        Raises:
            OSError: it could not be written (disk full, folder gone). The spool is as before.
        """
        frame = _FRAME.pack(len(body), crc32(body)) + body
        path = self._segment_for(len(frame))
        before = self._segments[-1][1] if self._segments and self._segments[-1][0] == path else 0
        with path.open("ab", buffering=0) as file:
            try:
                written = file.write(frame)
            except OSError:
                written = 0
            if written != len(frame):
                os.ftruncate(file.fileno(), before)
                if not before:
                    path.unlink()
                    self._writing = None
                raise OSError(errno.ENOSPC, "the spool's disk is full", str(path))
        if before:
            self._segments[-1] = (path, before + len(frame))
        else:
            self._segments.append((path, len(frame)))
        self.bytes += len(frame)
        self._make_room()

    def peek(self) -> list[bytes]:
        """The oldest messages, at most one segment; empty if the spool is."""
        while not self._head:
            self._drop_head_file()
            if not self._segments:
                return []
            path, size = self._segments.popleft()
            self.bytes -= size
            if path == self._writing:
                self._writing = None
            self._head_path = path
            self._head.extend(self._read(path))
        return list(self._head)

    def pop(self) -> None:
        """Remove the oldest message, which was accepted or refused."""
        self._head.popleft()
        if not self._head:
            self._drop_head_file()

    def close(self) -> None:
        """Remove the folder and its parent if they are empty."""
        try:
            self._folder.rmdir()
            self._folder.parent.rmdir()
        except OSError:
            return  # not empty

    def _segment_for(self, size: int) -> Path:
        if self._writing is not None and self._segments and self._segments[-1][1] + size <= SEGMENT_BYTES:
            return self._writing
        self._writing = self._folder / f"{self._next:08d}{_FULL}"
        self._next += 1
        return self._writing

    def _read(self, path: Path) -> list[bytes]:
        try:
            content = path.read_bytes()
        except OSError:
            self.losses["", "", "spool_unreadable"] += 1
            return []
        bodies, at = [], 0
        while at + _FRAME.size <= len(content):
            length, checksum = _FRAME.unpack_from(content, at)
            body = content[at + _FRAME.size : at + _FRAME.size + length]
            if len(body) != length:
                break  # cut off by a kill before it was settled, so its records are read from the ring again
            if crc32(body) != checksum:
                self.losses["", "", "spool_torn"] += 1
                break
            bodies.append(body)
            at += _FRAME.size + length
        return bodies

    def _make_room(self) -> None:
        """Bring the spool under its limit: strip the oldest full segments, then drop the oldest ones whole."""
        index = 0
        while self.bytes > self._bytes_max and index < len(self._segments) - 1:
            path, size = self._segments[index]
            if path.suffix == _FULL:
                self._strip(index, path, size)
            index += 1
        while self.bytes > self._bytes_max and len(self._segments) > 1:
            path, size = self._segments.popleft()
            for body in self._read(path):
                self.losses += all_records(body, "spool")
            path.unlink(missing_ok=True)
            self.bytes -= size

    def _strip(self, index: int, path: Path, size: int) -> None:
        kept = bytearray()
        for body in self._read(path):
            rest, losses = without_records(body)
            self.losses += losses
            if rest is not None:
                kept += _FRAME.pack(len(rest), crc32(rest)) + rest
        # In place, because a full disk has no room for both. A kill in between loses a few old events besides the
        # records that are dropped here.
        rest_path = path.with_suffix(_STRIPPED)
        with path.open("r+b") as file:
            file.write(kept)
            file.truncate()
        path.rename(rest_path)
        self._segments[index] = (rest_path, len(kept))
        self.bytes += len(kept) - size

    def _drop_head_file(self) -> None:
        if self._head_path is not None:
            self._head_path.unlink(missing_ok=True)
            self._head_path = None
