"""The plain JSON form of a batch, which any language can send: lists for columns, objects for everything else.

In a list `null` is "not measured", and the strings "NaN", "Inf" and "-Inf" are values.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from rankwatch import wire
from rankwatch_service.telemetry.columns import ColumnError

_WORDS: Final = {"NaN": float("nan"), "Inf": float("inf"), "-Inf": float("-inf")}


def _as_object(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A struct with the same fields that is encoded as an object; the wire's own is an array without names."""
    fields = [
        (field.name, field.type, msgspec.field(default=field.default))
        if field.default is not msgspec.NODEFAULT
        else (field.name, field.type, msgspec.field(default_factory=field.default_factory))
        if field.default_factory is not msgspec.NODEFAULT
        else (field.name, field.type)
        for field in msgspec.structs.fields(struct)
    ]
    return msgspec.defstruct(f"{struct.__name__}Object", fields)


ProgressObject: Any = _as_object(wire.Progress)
DeviceObject: Any = _as_object(wire.DeviceSample)
HostDeviceObject: Any = _as_object(wire.HostDeviceSample)


class JsonTable(msgspec.Struct):
    """A table whose columns are lists."""

    columns: dict[str, list[int | float | str | None]]
    rows: int | None = None
    """None: as many as the column `step` has."""


class JsonBatch(msgspec.Struct):
    """`wire.Batch` as JSON."""

    schema: int
    job: str
    attempt: str
    host: str
    boot: str
    seq: int
    sent_unix_ns: int
    ranks: tuple[wire.RankInfo, ...] = ()
    steps: JsonTable | None = None
    values: JsonTable | None = None
    progress: tuple[ProgressObject, ...] = ()
    devices: tuple[DeviceObject, ...] = ()
    events: tuple[wire.Event, ...] = ()
    host_devices: tuple[HostDeviceObject, ...] = ()


def from_json(plain: JsonBatch) -> wire.Batch:
    """The same batch with raw columns.

    Raises:
        ColumnError: a list has a value that is not a number, or an integer of more than 64 bits.
    """
    return wire.Batch(
        schema=plain.schema,
        job=plain.job,
        attempt=plain.attempt,
        host=plain.host,
        boot=plain.boot,
        seq=plain.seq,
        sent_unix_ns=plain.sent_unix_ns,
        ranks=plain.ranks,
        steps=_table(plain.steps),
        values=_table(plain.values),
        progress=tuple(wire.Progress(**msgspec.structs.asdict(block)) for block in plain.progress),
        devices=tuple(wire.DeviceSample(**msgspec.structs.asdict(sample)) for sample in plain.devices),
        events=plain.events,
        host_devices=tuple(wire.HostDeviceSample(**msgspec.structs.asdict(one)) for one in plain.host_devices),
    )


def _table(table: JsonTable | None) -> wire.Table | None:
    if table is None:
        return None
    rows = len(table.columns.get("step", ())) if table.rows is None else table.rows
    return wire.Table(rows, {name: _column(name, cells) for name, cells in table.columns.items()})


def _column(name: str, cells: list[int | float | str | None]) -> wire.Column:
    present = np.array([cell is not None for cell in cells], dtype=bool)
    mask = None if present.all() else np.packbits(present, bitorder="little").tobytes()
    if all(cell is None or isinstance(cell, int) for cell in cells):
        if any(cell is not None and not -(2**63) <= cell < 2**63 for cell in cells if isinstance(cell, int)):
            raise ColumnError(f"column {name[:80]!r}: an integer needs more than 64 bits")
        return wire.Column("i8", np.array([cell or 0 for cell in cells], dtype="<i8").tobytes(), 0, mask)
    return wire.Column("f8", np.array([_number(name, cell) for cell in cells], dtype="<f8").tobytes(), 0, mask)


def _number(name: str, cell: float | str | None) -> float:
    if cell is None:
        return 0.0
    if isinstance(cell, str):
        if cell not in _WORDS:
            raise ColumnError(f"column {name[:80]!r}: {cell[:20]!r} is not a number; words are NaN, Inf and -Inf")
        return _WORDS[cell]
    return float(cell)
