"""Decodes the columns of wire tables into numpy arrays, and refuses invalid ones. Pure.

The messages of a job differ in their numbers and in hardly anything else. So one table is decoded to see where its
numbers are, and other tables of the same length are compared with it. If all other bytes are equal, names, types and
lengths are equal too, and a column of all these tables is a rectangle in the stack of their bytes. This avoids decoding
most tables, which would cost more than everything else that is done with them (decision 0012).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankwatch import wire
from rankwatch_detectors.base import Bools, Floats, Ints

ROWS_MAX: Final = 65_536
"""Rows in one table: 64 steps of 1,024 ranks."""

COLUMNS_MAX: Final = 160
"""Columns in one table: 64 metrics, 64 phases and the known ones."""

FINGERPRINTS: Final = ("fingerprint", *(f"fingerprint.{number}" for number in range(wire.SLICES_MAX)))
"""Of all parameters of a rank, and of each of its slices."""

EXACT: Final[tuple[str, ...]] = (*FINGERPRINTS, "nonfinite", "nonfinite_first")
"""Columns that stay integers, because every bit counts."""

NOT_METRICS: Final = frozenset({"step", "rank", "kind", "time_unix_ns", "relative_step", *EXACT})
"""Columns that are not in `Records.values`. The service does not read `time_unix_ns` and `relative_step`."""

_DTYPES: Final = {name: np.dtype(f"<{name}") for name in ("u1", "u2", "u4", "i8", "f4", "f8")}


class ColumnError(Exception):
    """A column that does not fit its table."""


@dataclass(frozen=True, slots=True)
class Exact:
    """An integer column, [row]; `present` None: every row has it."""

    values: Ints
    present: Bools | None


@dataclass(frozen=True, slots=True)
class Records:
    """The rows of a table, in the order in which they were sent."""

    step: Ints
    rank: Ints
    kind: NDArray[np.uint8]
    """0 train, 1 eval, 2 checkpoint."""
    names: tuple[str, ...]
    values: Floats
    """[name, row]."""
    present: Bools | None
    """[name, row]; None: every row has every metric."""
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


class Cells(NamedTuple):
    """One column of several tables, table after table."""

    values: NDArray[Any]
    """[row], as on the wire: integers without their base."""
    bases: Sequence[int]
    """[table]: added to the integers of that table."""
    present: Bools | None
    """[row]; None: every row has it."""


@dataclass(frozen=True, slots=True)
class Block:
    """Tables with the same columns of the same types, one after the other."""

    numbers: Sequence[int]
    """[table]: its index among all tables that are read together."""
    rows: Sequence[int]
    """[table]: its number of rows."""
    columns: Mapping[str, Cells]

    @property
    def total(self) -> int:
        """Rows of all tables."""
        return sum(self.rows)


def records(*tables: wire.Table) -> Records:
    """Read tables of one family as one; a column that some of them lack is absent in their rows.

    Raises:
        ColumnError: a length, type, mask or name is invalid.
    """
    return joined(blocks(tables, range(len(tables))))


def blocks(tables: Sequence[wire.Table], numbers: Sequence[int]) -> list[Block]:
    """Group tables with the same columns into blocks.

    Args:
        tables: the tables.
        numbers: the number of each, for `Block.numbers`.

    Raises:
        ColumnError: a length, type or mask is invalid.
    """
    shapes: dict[tuple[Any, ...], list[int]] = {}
    for index, table in enumerate(tables):
        check_size(table.rows, len(table.columns))
        shape = (*table.columns, *[column.dtype for column in table.columns.values()])
        shapes.setdefault(shape, []).append(index)
    return [_block([tables[index] for index in alike], [numbers[i] for i in alike]) for alike in shapes.values()]


def joined(parts: Sequence[Block]) -> Records:
    """The rows of all blocks, block after block; a column that a block lacks is absent in its rows.

    Raises:
        ColumnError: a required column is missing, or a column has an invalid name or invalid numbers.
    """
    found = dict.fromkeys(name for part in parts for name in part.columns)
    columns = {name: [part.columns.get(name) for part in parts] for name in found}
    reader = _Reader(parts)
    step, rank = reader.required("step", columns), reader.required("rank", columns)
    names = tuple(name for name in columns if name not in NOT_METRICS)
    _check_names(names)
    values = np.empty((len(names), reader.total))
    masks = [reader.floats(columns[name], values[index]) for index, name in enumerate(names)]
    present = None if all(mask is None for mask in masks) else np.ones(values.shape, dtype=bool)
    for index, mask in enumerate(masks):
        if present is not None and mask is not None:
            present[index] = mask
    exact = {name: reader.exact(name, columns[name]) for name in EXACT if name in columns}
    return Records(step, rank, reader.kind(columns), names, values, present, exact)


def check_size(rows: int, columns: int) -> None:
    """Check the size of a table.

    Raises:
        ColumnError: it is too large.
    """
    if not 0 <= rows <= ROWS_MAX:
        raise ColumnError(f"{rows} rows; at most {ROWS_MAX} are accepted")
    if columns > COLUMNS_MAX:
        raise ColumnError(f"{columns} columns; at most {COLUMNS_MAX} are accepted")


def type_of(name: str, dtype: str) -> np.dtype[Any]:
    """The NumPy type of a column, from its name on the wire.

    Raises:
        ColumnError: there is no such type.
    """
    found = _DTYPES.get(dtype)
    if found is None:
        raise ColumnError(f"column {name[:80]!r}: unknown dtype {dtype[:20]!r}")
    return found


def check_width(name: str, size: int, rows: int, dtype: np.dtype[Any]) -> None:
    """Check that a column of `size` bytes has as many rows as its table.

    Raises:
        ColumnError: it has not.
    """
    if size != rows * dtype.itemsize:
        raise ColumnError(f"column {name[:80]!r}: {size} bytes for {rows} rows of {dtype}")


def check_mask(name: str, size: int, rows: int) -> None:
    """Check that a mask of `size` bytes has as many bits as its table has rows.

    Raises:
        ColumnError: it has not.
    """
    if size != (rows + 7) // 8:
        raise ColumnError(f"column {name[:80]!r}: {size} bytes of mask for {rows} rows")


def bits(masks: NDArray[np.uint8], rows: int) -> Bools:
    """A bit mask of the rows that are present, table after table. `masks` are [table, byte]; each table has `rows`
    rows.
    """
    return np.unpackbits(masks, axis=1, count=rows, bitorder="little").reshape(-1).astype(bool)


def _block(tables: Sequence[wire.Table], numbers: Sequence[int]) -> Block:
    rows = [table.rows for table in tables]
    names = tables[0].columns
    columns = zip(names, zip(*[table.columns.values() for table in tables], strict=True), strict=True)
    widths = {size: [size * count for count in rows] for size in (1, 2, 4, 8)}
    return Block(numbers, rows, {name: _cells(name, parts, rows, widths) for name, parts in columns})


def _cells(name: str, parts: Sequence[wire.Column], rows: Sequence[int], widths: Mapping[int, Sequence[int]]) -> Cells:
    dtype = type_of(name, parts[0].dtype)
    data = [part.data for part in parts]
    # One comparison for all tables; the loop only finds the table that the error is about.
    if list(map(len, data)) != widths[dtype.itemsize]:
        for part, count in zip(data, rows, strict=True):
            check_width(name, len(part), count, dtype)
    masks = [part.mask for part in parts]
    present = None
    if masks.count(None) < len(masks):
        present = np.concatenate([_present(name, mask, count) for mask, count in zip(masks, rows, strict=True)])
    return Cells(np.frombuffer(b"".join(data), dtype), [part.base for part in parts], present)


def _present(name: str, mask: bytes | None, rows: int) -> Bools:
    if mask is None:
        return np.ones(rows, dtype=bool)
    check_mask(name, len(mask), rows)
    return bits(np.frombuffer(mask, np.uint8).reshape(1, -1), rows)


@lru_cache(maxsize=1_024)
def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        if not name or len(name.encode()) > wire.METRIC_NAME_BYTES_MAX or not name.isprintable():
            raise ColumnError(f"metric name {name[:80]!r}: 1 to {wire.METRIC_NAME_BYTES_MAX} printable bytes")


_Parts = Sequence[Cells | None]
"""A column of each block; None for a block without it."""


class _Reader:
    """Reads one column of all blocks at a time."""

    def __init__(self, parts: Sequence[Block]) -> None:
        self._rows = [part.rows for part in parts]
        bounds = [0, *accumulate(part.total for part in parts)]
        self.total = bounds[-1]
        self._places = [slice(low, high) for low, high in pairwise(bounds)]

    def floats(self, parts: _Parts, into: Floats) -> Bools | None:
        """Read a metric into `into`, [row]; returns the rows that have it, None: all of them."""
        for part, rows, place in zip(parts, self._rows, self._places, strict=True):
            if part is None:
                into[place] = 0.0
                continue
            into[place] = part.values
            if any(part.bases):
                into[place] += np.repeat(np.array([float(base) for base in part.bases]), rows)
        return self._present(parts)

    def exact(self, name: str, parts: _Parts) -> Exact:
        """Read a column of integers with their bases."""
        values = np.zeros(self.total, dtype=np.int64)
        for part, rows, place in zip(parts, self._rows, self._places, strict=True):
            if part is None:
                continue
            if part.values.dtype.kind == "f":
                raise ColumnError(f"column {name!r} must hold integers")
            values[place] = part.values
            if any(part.bases):
                _check_bases(name, values[place], part.bases, rows)
                values[place] += np.repeat(np.array(part.bases, dtype=np.int64), rows)
        return Exact(values, self._present(parts))

    def required(self, name: str, columns: Mapping[str, _Parts]) -> Ints:
        """Read a column of integers that every row has."""
        if name not in columns:
            raise ColumnError(f"there is no column {name!r}")
        column = self.exact(name, columns[name])
        if column.present is not None and not column.present.all():
            raise ColumnError(f"column {name!r} must be present in every row")
        return column.values

    def kind(self, columns: Mapping[str, _Parts]) -> NDArray[np.uint8]:
        """Read the kinds of steps; without the column, all steps are training."""
        if "kind" not in columns:
            return np.zeros(self.total, dtype=np.uint8)
        column = self.exact("kind", columns["kind"])
        # As unsigned numbers, negative kinds are large: they stay out of range in 8 bits too (`telemetry.bundle`).
        kind = np.minimum(column.values.view(np.uint64), 255).astype(np.uint8)
        return kind if column.present is None else np.where(column.present, kind, np.uint8(0))

    def _present(self, parts: _Parts) -> Bools | None:
        for part in parts:
            if part is None or part.present is not None:
                break
        else:
            return None
        present = np.ones(self.total, dtype=bool)
        for part, place in zip(parts, self._places, strict=True):
            if part is None:
                present[place] = False
            elif part.present is not None:
                present[place] = part.present
        return None if present.all() else present


def _check_bases(name: str, values: Ints, bases: Sequence[int], rows: Sequence[int]) -> None:
    # int64 wraps silently. Small numbers cannot overflow; fingerprints use all 64 bits and are checked exactly.
    if max(map(abs, bases)) < 2**62 and (not values.size or int(np.abs(values).max()) < 2**62):
        return
    start = 0
    for base, count in zip(bases, rows, strict=True):
        part, start = values[start : start + count], start + count
        low, high = (int(part.min()), int(part.max())) if count else (0, 0)
        if not (base + low >= -(2**63) and base + high < 2**63 and -(2**63) <= base < 2**63):
            raise ColumnError(f"column {name!r}: base {base} is out of range")


STACK_MIN: Final = 4
"""Fewer tables than this are cheaper to decode one by one."""

LAYOUTS_MAX: Final = 64
"""Layouts remembered. A job has a few for each number of rows; jobs with the same metrics share them."""

FIXED_BYTES_MAX: Final = 32 * 1024
"""Bytes of a remembered layout that are not numbers: 160 columns with the longest names have 14 KB. Each costs 9 bytes,
so all layouts take at most 19 MB, and usually 200 KB."""

_INTEGERS: Final = {
    0xCC: ">u1",
    0xCD: ">u2",
    0xCE: ">u4",
    0xCF: ">u8",
    0xD0: ">i1",
    0xD1: ">i2",
    0xD2: ">i4",
    0xD3: ">i8",
}
"""The type of the integer after it, by first byte in msgpack. A small integer is the first byte itself."""

_SMALLEST: Final = -32
"""The smallest integer that msgpack encodes as one byte."""

Bytes = NDArray[np.uint8]


class _StackedColumn(msgspec.Struct, array_like=True):
    """`wire.Column` as views into the message, whose addresses show where its parts are."""

    dtype: str
    data: memoryview
    base: msgspec.Raw = msgspec.Raw()
    mask: memoryview | None = None


class _Table(msgspec.Struct):
    rows: int
    columns: dict[str, _StackedColumn]


_TABLE: Final = msgspec.msgpack.Decoder(wire.Table)
_PLACES: Final = msgspec.msgpack.Decoder(_Table)


def read_blocks(tables: Sequence[msgspec.Raw]) -> list[Block]:
    """Decode tables into as few blocks as possible. Each block has the indices of its tables.

    Raises:
        ColumnError: a length, type or mask in some table is invalid.
        msgspec.MsgspecError: one of them is not a table.
    """
    by_size: dict[int, list[int]] = {}
    for number, table in enumerate(tables):
        by_size.setdefault(len(memoryview(table)), []).append(number)
    found: list[Block] = []
    single: list[int] = []
    for size, numbers in by_size.items():
        waiting = np.array(numbers)
        while len(waiting) >= STACK_MIN:
            stack = np.frombuffer(b"".join([tables[number] for number in waiting]), np.uint8).reshape(-1, size)
            layout, matching = _layout(tables[waiting[0]], stack)
            if np.count_nonzero(matching) < STACK_MIN:
                break  # tables of one size have more layouts than stacks are worth: decode the rest one by one
            found.append(layout.block(waiting[matching].tolist(), stack if matching.all() else stack[matching]))
            waiting = waiting[~matching]
        single += waiting.tolist()
    single.sort()
    found += blocks([_TABLE.decode(tables[number]) for number in single], single)
    # By first table, so that the joined columns are in the order in which their names were first sent.
    return sorted(found, key=lambda block: block.numbers[0])


@dataclass(frozen=True, slots=True)
class _Column:
    """The places of the parts of a column in the bytes of a table."""

    dtype: np.dtype[Any]
    data: slice
    base: slice
    """If the base is an integer of several bytes, those after the first, which is the same in all tables."""
    base_type: str
    """Type of such an integer; empty if the base is one byte or absent."""
    mask: slice | None


class _Layout:
    """The layout of a table: which bytes are numbers, and the values of all others."""

    def __init__(self, raw: msgspec.Raw) -> None:
        """Decode one table and record the places of its parts.

        Raises:
            ColumnError: a length, type or mask is invalid.
            msgspec.MsgspecError: it is not a table.
        """
        table = _PLACES.decode(raw)
        check_size(table.rows, len(table.columns))
        self._rows = table.rows
        self._columns = {name: _seen(name, parts, table.rows, _address(raw)) for name, parts in table.columns.items()}
        whole = np.frombuffer(raw, np.uint8)
        fixed = np.ones(len(whole), dtype=bool)
        for column in self._columns.values():
            for place in (column.data, column.base, column.mask):
                if place is not None:
                    fixed[place] = False
        small = [column.base for column in self._columns.values() if not column.base_type]
        self._small = np.array([place.start for place in small if place.start < place.stop], dtype=np.intp)
        self._fixed = np.flatnonzero(fixed)
        self._bytes = whole[self._fixed].copy()

    @property
    def fixed_bytes(self) -> int:
        """Number of bytes that are equal in every table of this layout."""
        return len(self._bytes)

    def matches(self, stack: Bytes) -> Bools:
        """[table]: whether a table of the stack has this layout. `stack` is [table, byte]."""
        # A base that is one byte here must be one byte there. As a signed number, the first byte of anything but a
        # small integer is below all small integers.
        written = stack[:, self._small].view(np.int8)
        equal: Bools = (stack[:, self._fixed] == self._bytes).all(axis=1)
        return equal & (written >= _SMALLEST).all(axis=1)

    def block(self, numbers: Sequence[int], stack: Bytes) -> Block:
        """The columns of tables with this layout. `stack` is [table, byte]."""
        columns = {}
        zeros = [0] * len(stack)
        small = np.count_nonzero(stack[:, self._small]) > 0
        for name, column in self._columns.items():
            values = np.ascontiguousarray(stack[:, column.data]).reshape(-1).view(column.dtype)
            bases = zeros
            if column.base_type or (small and column.base.start < column.base.stop):
                bases = np.ascontiguousarray(stack[:, column.base]).view(column.base_type or np.int8)[:, 0].tolist()
            present = None if column.mask is None else bits(stack[:, column.mask], self._rows)
            columns[name] = Cells(values, bases, present)
        return Block(numbers, [self._rows] * len(stack), columns)


def _layout(first: msgspec.Raw, stack: Bytes) -> tuple[_Layout, Bools]:
    """The layout of the first table of a stack, and which tables of the stack have it."""
    size = stack.shape[1]
    known = _LAYOUTS.get(size)
    if known is not None and (matching := known.matches(stack))[0]:
        return known, matching
    layout = _Layout(first)
    if layout.fixed_bytes <= FIXED_BYTES_MAX:
        if len(_LAYOUTS) >= LAYOUTS_MAX:
            _LAYOUTS.clear()  # those in use are soon back, at the cost of decoding one table each
        _LAYOUTS[size] = layout
    return layout, layout.matches(stack)


_LAYOUTS: Final[dict[int, _Layout]] = {}
"""The last layout of each table size. A cache: it changes no result."""


def _seen(name: str, parts: _StackedColumn, rows: int, start: int) -> _Column:
    dtype = type_of(name, parts.dtype)
    check_width(name, len(parts.data), rows, dtype)
    base = _place(parts.base, start)
    base_type = _INTEGERS.get(memoryview(parts.base)[0], "") if base.stop > base.start else ""
    if base_type:
        base = slice(base.start + 1, base.stop)
    mask = None
    if parts.mask is not None:
        check_mask(name, len(parts.mask), rows)
        mask = _place(parts.mask, start)
    return _Column(dtype, _place(parts.data, start), base, base_type, mask)


def _place(part: msgspec.Raw | memoryview, start: int) -> slice:
    """The place of a part in the bytes of its table. msgspec returns views, so the difference of addresses is it."""
    size = memoryview(part).nbytes
    low = _address(part) - start if size else 0
    return slice(low, low + size)


def _address(part: msgspec.Raw | memoryview) -> int:
    return int(np.frombuffer(part, np.uint8).__array_interface__["data"][0])
