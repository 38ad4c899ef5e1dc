"""Where a log enters: a line that cannot be read is counted and passed over, whatever its format and its writer."""

from __future__ import annotations

import csv
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from rankwatch.follow.record_logs import LogFormatError
from rankwatch.follow.rows import Entry, Parser, Unreadable

_UNREADABLE: Final = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    csv.Error,
    struct.error,
)
"""What reading a line may raise: numbers of too many digits, fields that are too long, nesting that is too deep."""


class PassedOver:
    """The lines that could not be read."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""
        """Why, of the first one."""

    def add(self, why: Exception) -> None:
        """Count one more."""
        self.count += 1
        self.first = self.first or str(why) or type(why).__name__


class LogIntake:
    """Reads one file by a parser of its format."""

    def __init__(self, parser: Parser, passed_over: PassedOver) -> None:
        self._parser = parser
        self._passed_over = passed_over
        self._is_known = False
        """Something was read: the file is of this format."""

    def feed(self, data: bytes) -> Iterator[Entry]:
        """The entries that these further bytes complete.

        Raises:
            LogFormatError: the file is not of this format, since its very begin.
        """
        try:
            for piece in self._parser.cut(data):
                yield from self._sound(self._parser.parse, piece)
        except LogFormatError as error:
            if not self._is_known:
                raise
            self._passed_over.add(error)
        except _UNREADABLE as error:
            self._passed_over.add(error)

    def flush(self) -> Iterator[Entry]:
        """Nothing came for a while: the entries that only a further one would have completed."""
        return self._sound(self._parser.flush)

    def _sound(self, read: Callable[..., Iterable[Entry]], *piece: Any) -> Iterator[Entry]:
        try:
            found = list(read(*piece))
        except _UNREADABLE as error:
            self._passed_over.add(error)
            return
        self._is_known |= bool(found)
        for entry in found:
            if isinstance(entry, Unreadable):
                self._passed_over.add(ValueError(entry.reason))
            else:
                yield entry
