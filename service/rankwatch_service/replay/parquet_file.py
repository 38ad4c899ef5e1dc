"""Reads Parquet files, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import parquet

from rankwatch_service.replay.layout import ReplayError

BATCH_ROWS: Final = 131_072
"""Rows read at once: 20 columns of them are 20 MB."""


class ParquetFile:
    """A Parquet file whose columns keep their types."""

    def __init__(self, path: Path) -> None:
        """Read the footer.

        Raises:
            ReplayError: it is no Parquet file.
        """
        self.path = str(path)
        try:
            self._file = parquet.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise ReplayError(self.path, f"no Parquet file: {str(error).splitlines()[0]}") from error
        self.names = list(self._file.schema_arrow.names)
        self.total = int(self._file.metadata.num_rows)

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Record batches, each with the rows that are read by then.

        Raises:
            ReplayError: a part of the file cannot be read.
        """
        done = 0
        try:
            for batch in self._file.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
                done += batch.num_rows
                if batch.num_rows:
                    yield batch, done
        except (pa.ArrowException, OSError) as error:
            raise ReplayError(self.path, str(error).splitlines()[0], done + 1) from error
