"""Sources whose files are read by a child, a batch for each question, and that child."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from rankwatch_service.foreign_files import ForeignReader, ReaderEndedError, answer
from rankwatch_service.replay.layout import ReplayError
from rankwatch_service.replay.rows import FileSource
from rankwatch_service.replay.sources import open_source


class ForeignFile:
    """A file as its reader process describes it; see `FileSource`."""

    def __init__(self, reader: ForeignReader, path: Path, mapping: Mapping[str, str]) -> None:
        """Read the header.

        Raises:
            ReplayError: see `open_source`; also if the reader ends.
        """
        self.path = str(path)
        self._reader = reader
        reported, _ = self._ask("open", str(path.absolute()), sorted({*mapping, *mapping.values()}))
        self.names: list[str] = reported["names"]
        self.left_out: list[str] = reported["left_out"]
        self.total: int = reported["total"]
        self._index: int = reported["index"]

    def batches(self) -> Iterator[tuple[Any, int]]:
        """See `FileSource.batches`.

        Raises:
            ReplayError: a part of the file cannot be read, or the reader ends.
        """
        while True:
            reported, body = self._ask("next", self._index)
            if reported["done"] is None:
                return
            yield pa.ipc.open_stream(body).read_next_batch(), reported["done"]

    def _ask(self, *question: object) -> tuple[Any, bytes]:
        try:
            reported, body = self._reader.ask(*question)
        except ReaderEndedError as error:
            raise ReplayError(self.path, str(error)) from error
        if "wrong" in reported:
            raise ReplayError(self.path, *reported["wrong"])
        return reported, body


class _Files:
    """What the child has open."""

    def __init__(self) -> None:
        self._open: list[Iterator[tuple[Any, int]]] = []

    def answer(self, question: list[Any]) -> tuple[Any, Any]:
        try:
            if question[0] == "next":
                return self._next(question[1])
            return self._opened(open_source(Path(question[1]), question[2])), b""
        except ReplayError as error:
            return {"wrong": [error.what, error.row, error.column]}, b""

    def _opened(self, source: FileSource) -> Any:
        self._open.append(source.batches())
        reported = {"names": source.names, "left_out": source.left_out, "total": source.total}
        return reported | {"index": len(self._open) - 1}

    def _next(self, index: int) -> tuple[Any, Any]:
        batch, done = next(self._open[index], (None, None))
        if batch is None:
            return {"done": None}, b""
        packed = pa.BufferOutputStream()
        with pa.ipc.new_stream(packed, batch.schema) as stream:
            stream.write_batch(batch)
        return {"done": done}, packed.getvalue()


if __name__ == "__main__":
    answer(_Files().answer)
