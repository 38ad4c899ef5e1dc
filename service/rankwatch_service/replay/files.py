"""Reads files: CSV, also compressed, Parquet, and event files of TensorBoard; some rows at a time.

CSV is cut into blocks here, and these are parsed one by one, in this thread: so an error knows its row, and what stands
before it is read. Every field is text. Of an event file scalars by tag become columns, one row for each step.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from rankwatch.follow.record_logs import EventReader, LogFormatError, ScalarEvent
from rankwatch_service.replay.layout import ReplayError
from rankwatch_service.replay.rows import KNOWN_COLUMNS, is_number

BLOCK_BYTES: Final = 1024 * 1024
"""Size of a block; only whole lines are parsed."""

LINE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Longest line. A row of 1,000 numbers has 20 KB."""

PIECE_BYTES: Final = 4 * 1024
"""Size of a read; a truncated compressed file loses at most this much."""

COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"BZh": "bz2", b"\x28\xb5\x2f\xfd": "zstd"}
UTF_16: Final = (b"\xff\xfe", b"\xfe\xff")
UTF_8_MARK: Final = b"\xef\xbb\xbf"
SEPARATORS: Final = {";": "semicolons", "\t": "tabs", "|": "bars"}

_ROW: Final = re.compile(r"Row #(\d+)")
_COLUMN: Final = re.compile(r"In CSV column #(\d+)")
_FIELDS: Final = re.compile(r"Expected (\d+) columns, got (\d+)")


class CsvFile:
    """A CSV file with a header. An empty field is null; `nan` and `inf` are text here, and values later."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ReplayError: there is no header, or it is not one of a CSV file.
        """
        self.path = str(path)
        self.left_out: list[str] = []
        self.total = path.stat().st_size
        self._row = 0
        with path.open("rb") as file:
            head = file.read(4)
        if head.startswith(UTF_16):
            raise ReplayError(self.path, "is UTF-16; it must be UTF-8")
        self._codec = next((codec for mark, codec in COMPRESSED.items() if head.startswith(mark)), None)
        header, _ = _cut_header(next(self._blocks(), (b"", 0))[0])
        text = header.removeprefix(UTF_8_MARK).decode(errors="replace")
        if "\0" in text or "\N{REPLACEMENT CHARACTER}" in text:
            raise ReplayError(self.path, "neither CSV nor Parquet: the first line is not text in UTF-8")
        self.names = [name.strip() for name in next(csv.reader([text], skipinitialspace=True), [])]
        if not self.names:
            raise ReplayError(self.path, "the file is empty: it needs a header and rows")
        other = next((name for sign, name in SEPARATORS.items() if sign in text), None)
        if len(self.names) == 1 and other is not None:
            raise ReplayError(self.path, f"fields are separated by {other}; they must be by commas")

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Record batches of text columns, each with the number of bytes of the file read so far.

        Raises:
            ReplayError: a line is too long, has another number of fields, or is not UTF-8; or the file is truncated.
                Whatever stands before it has been given.
        """
        self._row = 1
        for index, (block, done) in enumerate(self._blocks()):
            lines = _cut_header(block)[1] if index == 0 else block
            if not lines.strip(b"\r\n"):
                continue
            broken = None
            try:
                batch = self._parsed(lines)
            except pa.ArrowInvalid as error:
                batch, broken = self._sound(lines, str(error))
            if batch is not None:
                yield batch, done
                self._row += batch.num_rows
            if broken is not None:
                raise broken

    def _blocks(self) -> Iterator[tuple[bytes, int]]:
        """Whole lines, about a block at once, each with the number of bytes of the file read so far."""
        lines, want, broken = bytearray(), BLOCK_BYTES, None
        # Not a Python file: a thread of Arrow may release it after the interpreter has ended.
        with pa.OSFile(self.path) as file, self._unpacked(file) as stream:
            while broken is None:
                try:
                    piece = stream.read(PIECE_BYTES)
                except (pa.ArrowException, OSError) as error:
                    broken, piece = error, b""
                lines += piece
                if piece and len(lines) < want:
                    continue
                end = len(lines) if not piece and broken is None else max(lines.rfind(b"\n"), lines.rfind(b"\r")) + 1
                if end:
                    yield bytes(lines[:end]), file.tell()
                    del lines[:end]
                elif len(lines) > LINE_BYTES_MAX:
                    raise ReplayError(self.path, f"the line is longer than {LINE_BYTES_MAX} bytes", self._row or None)
                if not piece:
                    break
                want = len(lines) + BLOCK_BYTES
        if broken is not None:
            raise ReplayError(
                self.path, f"the file is truncated here: {str(broken).splitlines()[0]}", self._row or None
            )

    def _unpacked(self, file: Any) -> Any:
        return file if self._codec is None else pa.CompressedInputStream(file, self._codec)

    def _parsed(self, lines: bytes) -> Any:
        """A record batch; None if there are no rows."""
        memory = pa.BufferOutputStream()
        memory.write(lines)
        table = arrow_csv.read_csv(
            pa.BufferReader(memory.getvalue()),
            arrow_csv.ReadOptions(use_threads=False, block_size=max(len(lines), 1), column_names=self.names),
            convert_options=arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(self.names, pa.string()), null_values=[""], strings_can_be_null=True
            ),
        )
        batches = table.combine_chunks().to_batches()
        return batches[0] if batches else None

    def _sound(self, lines: bytes, error: str) -> tuple[Any, ReplayError]:
        """The rows before a wrong one, and the error of that one."""
        found = _ROW.search(error)
        index = 0 if found is None else int(found[1]) - 1
        before = _first_lines(lines, index)
        what = self._what(error, lines, _first_lines(lines, index + 1)[len(before) :])
        broken = ReplayError(self.path, what, self._row + index, self._column(error))
        try:
            batch = self._parsed(before)
        except pa.ArrowInvalid:
            return None, broken
        # A field with line breaks in it makes lines and rows differ.
        return (batch if batch is not None and batch.num_rows == index else None), broken

    def _what(self, error: str, lines: bytes, wrong: bytes) -> str:
        if (fields := _FIELDS.search(error)) is not None:
            why = ": a quotation mark in it is not closed" if wrong.count(b'"') % 2 else ""
            return f"{fields[2]} fields, the header has {fields[1]}{why}"
        if "UTF8" in error:
            return "is not UTF-8"
        if lines.count(b'"') % 2:
            return "at or after it a quotation mark is not closed"
        return error.splitlines()[0]

    def _column(self, error: str) -> str | None:
        found = _COLUMN.search(error)
        return None if found is None else self.names[int(found[1])]


def _cut_header(block: bytes) -> tuple[bytes, bytes]:
    """The first line that is not empty, and what follows it."""
    start = len(block) - len(block.lstrip(b"\r\n"))
    ends = [end for end in (block.find(b"\n", start), block.find(b"\r", start)) if end >= 0]
    end = min(ends, default=len(block))
    return block[start:end], block[end:]


def _first_lines(lines: bytes, count: int) -> bytes:
    """The first lines that are not empty, as the parser counts them."""
    filled = [line for line in lines.splitlines(keepends=True) if line.strip(b"\r\n")]
    return b"".join(filled[:count])


BATCH_ROWS: Final = 131_072
BATCH_CELLS: Final = 20 * BATCH_ROWS
"""Rows read at a time, whichever is less: 21 MB of numbers."""

BATCH_BYTES_MAX: Final = 256 * 1024 * 1024
"""Most bytes of these rows: ten times as much as numbers take."""

COLUMN_BYTES: Final = 64 * 1024
"""Bytes of each column read from the file at a time."""


class ParquetFile:
    """A Parquet file whose columns keep their types. Of text only the known columns are read, as dictionaries."""

    def __init__(self, path: Path, mapped: Collection[str] = ()) -> None:
        """Read the footer.

        Args:
            path: of the file.
            mapped: names of columns that are read too, whatever they hold.

        Raises:
            ReplayError: it is no Parquet file.
        """
        self.path = str(path)
        try:
            footer = parquet.read_metadata(path)
            schema = footer.schema.to_arrow_schema()
            # Without these a whole row group stays in memory, and by default every one that was read.
            self._file = parquet.ParquetFile(
                path,
                metadata=footer,
                read_dictionary=[field.name for field in schema if _is_string(field.type)],
                pre_buffer=False,
                buffer_size=COLUMN_BYTES,
                page_checksum_verification=True,
            )
        except (pa.ArrowException, OSError) as error:
            raise ReplayError(self.path, f"no Parquet file: {str(error).splitlines()[0]}") from error
        self.names = list(schema.names)
        wanted = {*KNOWN_COLUMNS, *mapped}
        self._read = [field.name for field in schema if field.name in wanted or is_number(field)]
        read = set(self._read)
        self.left_out = [field.name for field in schema if field.name not in read and not pa.types.is_null(field.type)]
        self.total = int(footer.num_rows)

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Record batches, each with the number of rows read so far.

        Raises:
            ReplayError: a part of the file cannot be read.
        """
        done = 0
        rows = min(BATCH_ROWS, BATCH_CELLS // max(len(self.names), 1) + 1)
        try:
            for batch in self._file.iter_batches(batch_size=rows, columns=self._read, use_threads=False):
                if batch.nbytes > BATCH_BYTES_MAX:
                    what = f"{batch.num_rows} rows have more than {BATCH_BYTES_MAX // 2**20} MiB"
                    raise ReplayError(self.path, what, done + 1)
                done += batch.num_rows
                if batch.num_rows:
                    yield batch, done
        except MemoryError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise ReplayError(self.path, str(error).splitlines()[0], done + 1) from error


def _is_string(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


OPEN_STEPS: Final = 64
"""Scalars of one step may be written this many steps apart."""

EVENT_BATCH_ROWS: Final = 8_192
EVENT_PIECE_BYTES: Final = 1024 * 1024
COLUMNS_MAX: Final = 1_000
"""The number of tags read; the others are left out."""


OWN: Final = ("time_s", "step", "attempt")
"""Columns of every row; a tag of such a name becomes the column tag/NAME."""


class TensorBoardFile:
    """One event file. Each is a launch of its own, and a step that goes back begins a new attempt of it."""

    def __init__(self, path: Path) -> None:
        """Scan the file for its tags.

        Raises:
            ReplayError: it has no scalars.
        """
        self.path = str(path)
        self.left_out: list[str] = []
        self.total = 0
        self._launch = path.name.rpartition("tfevents.")[2] or path.name
        tags: dict[str, None] = {}
        for _, _, scalars in _events(self.path):
            self.total += 1
            if len(tags) < COLUMNS_MAX:
                tags |= dict.fromkeys(scalars)
        if not tags:
            raise ReplayError(self.path, "an event file without scalars")
        self._columns = {tag: f"tag/{tag}" if tag in OWN else tag for tag in list(tags)[:COLUMNS_MAX]}
        self.names = [*OWN, *self._columns.values()]

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Record batches in the order of writing, each with the number of events read so far."""
        ready: list[dict[str, Any]] = []
        for row, done in self._rows():
            ready.append(row)
            if len(ready) == EVENT_BATCH_ROWS:
                yield self._batch(ready), done
                ready = []
        if ready:
            yield self._batch(ready), self.total

    def _rows(self) -> Iterator[tuple[dict[str, Any], int]]:
        pending: dict[int, dict[str, Any]] = {}
        attempt, done, newest = 0, 0, -1
        for done, (time_s, step, scalars) in enumerate(_events(self.path), 1):
            columns = {self._columns[tag]: value for tag, value in scalars.items() if tag in self._columns}
            # In the newest step itself a tag may be written twice.
            again = step < newest and not columns.keys().isdisjoint(pending.get(step, ()))
            if again or step < newest - OPEN_STEPS:
                yield from ((row, done) for row in _drained(pending, 0))
                attempt, newest = attempt + 1, -1
            if step not in pending and step < newest:
                # Its row may be gone already; what came later stays where it is.
                continue
            newest = max(newest, step)
            row = pending.setdefault(step, {"time_s": time_s, "step": step, "attempt": f"{self._launch}.{attempt}"})
            row |= columns
            yield from ((row, done) for row in _drained(pending, OPEN_STEPS))
        yield from ((row, done) for row in _drained(pending, 0))

    def _batch(self, rows: list[dict[str, Any]]) -> Any:
        schema = pa.schema(
            [("time_s", pa.float64()), ("step", pa.int64()), ("attempt", pa.string())]
            + [(name, pa.float64()) for name in self._columns.values()]
        )
        return pa.RecordBatch.from_pylist(rows, schema=schema)


def _drained(pending: dict[int, dict[str, Any]], keep: int) -> Iterator[dict[str, Any]]:
    while len(pending) > keep:
        yield pending.pop(next(iter(pending)))


def _events(path: str) -> Iterator[ScalarEvent]:
    """The events that have scalars. A file that is truncated or damaged ends with its last whole event."""
    reader = EventReader()
    with open(path, "rb") as file, suppress(LogFormatError):
        while data := file.read(EVENT_PIECE_BYTES):
            yield from reader.feed(data)
