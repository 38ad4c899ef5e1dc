"""Which file is read by what."""

from __future__ import annotations

from pathlib import Path

from rankwatch_service.replay.layout import ReplayError
from rankwatch_service.replay.rows import Source

EVENT_FILE = "events.out.tfevents"


def open_source(path: Path) -> Source:
    """Open a CSV, Parquet or TensorBoard event file, by its name.

    Raises:
        ReplayError: it is not there, cannot be read, or the extra that reads it is not installed.
    """
    if not path.is_file():
        raise ReplayError(str(path), "there is no such file")
    try:
        if EVENT_FILE in path.name:
            from rankwatch_service.replay.tensorboard_file import TensorBoardFile  # noqa: PLC0415 - an extra

            return TensorBoardFile(path)
        if path.suffix in (".parquet", ".pq"):
            from rankwatch_service.replay.parquet_file import ParquetFile  # noqa: PLC0415 - an extra

            return ParquetFile(path)
        from rankwatch_service.replay.csv_file import CsvFile  # noqa: PLC0415 - an extra

        return CsvFile(path)
    except ImportError as error:
        extra = "tensorboard" if (error.name or "").startswith("tensorboard") else "replay"
        raise ReplayError(str(path), f"needs a further package: pip install 'rankwatch[{extra}]'") from error
    except OSError as error:
        raise ReplayError(str(path), str(error)) from error
