"""Reads Parquet files, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import parquet

from rankwatch_service.replay.layout import ReplayError

BATCH_ROWS: Final = 131_072
BATCH_CELLS: Final = 20 * BATCH_ROWS
"""Rows read at a time, whichever is less: 21 MB of numbers."""

COLUMN_BYTES: Final = 64 * 1024
"""Bytes of each column read from the file at a time."""


class ParquetFile:
    """A Parquet file whose columns keep their types."""

    def __init__(self, path: Path) -> None:
        """Read the footer.

        Raises:
            ReplayError: it is no Parquet file.
        """
        self.path = str(path)
        try:
            # Without these a whole row group stays in memory, and by default every one that was read.
            self._file = parquet.ParquetFile(
                path, pre_buffer=False, buffer_size=COLUMN_BYTES, page_checksum_verification=True
            )
        except (pa.ArrowException, OSError) as error:
            raise ReplayError(self.path, f"no Parquet file: {str(error).splitlines()[0]}") from error
        self.names = list(self._file.schema_arrow.names)
        self.total = int(self._file.metadata.num_rows)

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Record batches, each with the number of rows read so far.

        Raises:
            ReplayError: a part of the file cannot be read.
        """
        done = 0
        rows = min(BATCH_ROWS, BATCH_CELLS // max(len(self.names), 1) + 1)
        try:
            for batch in self._file.iter_batches(batch_size=rows, use_threads=False):
                done += batch.num_rows
                if batch.num_rows:
                    yield batch, done
        except (pa.ArrowException, OSError) as error:
            raise ReplayError(self.path, str(error).splitlines()[0], done + 1) from error
