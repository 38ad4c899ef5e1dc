"""Writes a synthetic job to a file that `rankwatch replay` reads: Parquet, CSV, or CSV compressed with gzip.

The labels, which a perfect detector would report, are written to NAME.labels.json beside it. `BLOCK_ROWS` bounds the
memory, however long the job is.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

import numpy as np

from rankwatch_detectors.base import Kind
from rankwatch_service.replay.report import NOT_IN_FILES
from rankwatch_service.simulate.faults import Label
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.rows import INTEGERS, TEXTS, StepRows, columns_of, rows_of

BLOCK_ROWS: Final = 131_072
"""Rows of one Parquet row group, or of one step if it has more: with 24 columns of 8 bytes, 25 MB."""

FORMATS: Final = (".parquet", ".csv", ".csv.gz")


class SimulateError(Exception):
    """The job cannot be written; the message says why."""


class _Writer(Protocol):
    def write(self, block: list[StepRows]) -> None: ...

    def close(self) -> None: ...


def write_job(job: Job, path: Path, name: str = "", progress: Callable[[int], None] = lambda _rows: None) -> int:
    """Write a job and its labels; files of these names are replaced once the whole job is written.

    Args:
        job: the job.
        path: the file; its ending, one of `FORMATS`, decides the format.
        name: the job's name in the labels; if empty, the file's name.
        progress: called after each block with the number of rows written.

    Returns:
        The number of rows.

    Raises:
        SimulateError: the file's name has another ending, or the library for Parquet is missing.
        OSError: the file cannot be written.
    """
    ending = _ending(path)
    # Written beside the old file and renamed, so that a reader never sees a part of it.
    fresh = path.with_name(f".{path.name}.new")
    rows = 0
    try:
        with _Closing(_open(ending, fresh, columns_of(job))) as writer:
            for block in _blocks(rows_of(job)):
                writer.write(block)
                rows += sum(part.count for part in block)
                progress(rows)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    labels = labels_of(job, name or path.name.removesuffix(ending))
    labels_path(path).write_text(json.dumps(labels, indent=1) + "\n")
    return rows


def labels_path(path: Path) -> Path:
    """The path of the labels of the job in this file."""
    return path.with_name(f"{path.name.removesuffix(_ending(path))}.labels.json")


def _ending(path: Path) -> str:
    ending = next((ending for ending in FORMATS if path.name.endswith(ending)), None)
    if ending is None:
        raise SimulateError(f"{path}: the name must end in {', '.join(FORMATS)}")
    return ending


def labels_of(job: Job, name: str) -> dict[str, Any]:
    """The labels file: the job, the faults that should be found, and those that the file cannot show."""
    labels = list(map(_as_in_file, job.played_labels()))
    return {
        "job": name,
        "ranks": job.world_size,
        "steps": job.steps,
        "start_step": job.start_step,
        "seed": job.seed,
        "step_s": job.step_s,
        "noise": job.noise.busy,
        "tp": job.placement.tp,
        "pp": job.placement.pp,
        "ranks_per_host": job.placement.ranks_per_host,
        "hosts_per_switch": job.placement.hosts_per_switch,
        "faults": [asdict(label) for label in labels if label.kind not in NOT_IN_FILES],
        "not_in_file": [asdict(label) for label in labels if label.kind in NOT_IN_FILES],
    }


def _as_in_file(label: Label) -> Label:
    """A device that is slowed down shows in a file as its slow rank alone."""
    return replace(label, kind=Kind.STRAGGLER) if label.kind is Kind.DEVICE_DEGRADED else label


class _Closing:
    """Closes a writer whatever happens."""

    def __init__(self, writer: _Writer) -> None:
        self._writer = writer

    def __enter__(self) -> _Writer:
        return self._writer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()


def _blocks(steps: Iterator[StepRows]) -> Iterator[list[StepRows]]:
    block: list[StepRows] = []
    rows = 0
    for step in steps:
        block.append(step)
        rows += step.count
        if rows >= BLOCK_ROWS:
            yield block
            block, rows = [], 0
    if block:
        yield block


def _open(ending: str, path: Path, names: tuple[str, ...]) -> _Writer:
    if ending == ".parquet":
        return _Parquet(path, names)
    return _Csv(path, names, packed=ending == ".csv.gz")


class _Csv:
    def __init__(self, path: Path, names: tuple[str, ...], *, packed: bool) -> None:
        self._raw = path.open("wb")
        # No name and no time in the gzip header, so that equal seeds give equal files.
        packer = gzip.GzipFile("", "wb", 5, self._raw, mtime=0) if packed else self._raw
        self._file = io.TextIOWrapper(packer, "ascii", newline="\n")
        self._names = names
        self._file.write(",".join(names) + "\n")

    def write(self, block: list[StepRows]) -> None:
        for rows in block:
            self._file.writelines(",".join(line) + "\n" for line in zip(*self._texts(rows), strict=True))

    def _texts(self, rows: StepRows) -> Iterator[list[str]]:
        """Each column as text: "" is "not measured", nan and inf are values."""
        for name in self._names:
            column = rows.columns.get(name)
            if column is None:
                yield [""] * rows.count
                continue
            texts = [str(value) for value in column.tolist()]
            here = rows.here.get(name)
            yield texts if here is None else [text if known else "" for text, known in zip(texts, here, strict=True)]

    def close(self) -> None:
        self._file.close()
        self._raw.close()


class _Parquet:
    def __init__(self, path: Path, names: tuple[str, ...]) -> None:
        try:
            import pyarrow as pa  # noqa: PLC0415 - an extra
            from pyarrow import parquet  # noqa: PLC0415
        except ImportError as error:
            raise SimulateError("Parquet needs the extra: pip install 'rankwatch[replay]'; CSV does not") from error
        self._pa = pa
        text = pa.dictionary(pa.int32(), pa.string())
        types = {name: text if name in TEXTS else pa.int64() if name in INTEGERS else pa.float64() for name in names}
        self._schema = pa.schema(list(types.items()))
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd", write_page_checksum=True)

    def write(self, block: list[StepRows]) -> None:
        columns = [self._column(field, block) for field in self._schema]
        self._writer.write_table(self._pa.Table.from_arrays(columns, schema=self._schema))

    def _column(self, field: Any, block: list[StepRows]) -> Any:
        parts, missing = [], []
        for rows in block:
            column = rows.columns.get(field.name)
            if column is None:
                parts.append(np.zeros(rows.count))
                missing.append(np.ones(rows.count, dtype=bool))
            else:
                here = rows.here.get(field.name)
                parts.append(column)
                missing.append(np.zeros(rows.count, dtype=bool) if here is None else ~here)
        if field.name in TEXTS:
            return self._pa.array(np.concatenate(parts), self._pa.string()).dictionary_encode().cast(field.type)
        dtype = np.int64 if field.name in INTEGERS else np.float64
        whole = np.concatenate([part.astype(dtype) for part in parts])
        return self._pa.array(whole, field.type, mask=np.concatenate(missing))

    def close(self) -> None:
        self._writer.close()
