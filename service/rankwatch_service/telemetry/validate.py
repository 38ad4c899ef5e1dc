"""Validates a posted telemetry body. The stream accepts whatever passes here. Pure.

The plain JSON form of a batch, which any language can send: lists for columns, objects for everything else.

In a list `null` is "not measured", and the strings "NaN", "Inf" and "-Inf" are values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np

from rankwatch import wire
from rankwatch_service.telemetry.bundle import check_tables
from rankwatch_service.telemetry.columns import ColumnError
from rankwatch_service.telemetry.envelope import (
    BadBatchError,
    Reason,
    SchemaVersion,
    check_header,
    check_size,
    decode,
    decode_envelope,
)

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


MSGPACK_TYPES: Final = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})
JSON_TYPE: Final = "application/json"

_JSON_BATCH: Final = msgspec.json.Decoder(JsonBatch)
_JSON_VERSION: Final = msgspec.json.Decoder(SchemaVersion)


@dataclass(frozen=True, slots=True)
class ValidBatch:
    """A batch that may be appended to the log."""

    job: str
    host: str
    body: bytes
    """As msgpack."""


def validate(body: bytes, content_type: str) -> ValidBatch:
    """Check one telemetry body.

    Args:
        body: as it was sent, as msgpack or in the plain JSON form.
        content_type: of the HTTP request; parameters (`; charset=...`) are ignored.

    Raises:
        BadBatchError: the batch can never be accepted, however often it is sent.
    """
    media_type = _media_type(content_type)
    if media_type == JSON_TYPE:
        body = _as_msgpack(body)
    elif media_type not in MSGPACK_TYPES:
        check_size(body)
        raise BadBatchError(Reason.CONTENT_TYPE, f"{media_type!r}: send application/msgpack or application/json")
    envelope = decode_envelope(body)
    check_tables(envelope)
    return ValidBatch(envelope.job, envelope.host, body)


def _as_msgpack(body: bytes) -> bytes:
    check_size(body)
    plain = decode(body, _JSON_BATCH, _JSON_VERSION)
    try:
        batch = from_json(plain)
    except ColumnError as error:
        raise BadBatchError(Reason.COLUMNS, str(error)) from error
    check_header(batch)  # first, because msgpack cannot encode some numbers that a checked header does not have
    return wire.encode(batch)


@lru_cache(maxsize=64)
def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()
