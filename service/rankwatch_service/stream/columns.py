"""Columns as they travel become numpy arrays. Pure; everything that does not fit is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from rankwatch import wire
from rankwatch_detectors.base import Bools, Floats, Ints

ROWS_MAX: Final = 65_536
"""Rows in one table: 64 steps of 1,024 ranks."""

COLUMNS_MAX: Final = 160
"""Columns in one table: 64 metrics, 64 phases and the known ones."""

EXACT: Final[tuple[str, ...]] = ("fingerprint", "nonfinite", "nonfinite_first")
"""Columns whose bits count: they stay integers."""

NOT_METRICS: Final = frozenset({"step", "rank", "kind", "time_unix_ns", "relative_step", *EXACT})
"""Columns that are not in `Records.values`. Agents' clocks and their count of steps are for display; nothing here reads
them."""

_DTYPES: Final = {name: np.dtype(f"<{name}") for name in ("u1", "u2", "u4", "i8", "f4", "f8")}


class ColumnError(Exception):
    """A column that does not fit its table."""


@dataclass(frozen=True, slots=True)
class Exact:
    """An integer column; `present` None means that every row has it."""

    values: Ints
    present: Bools | None


@dataclass(frozen=True, slots=True)
class Records:
    """The rows of a table. Everything is indexed by row, in the order of sending."""

    step: Ints
    rank: Ints
    kind: NDArray[np.uint8]
    """0 train, 1 eval, 2 checkpoint."""
    names: tuple[str, ...]
    values: Floats
    """[name, row]."""
    present: Bools | None
    """[name, row]; None: everything is present."""
    exact: dict[str, Exact]

    def rows(self, chosen: NDArray[np.intp]) -> Records:
        """The chosen rows, in that order."""
        exact = {
            name: Exact(column.values[chosen], None if column.present is None else column.present[chosen])
            for name, column in self.exact.items()
        }
        present = None if self.present is None else self.present[:, chosen]
        return Records(
            self.step[chosen], self.rank[chosen], self.kind[chosen], self.names, self.values[:, chosen], present, exact
        )


def records(*tables: wire.Table) -> Records:
    """Read tables of one family as one, row after row; a column that some of them lack is absent in their rows.

    A hundred small tables read together cost little more than one large one.

    Raises:
        ColumnError: a length, type, mask or name does not fit.
    """
    for table in tables:
        if not 0 <= table.rows <= ROWS_MAX:
            raise ColumnError(f"{table.rows} rows; at most {ROWS_MAX} are accepted")
        if len(table.columns) > COLUMNS_MAX:
            raise ColumnError(f"{len(table.columns)} columns; at most {COLUMNS_MAX} are accepted")
    columns = _by_name(tables)
    reader = _Reader([table.rows for table in tables])
    step, rank = reader.required("step", columns), reader.required("rank", columns)
    names = tuple(name for name in columns if name not in NOT_METRICS)
    _check_names(names)
    values = np.empty((len(names), reader.total))
    masks = [reader.floats(name, columns[name], values[index]) for index, name in enumerate(names)]
    present = None if all(mask is None for mask in masks) else np.ones(values.shape, dtype=bool)
    for index, mask in enumerate(masks):
        if present is not None and mask is not None:
            present[index] = mask
    exact = {name: reader.exact(name, columns[name]) for name in EXACT if name in columns}
    return Records(step, rank, reader.kind(columns), names, values, present, exact)


_Parts = Sequence[wire.Column | None]
"""A column of each table; None where a table lacks it."""


def _by_name(tables: Sequence[wire.Table]) -> dict[str, _Parts]:
    """The columns of all tables, in the order in which their names first appear."""
    shapes = dict.fromkeys([tuple(table.columns) for table in tables])
    if len(shapes) == 1:
        return dict(zip(*shapes, zip(*[table.columns.values() for table in tables], strict=True), strict=True))
    names = dict.fromkeys(name for shape in shapes for name in shape)
    return {name: [table.columns.get(name) for table in tables] for name in names}


@lru_cache(maxsize=1_024)
def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        if not name or len(name.encode()) > wire.METRIC_NAME_BYTES_MAX or not name.isprintable():
            raise ColumnError(f"metric name {name[:80]!r}: 1 to {wire.METRIC_NAME_BYTES_MAX} printable bytes")


class _Reader:
    """Reads one column of all tables at a time."""

    def __init__(self, rows: list[int]) -> None:
        self.total = sum(rows)
        self._rows = rows
        self._bytes = {size: [size * count for count in rows] for size in (1, 2, 4, 8)}

    def floats(self, name: str, parts: _Parts, into: Floats) -> Bools | None:
        """Read a metric into an array; returns where it is present, None = everywhere."""
        cells, bases, present = self._read(name, parts)
        into[:] = cells
        if any(bases):
            into += np.repeat(np.array([float(base) for base in bases]), self._rows)
        return present

    def exact(self, name: str, parts: _Parts) -> Exact:
        """Read a column of integers."""
        cells, bases, present = self._read(name, parts)
        if cells.dtype.kind == "f":
            raise ColumnError(f"column {name!r} must hold integers")
        values = cells.astype(np.int64)
        if any(bases):
            self._check_bases(name, values, bases)
            values += np.repeat(np.array(bases, dtype=np.int64), self._rows)
        return Exact(values, present)

    def required(self, name: str, columns: Mapping[str, _Parts]) -> Ints:
        """Read a column of integers that every row has."""
        if name not in columns:
            raise ColumnError(f"there is no column {name!r}")
        column = self.exact(name, columns[name])
        if column.present is not None and not column.present.all():
            raise ColumnError(f"column {name!r} must be present in every row")
        return column.values

    def kind(self, columns: Mapping[str, _Parts]) -> NDArray[np.uint8]:
        """Read the kinds of steps; where none is told it is training."""
        if "kind" not in columns:
            return np.zeros(self.total, dtype=np.uint8)
        column = self.exact("kind", columns["kind"])
        kind = np.minimum(column.values.view(np.uint64), 255).astype(np.uint8)
        return kind if column.present is None else np.where(column.present, kind, np.uint8(0))

    def _read(self, name: str, parts: _Parts) -> tuple[NDArray[Any], list[int], Bools | None]:
        """A column's cells as they travel, the base of each table, and where cells are present (None = everywhere)."""
        if None in parts:
            return self._read_each(name, parts)
        columns = cast("Sequence[wire.Column]", parts)
        dtypes = {column.dtype for column in columns}
        if len(dtypes) > 1:
            return self._read_each(name, parts)
        dtype = _dtype(name, dtypes.pop())
        data = [column.data for column in columns]
        if list(map(len, data)) != self._bytes[dtype.itemsize]:
            _refuse_lengths(name, columns, self._rows)
        masks = [column.mask for column in columns]
        present = None
        if masks.count(None) < len(masks):
            present = np.concatenate([_bits(name, mask, rows) for mask, rows in zip(masks, self._rows, strict=True)])
        return np.frombuffer(b"".join(data), dtype), [column.base for column in columns], present

    def _read_each(self, name: str, parts: _Parts) -> tuple[NDArray[Any], list[int], Bools | None]:
        """The same where tables do not agree on the type, or some of them lack the column."""
        cells: list[NDArray[Any]] = []
        present: list[Bools] = []
        for part, rows in zip(parts, self._rows, strict=True):
            if part is None:
                cells.append(np.zeros(rows, dtype=np.uint8))
                present.append(np.zeros(rows, dtype=bool))
            else:
                dtype = _dtype(name, part.dtype)
                if len(part.data) != rows * dtype.itemsize:
                    _refuse_lengths(name, [part], [rows])
                cells.append(np.frombuffer(part.data, dtype))
                present.append(_bits(name, part.mask, rows))
        everywhere = np.concatenate(present)
        common = np.float64 if any(part.dtype.kind == "f" for part in cells) else np.int64
        return (
            np.concatenate(cells, dtype=common),
            [0 if part is None else part.base for part in parts],
            None if everywhere.all() else everywhere,
        )

    def _check_bases(self, name: str, values: Ints, bases: list[int]) -> None:
        # Fingerprints use all 64 bits; the usual small columns cannot overflow.
        if max(map(abs, bases)) < 2**62 and (not self.total or int(np.abs(values).max()) < 2**62):
            return
        start = 0
        for base, rows in zip(bases, self._rows, strict=True):
            part, start = values[start : start + rows], start + rows
            low, high = (int(part.min()), int(part.max())) if rows else (0, 0)
            if not (base + low >= -(2**63) and base + high < 2**63 and -(2**63) <= base < 2**63):
                raise ColumnError(f"column {name!r}: base {base} is out of range")


def _dtype(name: str, dtype: str) -> np.dtype[Any]:
    found = _DTYPES.get(dtype)
    if found is None:
        raise ColumnError(f"column {name[:80]!r}: unknown dtype {dtype[:20]!r}")
    return found


def _refuse_lengths(name: str, columns: Sequence[wire.Column], rows: Sequence[int]) -> NoReturn:
    for column, count in zip(columns, rows, strict=True):
        if len(column.data) != count * _DTYPES[column.dtype].itemsize:
            raise ColumnError(f"column {name[:80]!r}: {len(column.data)} bytes for {count} rows of {column.dtype}")
    raise AssertionError("some length does not fit")


def _bits(name: str, mask: bytes | None, rows: int) -> Bools:
    if mask is None:
        return np.ones(rows, dtype=bool)
    if len(mask) != (rows + 7) // 8:
        raise ColumnError(f"column {name[:80]!r}: {len(mask)} bytes of mask for {rows} rows")
    return np.unpackbits(np.frombuffer(mask, np.uint8), count=rows, bitorder="little").astype(bool)
