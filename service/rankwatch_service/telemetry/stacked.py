"""Decodes tables of many messages at once if they have the same layout.

The messages of a job differ in their numbers and in hardly anything else. So one table is decoded to see where its
numbers are, and other tables of the same length are compared with it. If all other bytes are equal, names, types and
lengths are equal too, and a column of all these tables is a rectangle in the stack of their bytes. This avoids decoding
most tables, which would cost more than everything else that is done with them (adr/0012).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankwatch import wire
from rankwatch_detectors.base import Bools
from rankwatch_service.telemetry.columns import Block, Cells, bits, blocks, check_mask, check_size, check_width, type_of

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
"""By first byte in msgpack, the type of the integer after it. A small integer is the first byte itself."""

_SMALLEST: Final = -32
"""The smallest integer that msgpack encodes as one byte."""

Bytes = NDArray[np.uint8]


class _Parts(msgspec.Struct, array_like=True):
    """`wire.Column` as views into the message, whose addresses tell where its parts are."""

    dtype: str
    data: memoryview
    base: msgspec.Raw = msgspec.Raw()
    mask: memoryview | None = None


class _Table(msgspec.Struct):
    rows: int
    columns: dict[str, _Parts]


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


def _seen(name: str, parts: _Parts, rows: int, start: int) -> _Column:
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
