"""The output of local ranks, from wherever it can be read: what each keeps itself, and files that it writes to.

Files are those behind a rank's standard output and error, as of torchrun's `--log-dir`, Slurm's `--output` or a
redirection, and the one that the rank declares (`RANKWATCH_RANK_LOGS`). Only regular files are read, from their end.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

from rankwatch import layout
from rankwatch.agent.ranks import LocalRank
from rankwatch.output.errors import EndReason, LineRole, Weight, of_nobody, of_rank, reason, shown_line
from rankwatch.output.tail import PrintedLine, kept_lines, lines_of_file

STREAMS: Final = (1, 2)
HUNG_LINES_MAX: Final = 8
"""Lines of a rank that stands still."""

CONSEQUENCE_LINES_MAX: Final = 3
"""Lines of a rank that only says that it has lost a peer, or was asked to end."""

FileId = tuple[int, int]


class RankOutput:
    """Knows which files the ranks of this host write to, also when their processes are gone."""

    def __init__(self) -> None:
        self._files: dict[str, dict[FileId, str]] = {}
        """By recorder: device and inode, and path."""

    def meet(self, rank: LocalRank) -> None:
        """Find out where a living rank writes."""
        files = {}
        for path in self._paths(rank):
            with suppress(OSError):
                status = os.stat(path)
                if stat.S_ISREG(status.st_mode) and status.st_nlink:  # one without a name cannot be opened later
                    files[status.st_dev, status.st_ino] = os.path.realpath(path)
        self._files[rank.path] = files

    def forget(self, rank: LocalRank) -> None:
        """The rank is gone and all of it is sent."""
        self._files.pop(rank.path, None)

    def why_ended(self, rank: LocalRank, number: int | None, ended_unix_ns: int) -> dict[str, Any]:
        """The fields of its event `process_exit` that its output adds: `output`, see `wire.EVENT_KINDS`; {}: none.

        In a file that ranks share, a line without a number may be of any of them: of the first that ended it counts
        where it tells of what no other end causes. Where no line says why it ended, these are the last ones.

        Args:
            rank: one that has ended.
            number: the signal that ended it; None: none.
            ended_unix_ns: when it did.
        """
        found = reason(self.lines(rank), number, ended_unix_ns)
        if found is None and rank.exit_order == 0:
            found = reason(self._of_files(rank, of_nobody), number, ended_unix_ns)
            found = found if found is not None and found.pattern.weight is Weight.CERTAIN else None
        reported = {"lines": self.last_lines(rank)} if found is None else _fields(found)
        if not reported["lines"] and rank.exit_order == 0:
            reported = {"lines": _last(self._of_files(rank, of_nobody))}
        files = sorted(self._files.get(rank.path, {}).values())
        return {"output": reported | {"files": files}} if reported["lines"] or files else {}

    def last_lines(self, rank: LocalRank) -> list[str]:
        """What it has printed last, for people."""
        return _last(self.lines(rank))

    def lines(self, rank: LocalRank) -> list[PrintedLine]:
        """The end of its output, oldest first: of what was written to files what it has not kept itself."""
        own = kept_lines(layout.output_path(rank.path))
        known = {line.text for line in own}
        local_rank = int(rank.identity.get("local_rank", -1))
        from_files = self._of_files(rank, lambda lines: of_rank(lines, rank.rank, local_rank))
        return [*(line for line in from_files if line.text not in known), *own]

    def _paths(self, rank: LocalRank) -> Iterator[str]:
        if rank.process is not None:
            yield from (f"/proc/{rank.process.pid}/fd/{number}" for number in STREAMS)
        declared = rank.identity.get("rank_log")
        if isinstance(declared, str) and declared:
            yield declared

    def _of_files(self, rank: LocalRank, chosen: Callable[[list[PrintedLine]], list[PrintedLine]]) -> list[PrintedLine]:
        """The last lines of its files; of those that other ranks write to as well, the chosen ones."""
        lines: list[PrintedLine] = []
        for file, path in self._files.get(rank.path, {}).items():
            with suppress(OSError):
                found = _read(path, file)
                alone = sum(file in others for others in self._files.values()) == 1
                lines += found if alone else chosen(found)
        return lines


def _last(lines: list[PrintedLine]) -> list[str]:
    texts = [line.text for line in lines if line.text.strip()]
    return [shown_line(text) for text in texts[-HUNG_LINES_MAX:]]


def _read(path: str, file: FileId) -> list[PrintedLine]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) != file:
            return []
        return lines_of_file(descriptor)
    finally:
        os.close(descriptor)


def _fields(found: EndReason) -> dict[str, Any]:
    return {
        "line": found.line,
        "role": str(found.pattern.role),
        "pattern": found.pattern.name,
        "certain": found.pattern.weight is Weight.CERTAIN,
        "where": found.where,
        "unix_ns": found.unix_ns,
        "lines": list(found.lines if found.pattern.role is LineRole.ROOT else found.lines[-CONSEQUENCE_LINES_MAX:]),
    }
