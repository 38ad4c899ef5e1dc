"""Columns as they travel become numpy arrays. Pure; everything that does not fit is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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

NOT_METRICS: Final = frozenset({"step", "rank", "kind", "time_unix_ns", *EXACT})
"""Columns that are not in `Records.values`. Agents' clocks are for display; nothing here reads them."""

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


def records(table: wire.Table) -> Records:
    """Read a table.

    Raises:
        ColumnError: a length, type, mask or name does not fit.
    """
    if not 0 <= table.rows <= ROWS_MAX:
        raise ColumnError(f"{table.rows} rows; at most {ROWS_MAX} are accepted")
    if len(table.columns) > COLUMNS_MAX:
        raise ColumnError(f"{len(table.columns)} columns; at most {COLUMNS_MAX} are accepted")
    step = _required(table, "step")
    rank = _required(table, "rank")
    names = tuple(name for name in table.columns if name not in NOT_METRICS)
    values = np.empty((len(names), table.rows))
    masks = [_mask(name, table.columns[name], table.rows) for name in names]
    present = None if all(mask is None for mask in masks) else np.ones((len(names), table.rows), dtype=bool)
    for index, (name, mask) in enumerate(zip(names, masks, strict=True)):
        if not name or len(name.encode()) > wire.METRIC_NAME_BYTES_MAX or not name.isprintable():
            raise ColumnError(f"metric name {name[:80]!r}: 1 to {wire.METRIC_NAME_BYTES_MAX} printable bytes")
        column = table.columns[name]
        values[index] = _array(name, column, table.rows)
        if column.base:
            values[index] += column.base
        if present is not None and mask is not None:
            present[index] = mask
    exact = {name: _exact(name, table.columns[name], table.rows) for name in EXACT if name in table.columns}
    return Records(step, rank, _kind(table), names, values, present, exact)


def _required(table: wire.Table, name: str) -> Ints:
    column = table.columns.get(name)
    if column is None:
        raise ColumnError(f"there is no column {name!r}")
    if column.mask is not None and not bool(np.all(_mask(name, column, table.rows))):
        raise ColumnError(f"column {name!r} must be present in every row")
    return _exact(name, column, table.rows).values


def _exact(name: str, column: wire.Column, rows: int) -> Exact:
    if column.dtype in ("f4", "f8"):
        raise ColumnError(f"column {name!r} must hold integers")
    values = _array(name, column, rows).astype(np.int64)
    if column.base:
        low, high = (int(values.min()), int(values.max())) if rows else (0, 0)
        # Fingerprints use all 64 bits.
        if not (column.base + low >= -(2**63) and column.base + high < 2**63 and -(2**63) <= column.base < 2**63):
            raise ColumnError(f"column {name!r}: base {column.base} is out of range")
        values += column.base
    return Exact(values, _mask(name, column, rows))


def _kind(table: wire.Table) -> NDArray[np.uint8]:
    column = table.columns.get("kind")
    if column is None:
        return np.zeros(table.rows, dtype=np.uint8)
    exact = _exact("kind", column, table.rows)
    kind = np.minimum(exact.values.view(np.uint64), 255).astype(np.uint8)
    return kind if exact.present is None else np.where(exact.present, kind, np.uint8(0))


def _array(name: str, column: wire.Column, rows: int) -> NDArray[np.generic]:
    dtype = _DTYPES.get(column.dtype)
    if dtype is None:
        raise ColumnError(f"column {name[:80]!r}: unknown dtype {column.dtype[:20]!r}")
    if len(column.data) != rows * dtype.itemsize:
        raise ColumnError(f"column {name[:80]!r}: {len(column.data)} bytes for {rows} rows of {column.dtype}")
    return np.frombuffer(column.data, dtype)


def _mask(name: str, column: wire.Column, rows: int) -> Bools | None:
    if column.mask is None:
        return None
    if len(column.mask) != (rows + 7) // 8:
        raise ColumnError(f"column {name[:80]!r}: {len(column.mask)} bytes of mask for {rows} rows")
    return np.unpackbits(np.frombuffer(column.mask, np.uint8), count=rows, bitorder="little").astype(bool)
