"""Reads files of others in a child process that may die of them; its end is an error of one line.

A question is one line of JSON, and so is the answer, which may have bytes after it. The child has limits of memory and
of processor time, and the time begins anew with each question.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from subprocess import PIPE
from types import TracebackType
from typing import Any, Final, Self

from rankwatch import children

MEMORY_BYTES: Final = 4 << 30
"""Address space that a reader has at least, and half of the machine's memory where that is more."""
ANSWER_CPU_S_MAX: Final = 60
"""Processor time for one answer, which is a part of a file: a block of a table takes a tenth of a second."""
TROUBLE_CHARACTERS_MAX: Final = 300

_OUT_OF_MEMORY: Final = 3
"""Exit status of a reader that has no more memory."""


class ReaderEndedError(Exception):
    """The reader has ended; the message says of what."""


class ForeignReader:
    """The side of the one who asks."""

    def __init__(self, module: str) -> None:
        """Start a reader.

        Args:
            module: calls `answer` when it is run. Paths in what it is asked are absolute.
        """
        self._trouble = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the reader
        self._child = children.start(children.python_module(module), stdin=PIPE, stdout=PIPE, stderr=self._trouble)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.kill()
        self._child.communicate()
        self._trouble.close()

    def ask(self, *question: object) -> tuple[Any, bytes]:
        """The answer to a question, and the bytes that belong to it.

        Raises:
            ReaderEndedError: there is none.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(question).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error
        head = self._child.stdout.readline()
        if not head.endswith(b"\n"):
            raise self._ended()
        reported, size = json.loads(head)
        body: bytes = self._child.stdout.read(size)
        if len(body) < size:
            raise self._ended()
        return reported, body

    def _ended(self) -> ReaderEndedError:
        status = self._child.wait()
        if status == -signal.SIGPROF:
            return ReaderEndedError(f"reading a part of it takes more than {ANSWER_CPU_S_MAX} s of processor time")
        if status in (_OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGKILL):
            return ReaderEndedError(f"reading it needs more than {memory_bytes() / 2**30:.0f} GiB of memory")
        self._trouble.seek(0)
        last = self._trouble.read().decode(errors="replace").strip().rpartition("\n")[2]
        return ReaderEndedError(f"reading it has failed: {last[:TROUBLE_CHARACTERS_MAX] or f'status {status}'}")


def memory_bytes() -> int:
    """Address space that a reader has."""
    return max(MEMORY_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def answer(answers: Callable[[list[Any]], tuple[Any, Any]]) -> None:
    """Be the reader: answer questions within the limits until there are no more.

    Args:
        answers: returns for a question the answer as JSON and the bytes after it.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = memory_bytes() if hard == resource.RLIM_INFINITY else min(memory_bytes(), hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        for line in sys.stdin.buffer:
            signal.setitimer(signal.ITIMER_PROF, ANSWER_CPU_S_MAX)  # its signal ends the process, wherever it is
            reported, body = answers(json.loads(line))
            sys.stdout.buffer.write(json.dumps([reported, len(body)]).encode() + b"\n")
            sys.stdout.buffer.write(body)
            sys.stdout.buffer.flush()
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)
