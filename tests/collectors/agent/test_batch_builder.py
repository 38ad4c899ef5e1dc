"""What an agent sends: batches, and the columns of their tables."""

from __future__ import annotations

from math import inf, nan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rankwatch import wire
from rankwatch.agent import batch_builder
from rankwatch.agent.batch_builder import BatchBuilder, Rows, SenderIdentity
from rankwatch.reader import Note, StepEntry, ValuesEntry
from rankwatch.wire import Column, Table


def rank(number: int, **identity: Any) -> Any:
    """As much of a local rank as a batch builder looks at."""
    return SimpleNamespace(
        rank=number,
        path=f"ring-{number}",
        identity=identity,
        header=SimpleNamespace(pid=1_000 + number),
        shards=1,
        is_followed=bool(identity.get("followed")),
    )


def entry(sequence: int, step: int, kind: int = 0, **values: float) -> StepEntry:
    return StepEntry(
        sequence, step, 0, kind, step, 10**18 + step, 0.5, 0.4, 0.3, 0.1, values, {"forward": 0.25, "collective": 0.1}
    )  # fmt: skip


def sent(batch_builder: BatchBuilder) -> wire.Batch:
    return wire.decode_batch(batch_builder.encoded_batch(SenderIdentity("h"), 5).body)


def test_a_step_entry_becomes_one_row_with_the_known_columns() -> None:
    batch_builder = BatchBuilder("gpt", "l.0")
    assert batch_builder.empty
    assert batch_builder.add(rank(3), entry(1, 7, loss=2.5, nonfinite=4)) == 0
    batch = sent(batch_builder)
    assert (batch.job, batch.attempt, batch.host, batch.schema, batch.seq) == ("gpt", "l.0", "h", 1, 0)
    row = {name: read(batch.steps, name)[0] for name in batch.steps.columns}
    assert row == {
        "step": 7, "rank": 3, "time_unix_ns": 10**18 + 7, "relative_step": 7, "loss": 2.5, "nonfinite": 4,
        "step_time_s": 0.5, "busy_s": pytest.approx(0.4), "busy_cpu_s": pytest.approx(0.3),
        "wait_s": pytest.approx(0.1), "phase.forward": 0.25, "phase.collective": pytest.approx(0.1),
    }  # fmt: skip


def test_of_a_followed_log_only_what_it_may_know_of_times_is_sent() -> None:
    batch_builder = BatchBuilder("gpt", "l.0")
    batch_builder.add(rank(0, followed=True), entry(1, 7, loss=2.5))
    assert {"busy_s", "busy_cpu_s", "wait_s"}.isdisjoint(steps := sent(batch_builder).steps.columns)
    assert {"step_time_s", "loss"} <= set(steps)


def test_the_kind_is_sent_as_soon_as_one_row_is_no_train_step() -> None:
    batch_builder = BatchBuilder("gpt", "l.0")
    batch_builder.add(rank(0), entry(1, 1))
    batch_builder.add(rank(0), entry(2, 2, kind=1))
    steps = sent(batch_builder).steps
    assert read(steps, "kind") == [0, 1]


def test_late_values_and_notes_go_their_own_ways() -> None:
    batch_builder = BatchBuilder("gpt", "l.0")
    batch_builder.add(rank(1), ValuesEntry(4, 9, 0, 10**18, {"loss": 1.0}))
    batch_builder.add(rank(1), Note(5, -1, 0, 77, "rank_left", {"reason": "end"}))
    batch = sent(batch_builder)
    assert batch.steps is None
    assert {name: read(batch.values, name) for name in batch.values.columns} == {"step": [9], "rank": [1], "loss": [1]}
    assert batch.events == (wire.Event("rank_left", 77, 1, None, {"reason": "end"}),)
    assert batch_builder.positions == {"ring-1": 5}


def test_values_that_call_themselves_like_known_columns_are_refused() -> None:
    batch_builder = BatchBuilder("gpt", "l.0")
    refused = batch_builder.add(rank(0), entry(1, 1, **{"busy_s": 9.0, "phase.forward": 9.0, "loss": 1.0}))
    assert refused == 2
    steps = sent(batch_builder).steps
    assert read(steps, "busy_s") == pytest.approx([0.4])
    assert read(steps, "phase.forward") == [0.25]


def test_an_introduction_carries_who_the_rank_is() -> None:
    batch_builder = BatchBuilder("gpt", "l.0")
    identity = {"world_size": 4, "local_rank": 1, "host": "n", "device_uuid": None, "tp": 1, "can": ["pause"], "x": 1}
    identity |= {"device_type": "cuda", "switch": "leaf-1", "optimizers": 2, "lockstep": False}
    batch_builder.introduce(rank(2, parameters=["w", "b"], replicated=True, **identity), ("/ckpt",))
    batch_builder.introduce(rank(3, world_size=4), ())
    reported, untold = sent(batch_builder).ranks
    assert reported == wire.RankInfo(
        2, 4, 1, "n", "", 1_002, tp=1, parameters=("w", "b"), replicated=True, can=("pause",), optimizers=2,
        checkpoint_roots=("/ckpt",), checkpoint_shards=1, device_type="cuda", switch="leaf-1", lockstep=False,
    )  # fmt: skip
    assert (untold.optimizers, untold.lockstep) == (0, True)


def test_batches_are_numbered_without_gaps_and_every_worker_has_its_own_boot_id() -> None:
    sender_identity, other = SenderIdentity("h"), SenderIdentity("h")
    assert [sender_identity.next_sequence() for _ in range(3)] == [0, 1, 2]
    assert sender_identity.boot != other.boot


def test_sixty_four_rank_steps_of_sixteen_metrics_take_at_most_eighty_bytes_each() -> None:
    batch_builder = BatchBuilder("gpt-small", "launch-1.0")
    for index in range(64):
        step, number = divmod(index, 8)
        values = {f"metric_{metric}": 1 / (index + metric + 1) for metric in range(12)}
        times = (0.1, 0.05, 0.04, 0.01)
        batch_builder.add(
            rank(number), StepEntry(step + 1, step, 0, 0, step, 10**18 + index * 10**7, *times, values, {})
        )
    assert len(batch_builder.encoded_batch(SenderIdentity("node-1"), 10**18).body) <= 80 * 64


def test_a_draft_is_full_before_stacks_and_parameter_names_make_the_message_too_big() -> None:
    batch_builder = BatchBuilder("gpt", "l.0")
    names = [f"layers.{number}.attention.query.weight" for number in range(10_000)]
    count = 0
    while not batch_builder.full:
        batch_builder.introduce(rank(count, parameters=names), ())
        batch_builder.add_event(wire.Event("stack_dump", 1, count, fields={"stack": "x" * 65_536}))
        count += 1
    assert 1 < count < 10
    assert len(batch_builder.encoded_batch(SenderIdentity("h"), 5).body) < wire.BATCH_BYTES_MAX / 2


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
    return rows.table()


def column_of(*numbers: int) -> Column:
    rows = Rows()
    for number in numbers:
        rows.add(0, 0, [], {"x": number})
    table = rows.table()
    assert read(table, "x") == list(numbers)
    return table.columns["x"]


def test_no_rows_are_no_table_and_what_a_row_lacks_is_absent_and_not_zero() -> None:
    rows = Rows()
    assert rows.table() is None
    for rank in range(10):
        rows.add(7, rank, [("loss", rank / 2)] if rank % 3 else [], {"fingerprint": -rank} if rank == 9 else {})
    table = rows.table()
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
    assert read(table, "tokens") == [4.5, 4.0, 5.5]


def test_a_table_says_that_it_is_full_before_a_message_gets_too_big(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_builder, "CELLS_MAX", 20)
    rows = Rows()
    for step in range(4):
        rows.add(step, 0, [("a", 1.0), ("b", 2.0)], {})
    assert not rows.full
    rows.add(4, 0, [("a", 1.0)], {})
    assert rows.full
