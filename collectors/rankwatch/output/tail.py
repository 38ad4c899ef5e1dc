"""Keeps the last 64 KiB that a process writes to its `sys.stdout` and `sys.stderr`. Standard library only.

The streams stay what they are, with their terminal, colours and buffers: only their `write` also copies the text into a
mapped file beside the ring, which outlives the process. Lines that C and C++ libraries write past Python are in no such
file; where the output goes to a file, the agent finds them there. Nothing here blocks, raises, or takes a lock.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import TextIOWrapper
from typing import Any, Final, NamedTuple

TAIL_BYTES: Final = 64 * 1024
"""Of each rank; older text is overwritten."""
STAMP_EVERY_S: Final = 0.1
"""Text that is written within this time of other text has the time of that."""
BEGUN_CHARACTERS_MAX: Final = 4_096
"""Of a line without its end that is not copied yet; such a line of a process that is killed is lost."""
LINE_ENDS: Final = ("\n", "\r")

_HEADER: Final = struct.Struct("<8sQ")
"""Magic, and how many bytes were ever written."""
_MAGIC: Final = b"RNKWTAIL"
_STAMP: Final = re.compile(rb"\x1e([0-9a-f]{16})\x1f")


class PrintedLine(NamedTuple):
    """One line that a rank has printed."""

    unix_ns: int
    """When it was begun; 0: not known."""
    text: str


class OutputTail:
    """The file in which this process keeps the end of its output."""

    def __init__(self, path: str) -> None:
        """Create the file.

        Raises:
            OSError: it cannot be created.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # All of it now: a file system that is full when a page is written would kill the process.
            os.posix_fallocate(descriptor, 0, _HEADER.size + TAIL_BYTES)
            self._file = mmap.mmap(descriptor, _HEADER.size + TAIL_BYTES)
        finally:
            os.close(descriptor)
        self._file[: _HEADER.size] = _HEADER.pack(_MAGIC, 0)
        self._written = memoryview(self._file)[8 : _HEADER.size].cast("Q")
        self._stamped_s = 0.0
        self._begun = ""

    def keep(self, text: str) -> None:
        """Copy text to the end, once its line is whole: `print` writes each of its parts by itself."""
        if text[-1:] not in LINE_ENDS and len(self._begun) < BEGUN_CHARACTERS_MAX:
            self._begun += text
            return
        text, self._begun = self._begun + text, ""
        content = text.encode("utf-8", "replace")[-TAIL_BYTES // 2 :]
        now_s = time.monotonic()
        if now_s - self._stamped_s >= STAMP_EVERY_S:
            self._stamped_s = now_s
            content = b"\x1e%016x\x1f" % time.time_ns() + content
        at = self._written[0] % TAIL_BYTES
        self._written[0] += len(content)
        room = TAIL_BYTES - at
        start = _HEADER.size + at
        self._file[start : start + min(len(content), room)] = content[:room]
        if len(content) > room:
            self._file[_HEADER.size : _HEADER.size + len(content) - room] = content[room:]


_tail: OutputTail | None = None
"""The tail of this process's rank; forked processes write to it too."""


def keep_output(path: str) -> None:
    """Keep what is written from now on in this file, instead of in an earlier one.

    Raises:
        OSError: it cannot be created.
    """
    global _tail  # noqa: PLW0603 - there is one process with one pair of streams
    hooked = _tail is not None
    _tail = OutputTail(path)
    if not hooked:
        # A script that has put a stream of its own in place of one writes to the first one in the end.
        for stream in dict.fromkeys((sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
            if type(stream) is TextIOWrapper:  # others, as of notebooks and tests, keep to their own rules
                stream.write = _copying(stream.write)  # type: ignore[method-assign]


def _copying(write: Callable[[str], int]) -> Callable[[str], int]:
    def copy_and_write(text: str, /) -> int:
        if _tail is not None:
            with suppress(Exception):  # whatever it is, the program's own output goes on
                _tail.keep(text)
        return write(text)

    return copy_and_write


def kept_lines(path: str | os.PathLike[str]) -> list[PrintedLine]:
    """The lines in such a file, oldest first; none if there is no such file, or it is of something else."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError:
        return []
    if len(content) != _HEADER.size + TAIL_BYTES:
        return []
    magic, written = _HEADER.unpack_from(content)
    if magic != _MAGIC:
        return []
    at, text = written % TAIL_BYTES, content[_HEADER.size :]
    whole = text[:at] if written <= TAIL_BYTES else text[at:] + text[:at]
    lines = list(_stamped(whole))
    return lines[1:] if written > TAIL_BYTES else lines  # the first one may have lost its beginning


def _stamped(content: bytes) -> Iterator[PrintedLine]:
    unix_ns, begun_ns, text = 0, 0, b""
    for number, part in enumerate(_STAMP.split(content)):
        if number % 2:
            unix_ns = int(part, 16)
            continue
        for piece in part.splitlines(keepends=True):
            begun_ns = begun_ns if text else unix_ns
            text += piece
            if piece.endswith((b"\n", b"\r")):
                yield PrintedLine(begun_ns, text.decode("utf-8", "replace").rstrip("\r\n"))
                text = b""
    if text:
        yield PrintedLine(begun_ns, text.decode("utf-8", "replace"))


def lines_of_file(descriptor: int) -> list[PrintedLine]:
    """The last lines of a regular file that a program writes; when each was written is not known."""
    size = os.fstat(descriptor).st_size
    first = max(size - TAIL_BYTES, 0)
    content: Any = os.pread(descriptor, TAIL_BYTES, first)
    lines = [PrintedLine(0, line) for line in content.decode("utf-8", "replace").splitlines()]
    return lines[1:] if first else lines
