"""CSV files, and the history in Hugging Face's `trainer_state.json`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from typing import Final

from rankwatch.follow.rows import LINE_BYTES_MAX, Entry, LoggedValues, known_name, number, row_of

SEPARATORS: Final = ",;\t"
_TRAINED: Final = frozenset({"loss", "grad_norm"})
"""A row of a step has one of these, if rows of other kinds stand beside them."""


class CsvTable:
    """A header, then a row for each step; of several ranks in a `rank` column the first one is followed.

    Where some rows have a loss, the others are evaluations.
    """

    def __init__(self, before: CsvTable | None = None) -> None:
        """Read a file from its begin.

        Args:
            before: read what the file was until it began anew. Lightning writes its table anew when it has further
                columns, and the rows that it had are not read again.
        """
        self._before = before
        self._rest = b""
        self._names: list[str] = []
        self._separator = ","
        self._rank: float | None = None
        self._rows = 0
        self._known = 0
        """Rows at the begin that were read before."""

    def feed(self, data: bytes) -> Iterator[Entry]:
        """See `Parser.feed`."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-LINE_BYTES_MAX:]
        for line in lines:
            entry = self._parsed(line.decode("utf-8-sig", "replace").strip())
            if entry is not None:
                yield entry

    def flush(self) -> Iterator[Entry]:
        """See `Parser.flush`; an incomplete row may yet go on."""
        return iter(())

    def _parsed(self, line: str) -> Entry | None:
        if not line:
            return None
        if not self._names:
            self._separator = max(SEPARATORS, key=line.count)
            self._names = self._cells(line)
            before, self._before = self._before, None
            if before is not None and set(before._names) < set(self._names):
                self._known = max(before._rows, before._known)
            return None
        self._rows += 1
        if self._rows <= self._known:
            return None
        cells = zip(self._names, self._cells(line), strict=False)
        fields = {name: value for name, text in cells if (value := number(text)) is not None}
        rank = fields.pop("rank", 0.0)
        self._rank = rank if self._rank is None else self._rank
        row = row_of(fields) if rank == self._rank else None
        if row is not None and not _TRAINED & row.values.keys() and _TRAINED & set(map(known_name, self._names)):
            return LoggedValues(row.values)
        return row

    def _cells(self, line: str) -> list[str]:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=self._separator))]


class CsvTables:
    """Makes the readers of one file, each of which knows the one before it."""

    def __init__(self) -> None:
        self._newest: CsvTable | None = None

    def __call__(self) -> CsvTable:
        """A reader for the file, which begins or begins anew."""
        self._newest = CsvTable(self._newest)
        return self._newest


class TrainerState:
    """A `trainer_state.json`, which is written as a whole with each checkpoint: the entries after the newest known."""

    def __init__(self) -> None:
        self._known = 0

    def feed(self, data: bytes) -> Iterator[Entry]:
        """The further entries of the history; `data` is the whole file. Nothing while it is being written."""
        try:
            history = json.loads(data)["log_history"]
            further, self._known = history[self._known :], len(history)
        except (ValueError, KeyError, TypeError):
            return
        for logged in further:
            fields = {str(name): float(value) for name, value in logged.items() if isinstance(value, int | float)}
            row = row_of(fields)
            if row is not None and _TRAINED & row.values.keys():
                yield row
            elif row is not None:
                yield LoggedValues(row.values)

    def flush(self) -> Iterator[Entry]:
        """See `Parser.flush`; the file is whole."""
        return iter(())
