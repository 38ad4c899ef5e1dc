"""Cuts files of text into lines with their numbers: lines of any form, tables, and `trainer_state.json`."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from rankwatch.follow.fields import Field, Line, clock_s, from_mapping, line_of, named, plain, value_of
from rankwatch.follow.hints import Hints
from rankwatch.follow.reader import LogReader
from rankwatch.follow.roles import is_epoch, loss_score, step_score
from rankwatch.follow.rows import Entry, LineCutter

LINE_BYTES_MAX: Final = 8 << 10
"""Longest line: one of 100 values has half of that."""
ROW_BYTES_MAX: Final = 1 << 20
"""Longest row of a table, and line of JSON."""
RUN_CHARACTERS_MAX: Final = 512
"""Most blanks, or letters, digits and points, in a row: what the patterns take would grow with its square."""
_RUN: Final = re.compile(rf"\s{{{RUN_CHARACTERS_MAX + 1}}}|[\w.,/-]{{{RUN_CHARACTERS_MAX + 1}}}")
SEPARATORS: Final = ",;\t|"
_BLANKS: Final = re.compile(r"\s{2,}|\t")
_CELL: Final = re.compile(r"(?:[A-Za-z_#](?:[\w ./()%@-](?!\d*\.\d|\d\d|nan\b)){0,39})?\Z")
_COMMENT: Final = re.compile(r"^(\s*)#(?=\s)")
_PREFIX: Final = re.compile(r"[^|]{0,80}\d\d:\d\d:\d\d[,.\d]*[\s\])-]*(?=\|)")
"""What a logger puts before a row."""
_LOSSES: Final = ("total", "box", "GIoU", "obj", "cls")
"""Names of losses in the tables of detectors of objects, which say so of none."""
STATE_BYTES_MAX: Final = 16 << 20
"""Largest `trainer_state.json`: 80,000 entries of 200 bytes."""


class LoggedTable:
    """The header of a table, by which its rows are read."""

    def __init__(self, header: str, separator: str, *, is_file: bool) -> None:
        """Read the header.

        Args:
            header: the line.
            separator: of cells; " " or "  " for at least so many blanks.
            is_file: the whole file is this table.
        """
        header = _COMMENT.sub(r"\1 ", header)
        self._words = header.split()
        self._separator = separator
        self._is_file = is_file
        self._at = _spans(header, separator)
        self._take(_cells(header, separator))

    def _take(self, names: list[str]) -> None:
        if not self._is_file and {"obj", "cls"} <= set(names) and not any(map(loss_score, names)):
            names = [f"{name} loss" if name in _LOSSES else name for name in names]
        self.names = names
        steps = [step_score(name) or is_epoch(name) for name in self.names]
        losses = [name for name in self.names if loss_score(name)]
        self.has_step = any(steps)
        self._needed = [*([self.names[steps.index(max(steps))]] if self.has_step else []), *losses][:2]

    def row(self, text: str) -> list[Field] | None:
        """The numbers of a row; None if the line is none.

        Raises:
            csv.Error: a field is too long.
        """
        text = _PREFIX.sub("", text)
        cells = _cells(text, self._separator)
        if self._separator == "  " and len(cells) != len(self.names) and len(self._words) == len(text.split()):
            self._take(self._words)
            self._separator, cells = " ", text.split()
        names = self.names if self._is_file or len(cells) >= len(self.names) else self._above(text)
        is_blank = self._separator not in SEPARATORS
        if names is None or (not self._is_file and len(cells) > len(names) and not is_blank):
            return None
        found = {name: value_of(cell) for name, cell in zip(names, cells, strict=False)}
        if not self._is_file and any(found.get(name) is None for name in self._needed):
            return None
        row = [value._replace(name=name, unit="") for name, value in found.items() if value is not None]
        if not is_blank:
            return row
        is_last = len(cells) == len(names) and found[names[-1]] is not None
        return row if is_last else [*row, *line_of(" ".join(cells[len(names) - 1 :])).fields.values()]  # such as a bar

    def _above(self, text: str) -> list[str] | None:
        """The names that cells stand below, at their begin or end, where some are empty; None if one has none."""
        names = []
        for start, end in _spans(text, self._separator):
            below = [name for name, at in zip(self.names, self._at, strict=True) if at[0] == start or at[1] == end]
            if not below:
                return None
            names.append(below[0])
        return names or None


def header_of(text: str, *, is_file: bool) -> LoggedTable | None:
    """The table whose header a line is; None for any other line.

    Args:
        text: the line.
        is_file: the file is a table, so that its first line is a header.
    """
    if is_file:
        return LoggedTable(text, max(",;\t", key=text.count), is_file=True)
    text = _PREFIX.sub("", text)
    if "=" in text or ": " in text or len(text) > 1_000:
        return None
    separator = max(SEPARATORS, key=text.count)
    if not text.count(separator):
        separator = " " * (2 if len(_BLANKS.split(text.strip())) > 2 else 1)
    table = LoggedTable(text, separator, is_file=False)
    if len(table.names) < 2 or not all(map(_CELL.match, table.names)) or not any(map(loss_score, table.names)):
        return None
    is_named = "loss" in text.lower() or len(table.names) > 3
    return table if is_named and (table.has_step or (separator == "  " and "loss" in table.names)) else None


_HEADER: Final = re.compile(r"loss|epoch|\bstep", re.I)


def _cells(text: str, separator: str) -> list[str]:
    if separator == "|":
        return [cell.strip() for cell in text.strip("| ").split("|")]
    if separator in SEPARATORS:
        return [cell.strip() for cell in next(csv.reader([text.strip()], delimiter=separator))]
    return _BLANKS.split(text.strip()) if len(separator) > 1 else text.split()


def _spans(text: str, separator: str) -> list[tuple[int, int]]:
    """Where cells that blanks separate begin and end."""
    return [cell.span() for cell in re.finditer(r"\S+(?:\s\S+)*" if separator == "  " else r"\S+", text)]


class TextLog:
    """Lines of any form, also of tables; of several ranks those of the first one that reports a step."""

    def __init__(self, hints: Hints | None = None, before: TextLog | None = None, *, is_table: bool = False) -> None:
        """Read a file from its begin.

        Args:
            hints: what a person says of it.
            before: read what the file was until it began anew. Lightning writes its table anew when it has further
                columns, and the rows that it had are not read again.
            is_table: the first line is a header.
        """
        hints = hints or Hints()
        self._hints = hints
        self._reader: LogReader = LogReader(
            hints.wanted,
            before._reader if before is not None else None,
            is_table=is_table,
            parse=self._cut if hints.pattern is None else None,
        )
        self._before = before
        self._is_table = is_table
        self._table: LoggedTable | None = None
        self._table_rows = 0
        self._known_rows = 0
        """Rows of a table at the begin that were read before."""
        self._lines = LineCutter(ROW_BYTES_MAX)
        self._label = ""
        """Of what was read since the last line feed."""

    def cut(self, data: bytes) -> Iterator[bytes]:
        """See `Parser.cut`; a line is complete with its end."""
        return self._lines.cut(data)

    def parse(self, piece: bytes) -> Iterable[Entry]:
        """See `Parser.parse`."""
        text, label = plain(self._lines.text(piece)), self._label
        if self._is_table and self._has_begun(text):
            return ()
        is_complete = piece.endswith(b"\n")
        if not label and (is_complete or not self._reader.label):
            entries = self._reader.quick(text)
            if entries is not None:
                return entries
        self._label = ""
        return self._read(text, label, is_complete)

    def flush(self) -> Iterable[Entry]:
        """See `Parser.flush`; an incomplete line may yet go on."""
        return self._reader.flush()

    def _has_begun(self, text: str) -> bool:
        """Whether a line of a table is its header, or a row that was read before."""
        if not text.strip():
            return True
        if self._table is None:
            self._begin(header_of(text.removeprefix("\ufeff").strip(), is_file=True))
            return True
        self._table_rows += 1
        return self._table_rows <= self._known_rows

    def _read(self, text: str, label: str, is_complete: bool) -> Iterator[Entry]:
        bare = text.removeprefix("\ufeff").strip()
        if not bare:
            return
        is_text = not self._is_table and self._hints.pattern is None
        if is_text and _HEADER.search(bare) and (table := header_of(text, is_file=False)) is not None:
            self._begin(table)
            return
        line = self._cut(text)
        if line is None:
            return
        label = line.label or label
        if not is_complete:
            self._label = label
        yield from self._reader.take(line._replace(label=label), text)

    def _cut(self, text: str) -> Line | None:
        """A line with its numbers; nothing is remembered of it."""
        bare = text.removeprefix("\ufeff").strip()
        if self._table is not None and (row := self._table.row(text)) is not None:
            rank = next((f"{field.value:g}" for field in row if field.name.lower() == "rank"), "")
            numbers = named(field for field in row if field.name.lower() != "rank")
            return Line(numbers, "", rank, clock_s(bare[:64]))
        if len(text) > LINE_BYTES_MAX and not bare.startswith("{"):
            raise ValueError(f"longer than {LINE_BYTES_MAX:,} bytes")
        if len(text) > RUN_CHARACTERS_MAX and _RUN.search(text):
            raise ValueError(f"more than {RUN_CHARACTERS_MAX} blanks, or signs without one, in a row")
        return _matched(self._hints.pattern, text) if self._hints.pattern is not None else line_of(text)

    def _begin(self, table: LoggedTable | None) -> None:
        before = self._before._table if self._before is not None else None
        if table is not None and before is not None and set(before.names) < set(table.names):
            assert self._before is not None
            self._known_rows = max(self._before._table_rows, self._before._known_rows)
        if table is not None and (self._table is None or table.names != self._table.names):
            self._reader.forget()
        self._table, self._before = table, None


class TextLogs:
    """Makes the parsers of one file, each of which knows the one before it."""

    def __init__(self, hints: Hints | None = None, *, is_table: bool = False) -> None:
        self._hints = hints
        self._is_table = is_table
        self._newest: TextLog | None = None

    def __call__(self) -> TextLog:
        """A parser for the file, which begins or begins anew."""
        self._newest = TextLog(self._hints, self._newest, is_table=self._is_table)
        return self._newest


def _matched(pattern: re.Pattern[str], text: str) -> Line | None:
    found = pattern.search(text)
    if found is None:
        return None
    numbers = {name: value_of(part) for name, part in found.groupdict().items() if part}
    return Line({name: one._replace(name=name) for name, one in numbers.items() if one is not None}, text)


class TrainerState:
    """A `trainer_state.json`, which is written as a whole with each checkpoint: the entries after the newest known."""

    def __init__(self, reader: LogReader | None = None) -> None:
        self._reader = reader or LogReader(is_table=True)
        self._known = 0

    def cut(self, data: bytes) -> Iterator[Mapping[str, Any]]:
        """The further entries of the history; `data` is the whole file. Nothing while it is being written.

        Raises:
            ValueError: it is too large, or there are numbers in it that cannot be read.
            RecursionError: it is nested too deeply.
        """
        if len(data) > STATE_BYTES_MAX:
            raise ValueError(f"larger than {STATE_BYTES_MAX >> 20} MiB")
        try:
            history = json.loads(data)["log_history"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            return
        further, self._known = history[self._known :], len(history)
        yield from further

    def parse(self, piece: Mapping[str, Any]) -> Iterator[Entry]:
        """See `Parser.parse`."""
        yield from self._reader.take(Line(named(from_mapping(piece)), ""))

    def flush(self) -> Iterable[Entry]:
        """See `Parser.flush`; the file is whole."""
        return self._reader.flush()
