"""What is read of a log: steps with their values; and how its bytes are cut into lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

STEP_MAX: Final = 1 << 47
"""Steps are below it: what a recorder can hold."""


class LoggedStep(NamedTuple):
    """A step as a log reports it."""

    step: int
    values: Mapping[str, float]
    """By the names that detectors know."""
    step_time_s: float | None = None
    """Seconds of one step, if the log says so."""
    time_s: float | None = None
    """When it was written, by the log's own clock."""


@dataclass(frozen=True, slots=True)
class LoggedValues:
    """Values of the newest step, which are no report of a step: an evaluation."""

    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class End:
    """The log says that training has ended in order."""


@dataclass(frozen=True, slots=True)
class LoggedFailure:
    """The log says that training has ended otherwise, if no step follows."""

    kind: str
    """Of the exception, else a word for what ended it."""
    message: str
    weight: int = 2
    """Of failures without a step between them the first of the highest weight counts: 3 for what no lost peer causes, 1
    for what says that a peer was lost, 2 for others."""


@dataclass(frozen=True, slots=True)
class Understood:
    """Which numbers are read; of the lines from here on, if it is not the first."""

    text: str


@dataclass(frozen=True, slots=True)
class NotUnderstood:
    """Many lines were read since the newest step, and none of them is one."""

    lines: tuple[str, ...]
    """Those that look most like a step."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A line that was kept until it was known how to read it, and cannot be read."""

    reason: str


Entry = LoggedStep | LoggedValues | End | LoggedFailure | Understood | NotUnderstood | Unreadable


class Parser(Protocol):
    """Reads one format. A file that begins anew gets a new parser. `LogIntake` calls it, and bears what it raises."""

    def cut(self, data: bytes) -> Iterator[Any]:
        """The pieces, such as lines, that these further bytes complete."""

    def parse(self, piece: Any) -> Iterable[Entry]:
        """The entries that a piece completes; none of a piece of another kind."""

    def flush(self) -> Iterable[Entry]:
        """Nothing came for a while: the entries that only a further one would have completed."""


class LineCutter:
    """Cuts bytes into lines, each with its end: a line feed or a carriage return, by which progress bars end."""

    def __init__(self, bytes_max: int) -> None:
        """Begin with an empty line.

        Args:
            bytes_max: of a longer line only more than these are kept, so that `text` knows it.
        """
        self._bytes_max = bytes_max
        self._rest = b""

    def cut(self, data: bytes) -> Iterator[bytes]:
        """The lines that these further bytes complete."""
        lines = (self._rest + data).splitlines(keepends=True)
        complete = not lines or lines[-1].endswith((b"\n", b"\r"))
        self._rest = b"" if complete else lines.pop()[: self._bytes_max + 1]
        yield from lines

    def text(self, line: bytes) -> str:
        """A line without its end.

        Raises:
            ValueError: it is too long.
        """
        line = line.rstrip(b"\r\n")
        if len(line) > self._bytes_max:
            raise ValueError(f"longer than {self._bytes_max:,} bytes")
        return line.decode("utf-8", "replace")
