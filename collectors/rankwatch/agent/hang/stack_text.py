"""Reads what faulthandler writes: where a rank stands, so that ranks at the same place are known by it. Pure.

Addresses differ between processes. So do the threads of loggers and loaders, which Python's `threading` has started:
they run on one rank only, or stand elsewhere by chance. The thread that trains counts, and those in which the autograd
engine runs Python code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

DIGEST_CHARS: Final = 16
"""64 bits: two of the 131,072 places of the largest job are equal by chance once in 2 x 10^9 hangs."""
PLACE_CHARS_MAX: Final = 240
"""Longest text of a place; functions with longer names are cut."""

_THREAD: Final = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)\b.*$", re.MULTILINE)
_FRAME: Final = re.compile(r'^  File "(.*)", line (\S+) in (.*)$', re.MULTILINE)
_INSTALLED: Final = ("/lib/python3", "/site-packages/", "/dist-packages/", "<frozen ")


@dataclass(frozen=True, slots=True)
class StackFrame:
    """One call of a stack."""

    file: str
    line: str
    function: str

    @property
    def is_own(self) -> bool:
        """Whether it is code of the job, and not of Python or of an installed package."""
        return not any(part in self.file for part in _INSTALLED)

    def __str__(self) -> str:
        return f"{self.function} ({self.file.rpartition('/')[2]}:{self.line})"


@dataclass(frozen=True, slots=True)
class StackPlace:
    """Where a rank stands."""

    digest: str
    """Equal for equal frames: file, line and function of each."""
    text: str
    """The innermost frame of the thread that trains, and that of the job's own code if it is another one."""


def place_of(stack: str, thread: int) -> StackPlace | None:
    """Where a rank stands; None if the text has no frames.

    Args:
        stack: stacks of all threads as faulthandler writes them, innermost frame first.
        thread: `threading.get_ident()` of the thread that trains. If the text lacks it, the last one counts, which is
            the oldest: the main thread.
    """
    heads = list(_THREAD.finditer(stack))
    ends = [*(head.start() for head in heads), len(stack)][1:]
    threads = {
        int(head[1], 16): tuple(StackFrame(*found) for found in _FRAME.findall(stack, head.end(), end))
        for head, end in zip(heads, ends, strict=True)
    }
    if not threads or not any(threads.values()):
        return None
    training = threads.pop(thread) if thread in threads else threads.popitem()[1]
    engine = sorted(map(repr, (frames for frames in threads.values() if frames and not _is_servant(frames))))
    digest = sha256("\n".join([repr(training), *engine]).encode()).hexdigest()[:DIGEST_CHARS]
    return StackPlace(digest, _told(training))


def _is_servant(frames: tuple[StackFrame, ...]) -> bool:
    """Whether Python's `threading` has started the thread."""
    return frames[-1].function == "_bootstrap" and frames[-1].file.endswith("/threading.py")


def _told(frames: tuple[StackFrame, ...]) -> str:
    if not frames:
        return "no Python frame"
    own = next((frame for frame in frames if frame.is_own), frames[0])
    text = str(frames[0]) if own is frames[0] else f"{frames[0]}, from {own}"
    return text[:PLACE_CHARS_MAX]
