"""Reads CSV files, also compressed ones, block by block, every field as the text that it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import csv

from rankwatch_service.replay.layout import ReplayError

LINE_BYTES_MAX: Final = 4 * 1024 * 1024
"""Longest line; also the size of the blocks that are read. A row of 1,000 numbers has 20 KB."""

COMPRESSED: Final = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


class CsvFile:
    """A CSV file with a header. An empty field is null; `nan` and `inf` are text here, and values later."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ReplayError: there is no header, or no row after it.
        """
        self.path = str(path)
        self.total = path.stat().st_size
        self._codec = COMPRESSED.get(path.suffix)
        self._row = 0
        self._wrong: list[Any] = []
        try:
            # Types are guessed from the first block only to learn the names.
            with self._open(pa.input_stream(str(path), compression=self._codec), None) as first:
                self.names = list(first.schema.names)
        except (pa.ArrowInvalid, OSError) as error:
            raise self._error(error) from error

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Record batches of text columns, each with the bytes of the file that are read by then.

        Raises:
            ReplayError: a line is too long, has another number of fields, or is no UTF-8.
        """
        types = dict.fromkeys(self.names, pa.string())
        try:
            with (
                Path(self.path).open("rb") as file,
                self._open(pa.input_stream(file, compression=self._codec), types) as reader,
            ):
                for batch in reader:
                    if batch.num_rows:
                        yield batch, file.tell()
                        self._row += batch.num_rows
        except (pa.ArrowInvalid, OSError) as error:
            raise self._error(error) from error

    def _open(self, stream: Any, types: dict[str, Any] | None) -> Any:
        # One thread: only then do errors carry their row.
        read = csv.ReadOptions(use_threads=False, block_size=LINE_BYTES_MAX)
        parse = csv.ParseOptions(invalid_row_handler=self._invalid)
        convert = csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True)
        return csv.open_csv(stream, read_options=read, parse_options=parse, convert_options=convert)

    def _invalid(self, row: Any) -> str:
        self._wrong.append(row)
        return "error"

    def _error(self, error: Exception) -> ReplayError:
        text = str(error)
        if self._wrong:
            wrong = self._wrong[0]
            # The parser counts lines from 1, the header is the first.
            row = None if wrong.number is None else wrong.number - 1
            return ReplayError(
                self.path, f"{wrong.actual_columns} fields, the header has {wrong.expected_columns}", row
            )
        if "straddling" in text:
            after = self._row + 1
            return ReplayError(self.path, f"at or after this row a line is longer than {LINE_BYTES_MAX} bytes", after)
        if "Empty CSV" in text:
            return ReplayError(self.path, "the file is empty: it needs a header and rows")
        return ReplayError(self.path, text.splitlines()[0], self._row + 1)
