"""Reads several files of one job, one for each rank, host or period, as if they were one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from rankwatch_detectors.base import Bools, Floats, Ints
from rankwatch_service.replay.layout import ReplayError
from rankwatch_service.replay.rows import RowBlock, RowReader, runs
from rankwatch_service.replay.timeline import Timeline
from rankwatch_service.telemetry.columns import Exact, Records

SLICE: Final = 1.0
"""Rows of so many seconds (of one step, in files without times) are merged at a time."""


@dataclass(slots=True)
class _Cursor:
    """The reading position in one file."""

    stream: Iterator[RowBlock]
    timeline: Timeline
    rows: RowBlock | None = None
    key: Floats | None = None
    at: int = 0

    def advance(self) -> bool:
        """Read until there is a next row; False at the end of the file."""
        if self.rows is None or self.at >= len(self.rows.records.step):
            self.rows, self.at = next(self.stream, None), 0
            if self.rows is not None:
                steps = np.maximum.accumulate(self.rows.records.step).astype(np.float64)
                if self.rows.time_s is None:
                    self.key = steps
                else:
                    self.key = self.timeline.of(self.rows)
                    self.rows = replace(self.rows, time_s=self.key)
        return self.rows is not None

    @property
    def head(self) -> float:
        assert self.key is not None
        return float(self.key[self.at])


def merged(readers: Sequence[RowReader]) -> Iterator[RowBlock]:
    """The rows of all files, in the order of their times.

    Raises:
        ReplayError: some files have times and some have none, or one of them is wrong.
    """
    if len(readers) == 1:
        yield from readers[0].rows()
        return
    timed = ["time_s" in reader.known for reader in readers]
    if any(timed) and not all(timed):
        raise ReplayError(readers[timed.index(False)].path, "missing, and other files have it", column="time_s")
    cursors = [_Cursor(reader.rows(), Timeline()) for reader in readers]
    done = dict.fromkeys(range(len(readers)), 0)
    while heads := [(cursor.head, index) for index, cursor in enumerate(cursors) if cursor.advance()]:
        limit = min(heads)[0] + SLICE
        parts = []
        for _, index in heads:
            cursor = cursors[index]
            while cursor.advance() and cursor.head < limit:
                assert cursor.rows is not None
                assert cursor.key is not None
                end = int(np.searchsorted(cursor.key, limit, side="left"))
                parts.append(cursor.rows.part(cursor.at, end))
                done[index], cursor.at = cursor.rows.done, end
        yield _joined(parts, sum(done.values()))


def _joined(parts: Sequence[RowBlock], done: int) -> RowBlock:
    """Joins parts of several files; a column that a file lacks is not measured there.

    Errors that are found later name the first of the files, and the row in it where its part begins.
    """
    sizes = [len(part.records.step) for part in parts]
    names = tuple(dict.fromkeys(name for part in parts for name in part.records.names))
    values, present = np.zeros((len(names), sum(sizes))), np.zeros((len(names), sum(sizes)), dtype=np.bool_)
    codes, known = np.zeros(sum(sizes), dtype=np.int64), dict[str, int]()
    begin = 0
    for part, size in zip(parts, sizes, strict=True):
        records = part.records
        for row, name in enumerate(records.names):
            to = names.index(name)
            values[to, begin : begin + size] = records.values[row]
            present[to, begin : begin + size] = True if records.present is None else records.present[row]
        for text, at in part.attempts:
            codes[begin + at : begin + size] = known.setdefault(text, len(known))
        begin += size
    times = None if parts[0].time_s is None else np.concatenate([_told(part.time_s) for part in parts])
    joined = Records(
        step=np.concatenate([part.records.step for part in parts]),
        rank=np.concatenate([part.records.rank for part in parts]),
        kind=np.concatenate([part.records.kind for part in parts]),
        names=names,
        values=values,
        present=present,
        exact={name: _exact(parts, name) for name in dict.fromkeys(n for p in parts for n in p.records.exact)},
    )
    # Within an attempt the order of files says nothing; of two attempts the one comes first whose rows begin earlier.
    key = joined.step if times is None else times
    began = np.arange(len(known)) if times is None else [times[codes == code].min() for code in range(len(known))]
    place = np.empty(len(known), dtype=np.int64)
    place[np.argsort(began, kind="stable")] = np.arange(len(known))
    order = np.lexsort((key, place[codes]))
    hardware = {name: _texts(parts, name) for name in dict.fromkeys(n for p in parts for n in p.hardware)}
    places = {name: _column(parts, name) for name in dict.fromkeys(n for p in parts for n in p.places)}
    return RowBlock(
        path=parts[0].path,
        first_row=parts[0].first_row,
        time_s=None if times is None else times[order],
        attempts=runs(list(known), codes[order]),
        records=joined.rows(order),
        places={name: column[order] for name, column in places.items()},
        hardware={name: (known_texts, which[order]) for name, (known_texts, which) in hardware.items()},
        done=done,
    )


def _told(time_s: Floats | None) -> Floats:
    assert time_s is not None
    return time_s


def _exact(parts: Sequence[RowBlock], name: str) -> Exact:
    values: list[Ints] = []
    present: list[Bools] = []
    for part in parts:
        rows, column = len(part.records.step), part.records.exact.get(name)
        values.append(np.zeros(rows, dtype=np.int64) if column is None else column.values)
        everywhere = np.full(rows, column is not None)
        present.append(everywhere if column is None or column.present is None else column.present)
    return Exact(np.concatenate(values), np.concatenate(present))


def _column(parts: Sequence[RowBlock], name: str) -> Ints:
    return np.concatenate([part.places.get(name, np.zeros(len(part.records.step), np.int64)) for part in parts])


def _texts(parts: Sequence[RowBlock], name: str) -> tuple[list[str], Ints]:
    known: dict[str, int] = {}
    codes = []
    for part in parts:
        names, which = part.hardware.get(name) or ([""], np.zeros(len(part.records.step), dtype=np.int64))
        numbers = np.asarray([known.setdefault(text, len(known)) for text in names], dtype=np.int64)
        codes.append(numbers[which])
    return list(known), np.concatenate(codes)
