"""Tables of many messages, read at once where they are laid out alike.

The messages of a job differ in their numbers and hardly in anything else. So one table is taken apart, to see where its
numbers stand, and others of its length are compared with it: where all other bytes are equal, the names, types, lengths
and masks are too, and a column of all of them is a rectangle in the bytes of the tables laid under each other. That
saves taking most tables apart, which costs more than everything else that is done with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankwatch import wire
from rankwatch_detectors.base import Bools
from rankwatch_service.stream.columns import Block, Cells, bits, blocks, check_size, check_width, type_of

ALIKE_MIN: Final = 4
"""Tables from which on comparing is cheaper than taking each apart."""

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
"""How msgpack writes integers: the type behind the first byte. Small ones are that byte."""

_SMALLEST: Final = -32
"""Of the integers that are one byte."""

Bytes = NDArray[np.uint8]


class _Column(msgspec.Struct, array_like=True):
    """`wire.Column`, of which it can be seen where its parts stand."""

    dtype: str
    data: memoryview
    base: msgspec.Raw = msgspec.Raw()
    mask: memoryview | None = None


class _Table(msgspec.Struct):
    rows: int
    columns: dict[str, _Column]


_TABLE: Final = msgspec.msgpack.Decoder(wire.Table)
_PLACES: Final = msgspec.msgpack.Decoder(_Table)


def read_blocks(tables: Sequence[msgspec.Raw]) -> list[Block]:
    """Tables, still as the bytes that they came as, in as few blocks as may be; a block knows which tables it has.

    Raises:
        ColumnError: a length, type or mask in some table does not fit.
        msgspec.MsgspecError: one of them is no table.
    """
    by_size: dict[int, list[int]] = {}
    for number, table in enumerate(tables):
        by_size.setdefault(len(memoryview(table)), []).append(number)
    found: list[Block] = []
    single: list[int] = []
    for size, numbers in by_size.items():
        waiting = np.array(numbers)
        while len(waiting) >= ALIKE_MIN:
            stack = np.frombuffer(b"".join([tables[number] for number in waiting]), np.uint8).reshape(-1, size)
            alike, columns, rows = _alike(tables[waiting[0]], stack)
            if np.count_nonzero(alike) < ALIKE_MIN:
                break
            found.append(Block(waiting[alike].tolist(), [rows] * int(np.count_nonzero(alike)), columns))
            waiting = waiting[~alike]
        single += waiting.tolist()
    single.sort()
    found += blocks([_TABLE.decode(tables[number]) for number in single], single)
    # Names count in the order in which they first came.
    return sorted(found, key=lambda block: block.numbers[0])


def _alike(raw: msgspec.Raw, stack: Bytes) -> tuple[Bools, dict[str, Cells], int]:
    """Which tables of a stack are laid out like its first one, their columns, and how many rows each has."""
    first = _PLACES.decode(raw)
    check_size(first.rows, len(first.columns))
    start = _address(raw)
    data = {name: _place(column.data, start) for name, column in first.columns.items()}
    base = {name: _place(column.base, start) for name, column in first.columns.items()}
    mask = {name: _place(column.mask, start) for name, column in first.columns.items() if column.mask is not None}
    fixed = np.ones(stack.shape[1], dtype=bool)
    for place in (*data.values(), *base.values(), *mask.values()):
        fixed[place] = False
    alike = (stack[:, fixed] == stack[0, fixed]).all(axis=1)
    bases = {name: _integers(stack[:, place], alike) for name, place in base.items()}
    if not alike.all():
        stack = stack[alike]
        bases = {name: found[alike] for name, found in bases.items()}
    columns = {}
    for name, column in first.columns.items():
        dtype = type_of(name, column.dtype)
        check_width(name, len(column.data), first.rows, dtype)
        values = np.ascontiguousarray(stack[:, data[name]]).reshape(-1).view(dtype)
        present = bits(name, stack[:, mask[name]], first.rows) if name in mask else None
        columns[name] = Cells(values, bases[name].tolist(), present)
    return alike, columns, first.rows


def _integers(written: Bytes, alike: Bools) -> NDArray[Any]:
    """The integers in the rows of a stack; what is none, or written in another way, is not alike."""
    if written.shape[1] == 0:
        return np.zeros(len(written), dtype=np.int64)
    if written.shape[1] == 1:
        small = written.view(np.int8)[:, 0]
        alike &= small >= _SMALLEST
        return small
    dtype = _INTEGERS.get(int(written[0, 0]))
    if dtype is None:
        alike[:] = False
        return np.zeros(len(written), dtype=np.int64)
    alike &= written[:, 0] == written[0, 0]
    return np.ascontiguousarray(written[:, 1:]).view(dtype)[:, 0]


def _place(part: msgspec.Raw | memoryview, start: int) -> slice:
    """Where a part of a table stands in it."""
    size = memoryview(part).nbytes
    low = _address(part) - start if size else 0
    return slice(low, low + size)


def _address(part: msgspec.Raw | memoryview) -> int:
    return int(np.frombuffer(part, np.uint8).__array_interface__["data"][0])
