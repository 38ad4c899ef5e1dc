from math import inf, nan

import numpy as np
import pytest

from rankwatch.agent import draft
from rankwatch.agent.draft import Rows
from rankwatch.wire import Column, Table


def read(table: Table, name: str) -> list[float | int | None]:
    """What a service makes of one column."""
    column = table.columns[name]
    cells = np.frombuffer(column.data, "<" + column.dtype)
    assert len(cells) == table.rows
    values = cells if column.dtype[0] == "f" else cells.astype(object) + column.base
    if column.mask is None:
        return list(values.tolist())
    present = np.unpackbits(np.frombuffer(column.mask, np.uint8), bitorder="little")[: table.rows]
    return [value if there else None for value, there in zip(values.tolist(), present, strict=True)]


def table_of(*values: float) -> Table:
    rows = Rows()
    for value in values:
        rows.add(0, 0, [("x", value)], {})
    table = rows.table()
    assert table is not None
    return table


def column_of(*numbers: int) -> Column:
    rows = Rows()
    for number in numbers:
        rows.add(0, 0, [], {"x": number})
    table = rows.table()
    assert table is not None
    assert read(table, "x") == list(numbers)
    return table.columns["x"]


def test_no_rows_are_no_table() -> None:
    assert Rows().table() is None


def test_what_a_row_lacks_is_absent_and_not_zero() -> None:
    rows = Rows()
    for rank in range(10):
        rows.add(7, rank, [("loss", rank / 2)] if rank % 3 else [], {"fingerprint": -rank} if rank == 9 else {})
    table = rows.table()
    assert table is not None
    assert read(table, "step") == [7] * 10
    assert read(table, "rank") == list(range(10))
    assert read(table, "loss") == [None if rank % 3 == 0 else rank / 2 for rank in range(10)]
    assert read(table, "fingerprint") == [None] * 9 + [-9]


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ((5,), "u1"),
        ((1_000_000, 1_000_255), "u1"),
        ((-3, 253), "u2"),
        ((0, 65_536), "u4"),
        ((1_700_000_000_000_000_000, 1_700_000_004_000_000_000), "u4"),
        ((0, 2**32), "i8"),
        ((-(2**63), 2**63 - 1), "i8"),
    ],
)
def test_integers_take_the_narrowest_type_that_keeps_them(numbers: tuple[int, ...], dtype: str) -> None:
    assert column_of(*numbers).dtype == dtype


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ((1.5, -2.25), "f4"),
        ((nan, inf, -inf, 0.0, -0.0), "f4"),
        ((2.0**24,), "f4"),
        ((2.0**24 + 1,), "f8"),
        ((1e308, 1.0), "f8"),
        ((3.5e38,), "f8"),
        ((1e-40,), "f8"),
        ((5e-324,), "f8"),
    ],
)
def test_floats_are_f4_unless_that_would_lose_something(values: tuple[float, ...], dtype: str) -> None:
    table = table_of(*values)
    assert table.columns["x"].dtype == dtype
    np.testing.assert_array_equal(np.array(read(table, "x"), dtype=float), np.array(values))


def test_a_metric_that_is_exact_on_some_ranks_only_becomes_a_float_column() -> None:
    rows = Rows()
    rows.add(1, 0, [("tokens", 4.5)], {})
    rows.add(1, 1, [], {"tokens": 4})
    rows.add(1, 2, [("tokens", 5.5)], {})
    table = rows.table()
    assert table is not None
    assert read(table, "tokens") == [4.5, 4.0, 5.5]


def test_a_table_says_that_it_is_full_before_a_message_gets_too_big(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "CELLS_MAX", 20)
    rows = Rows()
    for step in range(4):
        rows.add(step, 0, [("a", 1.0), ("b", 2.0)], {})
    assert not rows.full
    rows.add(4, 0, [("a", 1.0)], {})
    assert rows.full
