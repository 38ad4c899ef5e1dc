"""Chooses the reader of a file by its first bytes, since names are often wrong."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

from rankwatch_service.replay.layout import ReplayError
from rankwatch_service.replay.rows import FileSource

EVENT_FILE: Final = "events.out.tfevents"
PARQUET: Final = b"PAR1"
ZIP: Final = b"PK\x03\x04"


HEADER_NAMES_MAX: Final = 10_000
"""Most columns of a file."""


def open_source(path: Path, mapped: Collection[str] = ()) -> FileSource:
    """Open a CSV, Parquet or TensorBoard event file.

    Args:
        path: of the file.
        mapped: names of columns that are read whatever they hold, beside the known ones.

    Raises:
        ReplayError: it is not there, cannot be read, has too many columns, or the extra that reads it is not installed.
    """
    source = _opened(path, mapped)
    if len(source.names) > HEADER_NAMES_MAX:
        raise ReplayError(str(path), f"has {len(source.names):,} columns; at most {HEADER_NAMES_MAX:,} are read")
    return source


def _opened(path: Path, mapped: Collection[str]) -> FileSource:
    if path.is_dir():
        raise ReplayError(str(path), "is a folder; name the files in it")
    if not path.is_file():
        raise ReplayError(str(path), "there is no such file" if not path.exists() else "is not a regular file")
    try:
        with path.open("rb") as file:
            head = file.read(len(PARQUET))
        if head == ZIP:
            raise ReplayError(str(path), "is an archive or a workbook; unpack it or save it as CSV")
        if EVENT_FILE in path.name:
            from rankwatch_service.replay.files import TensorBoardFile  # noqa: PLC0415 - an extra

            return TensorBoardFile(path)
        if head == PARQUET or path.suffix in (".parquet", ".pq"):
            from rankwatch_service.replay.files import ParquetFile  # noqa: PLC0415 - an extra

            return ParquetFile(path, mapped)
        from rankwatch_service.replay.files import CsvFile  # noqa: PLC0415 - an extra

        return CsvFile(path)
    except ImportError as error:
        raise ReplayError(str(path), "needs another package: pip install 'rankwatch[replay]'") from error
    except OSError as error:
        raise ReplayError(str(path), error.strerror or str(error)) from error
