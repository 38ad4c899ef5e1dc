"""Tables read as rectangles of bytes say what each of them says when it is taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankwatch import wire
from rankwatch_service.telemetry import columns
from rankwatch_service.telemetry.columns import (
    FIXED_BYTES_MAX,
    LAYOUTS_MAX,
    STACK_MIN,
    Block,
    ColumnError,
    blocks,
    read_blocks,
)

BASE_ARRAY = np.array(
    # Each way in which msgpack writes an integer, at its ends.
    [0, 5, 127, 128, 255, 256, 65_535, 65_536, 2**32, 2**63, -1, -32, -33, -128, -129, -(2**31), -(2**63)],
    dtype=object,
)


def raw(table: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.msgpack.encode(table))


def reported(found: Sequence[Block]) -> dict[int, Any]:
    """What each table says, by its number."""
    said: dict[int, Any] = {}
    for block in found:
        for index, number in enumerate(block.numbers):
            low, high = sum(block.rows[:index]), sum(block.rows[: index + 1])
            said[number] = {
                name: (
                    cells.values.dtype.str,
                    cells.values[low:high].tolist(),
                    cells.bases[index],
                    [True] * (high - low) if cells.present is None else cells.present[low:high].tolist(),
                )
                for name, cells in block.columns.items()
            }
    return said


def some_table(random: np.random.Generator) -> wire.Table:
    rows = int(random.choice([1, 1, 1, 8, 9, 0]))
    names = ["step", "rank", "loss", "norm"]
    if random.random() < 0.2:
        random.shuffle(names)
    columns = {}
    for name in names[: int(random.choice([4, 4, 4, 3]))]:
        dtype = str(random.choice(["u1", "u1", "f4", "i8"]))
        data = random.integers(0, 256, rows * np.dtype(dtype).itemsize, dtype=np.uint8).tobytes()
        mask = np.packbits(random.random(rows) < 0.5).tobytes() if random.random() < 0.1 else None
        columns[name] = wire.Column(dtype, data, int(random.choice(BASE_ARRAY)), mask)
    return wire.Table(rows, columns)


def varied(table: wire.Table, random: np.random.Generator) -> wire.Table:
    """The same columns with other numbers."""
    columns = {
        name: wire.Column(column.dtype, random.bytes(len(column.data)), int(random.choice(BASE_ARRAY)), column.mask)
        for name, column in table.columns.items()
    }
    return wire.Table(table.rows, columns)


@given(st.integers(0, 2**32), st.integers(1, 8))
def test_tables_say_the_same_read_together_or_one_by_one(seed: int, kinds: int) -> None:
    random = np.random.default_rng(seed)
    patterns = [some_table(random) for _ in range(kinds)]
    tables = [varied(patterns[index], random) for index in random.integers(0, kinds, 80)]
    together = reported(read_blocks(list(map(raw, tables))))
    each = {number: reported(blocks([table], [number]))[number] for number, table in enumerate(tables)}
    assert repr(dict(sorted(together.items()))) == repr(each)


def usual(step: int, first_rank: int = 0, **changes: Any) -> wire.Table:
    columns = {
        "step": wire.Column("u1", bytes(4), step),
        "rank": wire.Column("u1", bytes(range(4)), first_rank),
        "loss": wire.Column("f4", np.arange(4, dtype="<f4").tobytes()),
    }
    return wire.Table(4, columns | changes)


def test_tables_that_differ_in_their_numbers_alone_become_one_block() -> None:
    tables = [usual(1_000 + number, 8 * number % 120) for number in range(20)]
    (block,) = read_blocks(list(map(raw, tables)))
    assert block.numbers == list(range(20))
    assert block.columns["step"].bases == [1_000 + number for number in range(20)]


def test_names_keep_the_order_in_which_they_first_came() -> None:
    odd = usual(1_000, loss=wire.Column("f4", bytes(16)), aux=wire.Column("f4", bytes(16)))
    tables = [usual(1_000), odd, *[usual(1_000)] * 3, *[odd] * 3, usual(5)]
    found = read_blocks(list(map(raw, tables)))
    assert [block.numbers for block in found] == [[0, 2, 3, 4], [1, 5, 6, 7], [8]]


@pytest.mark.parametrize("count", [1, STACK_MIN + 1])
@pytest.mark.parametrize(
    ("odd", "error"),
    [
        ({"rows": 4, "columns": {"step": ["u1", bytes(3)]}}, ColumnError),
        ({"rows": 4, "columns": {"step": ["u3", bytes(4)]}}, ColumnError),
        ({"rows": 4, "columns": {"step": ["u1", bytes(4), 0, bytes(2)]}}, ColumnError),
        ({"rows": -1, "columns": {"step": ["u1", bytes(4)]}}, ColumnError),
        ({"rows": 4, "columns": {"step": ["u1", "text"]}}, msgspec.MsgspecError),
        ({"rows": 4, "columns": {"step": ["u1", bytes(4), "text"]}}, msgspec.MsgspecError),
        ({"rows": 4, "columns": {"step": ["u1", bytes(4), 0.5]}}, msgspec.MsgspecError),
        ({"rows": 4, "columns": {"step": ["u1", bytes(4), None]}}, msgspec.MsgspecError),
        ({"rows": 4, "columns": {"step": ["u1", bytes(4), 0, "text"]}}, msgspec.MsgspecError),
        ({"rows": 4, "columns": {"step": ["u1"]}}, msgspec.MsgspecError),
        ({"rows": "4", "columns": {}}, msgspec.MsgspecError),
        ({"rows": 4}, msgspec.MsgspecError),
        (5, msgspec.MsgspecError),
    ],
)
def test_what_is_no_table_is_refused_however_many_there_are(odd: Any, error: type[Exception], count: int) -> None:
    with pytest.raises(error):
        read_blocks([raw(odd)] * count)


@pytest.mark.parametrize("short", [["u1", bytes(4)], ["u1", bytes(4), 7], ["u1", bytes(4), 7, None, "later"]])
def test_columns_of_another_version_may_be_shorter_or_longer(short: list[Any]) -> None:
    (block,) = read_blocks([raw({"rows": 4, "columns": {"step": short}})] * (STACK_MIN + 1))
    assert set(block.columns["step"].bases) == {7 if len(short) > 2 else 0}
    assert block.total == 4 * (STACK_MIN + 1)


def test_what_is_remembered_about_layouts_is_bounded() -> None:
    for rows in range(1, LAYOUTS_MAX + 10):
        step = wire.Column("u1", bytes(rows))
        read_blocks([raw(wire.Table(rows, {"step": step}))] * STACK_MIN)
    large = {"rows": 1, "columns": {"step": ["u1", bytes(1)]}, "unknown": "x" * FIXED_BYTES_MAX}
    (block,) = read_blocks([raw(large)] * STACK_MIN)
    assert block.total == STACK_MIN
    assert len(columns._LAYOUTS) <= LAYOUTS_MAX
    assert max(layout.fixed_bytes for layout in columns._LAYOUTS.values()) <= FIXED_BYTES_MAX
