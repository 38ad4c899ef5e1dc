"""Converts rows of records to the wire's columnar `Table`, without numpy.

A column takes the narrowest type that keeps its values: integers as the difference to their minimum, floats as f4
unless that would lose digits (`_float_column`). Each name is a column; a row without a value has a cleared mask bit.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from math import isinf
from typing import Final, TypeVar

from rankwatch.wire import Column, Table

CELLS_MAX: Final = 300_000
"""Rows x columns of one table: 2.4 MB at 8 bytes a cell. Two tables and `draft.BULK_BYTES_MAX` stay below the 8 MB that
the service accepts as a message."""

F4_EXACT_MAX: Final = 2.0**24
"""Above this f4 cannot hold every integer: token counts and user counters would be rounded."""
F4_NORMAL_MIN: Final = 2.0**-126
"""Below this f4 loses digits."""

Cell = TypeVar("Cell", int, float)

_UNSIGNED: Final = (("u1", "B", 0xFF), ("u2", "H", 0xFFFF), ("u4", "I", 0xFFFF_FFFF))


class Rows:
    """Collects the rows of one table in the order in which they come."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._ranks: list[int] = []
        self._floats: dict[str, tuple[list[int], list[float]]] = {}
        self._integers: dict[str, tuple[list[int], list[int]]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def full(self) -> bool:
        """True when this table should be sent before more rows are added."""
        return len(self._steps) * (2 + len(self._floats) + len(self._integers)) >= CELLS_MAX

    def add(self, step: int, rank: int, floats: Iterable[tuple[str, float]], integers: Mapping[str, int]) -> None:
        """Add one record. NaN is a value; leave out what was not measured."""
        row = len(self._steps)
        self._steps.append(step)
        self._ranks.append(rank)
        for name, value in floats:
            column = self._floats.get(name)
            if column is None:
                column = self._floats[name] = ([], [])
            column[0].append(row)
            column[1].append(value)
        for name, number in integers.items():
            exact = self._integers.get(name)
            if exact is None:
                exact = self._integers[name] = ([], [])
            exact[0].append(row)
            exact[1].append(number)

    def table(self) -> Table | None:
        """Everything added so far as one table; None without rows."""
        count = len(self._steps)
        if not count:
            return None
        columns = {"step": _integer_column(self._steps, None), "rank": _integer_column(self._ranks, None)}
        for name in self._integers.keys() & self._floats.keys():
            # One rank logs this metric as an integer and another as a float: a column has one type, so all are floats.
            rows, numbers = self._integers.pop(name)
            more, floats = self._floats[name]
            both = sorted([*zip(rows, map(float, numbers), strict=True), *zip(more, floats, strict=True)])
            self._floats[name] = [row for row, _ in both], [value for _, value in both]
        for name, (rows, numbers) in self._integers.items():
            # Absent cells hold the base, so that they do not widen the column.
            base = min(numbers)
            mask, cells = _spread(rows, numbers, count, base)
            columns[name] = _integer_column(cells, mask)
        for name, (rows, values) in self._floats.items():
            mask, measured = _spread(rows, values, count, 0.0)
            columns[name] = _float_column(measured, mask)
        return Table(count, columns)


def _spread(rows: list[int], values: list[Cell], count: int, absent: Cell) -> tuple[bytes | None, list[Cell]]:
    """Put values at their rows; the mask is None when every row has one."""
    if len(rows) == count:
        return None, values
    cells = [absent] * count
    mask = bytearray((count + 7) // 8)
    for row, value in zip(rows, values, strict=True):
        cells[row] = value
        mask[row >> 3] |= 1 << (row & 7)
    return bytes(mask), cells


def _integer_column(values: list[int], mask: bytes | None) -> Column:
    base = min(values)
    spread = max(values) - base
    for dtype, code, limit in _UNSIGNED:
        if spread <= limit:
            return Column(dtype, struct.pack(f"<{len(values)}{code}", *(value - base for value in values)), base, mask)
    return Column("i8", struct.pack(f"<{len(values)}q", *values), 0, mask)


def _float_column(values: list[float], mask: bytes | None) -> Column:
    code = "d" if any(_needs_f8(value) for value in values) else "f"
    return Column("f8" if code == "d" else "f4", struct.pack(f"<{len(values)}{code}", *values), 0, mask)


def _needs_f8(value: float) -> bool:
    size = abs(value)
    return (size > F4_EXACT_MAX and not isinf(size)) or 0.0 < size < F4_NORMAL_MIN
