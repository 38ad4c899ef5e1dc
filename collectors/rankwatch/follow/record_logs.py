"""TensorBoard event files: binary logs of protobuf records.

Only the fields that are needed are read, by their numbers in `tensorboard/compat/proto/event.proto` (2.21). Checksums
are not checked: they would need another package.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from rankwatch.follow.fields import Field as Number
from rankwatch.follow.fields import Line
from rankwatch.follow.reader import LogReader
from rankwatch.follow.rows import Entry

RECORD_BYTES_MAX: Final = 64 << 20
"""A longer record is none: images and graphs of models are far smaller."""
SCALARS_BYTES_MAX: Final = 1 << 20
"""A longer record has no scalars that anybody reads: it is an image, or a graph."""

Field = tuple[int, int | bytes]
"""Number of a protobuf field, and its value."""


class LogFormatError(ValueError):
    """The file is not of this format from here on."""


def fields(message: bytes) -> Iterator[Field]:
    """The fields of a protobuf message, in their order; fixed-width numbers as their bytes.

    Raises:
        LogFormatError: these bytes are no message.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(message, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise LogFormatError(f"a field of kind {kind}")
        if at + size > len(message):
            raise LogFormatError("a field goes beyond its message")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise LogFormatError("a number without end")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


class ScalarEvent(NamedTuple):
    """The scalars of one event of TensorBoard, by tag; there is at least one."""

    time_s: float
    step: int
    values: dict[str, float]


class EventReader:
    """Cuts the bytes of a TensorBoard event file, in whatever parts they arrive, into events with scalars."""

    _HEAD: Final = struct.Struct("<QI")
    _CHECKSUM_BYTES: Final = 4

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[ScalarEvent]:
        """The events that these further bytes complete.

        Raises:
            LogFormatError: the file is none from here on.
        """
        for record in self.records(data):
            event = event_of(record)
            if event.values:
                yield event

    def records(self, data: bytes) -> Iterator[bytes]:
        """The records that these further bytes complete, but for those that are too long for scalars.

        Raises:
            LogFormatError: the file is none from here on; also whenever it is asked again.
        """
        self._rest += data
        at, head = 0, self._HEAD
        while len(self._rest) - at >= head.size:
            (size, _) = head.unpack_from(self._rest, at)
            if size > RECORD_BYTES_MAX:
                self._rest = self._rest[at : at + head.size]
                raise LogFormatError(f"a record of {size} bytes")
            end = at + head.size + size + self._CHECKSUM_BYTES
            if end > len(self._rest):
                break
            if size <= SCALARS_BYTES_MAX:
                yield self._rest[at + head.size : end - self._CHECKSUM_BYTES]
            at = end
        self._rest = self._rest[at:]


class EventFile:
    """A TensorBoard event file. The scalars of one step are one row, which a scalar of another step completes."""

    def __init__(self, reader: LogReader | None = None) -> None:
        self._events = EventReader()
        self._reader = reader or LogReader(is_table=True)
        self._step = -1
        self._time_s = 0.0
        self._values: dict[str, float] = {}

    def cut(self, data: bytes) -> Iterator[bytes]:
        """See `Parser.cut`."""
        return self._events.records(data)

    def parse(self, piece: bytes) -> Iterator[Entry]:
        """See `Parser.parse`."""
        time_s, step, values = event_of(piece)
        if not values:
            return
        complete = step != self._step or not values.keys().isdisjoint(self._values)
        before = list(self._taken()) if complete else []
        self._step, self._time_s = step, time_s
        self._values |= values
        yield from before

    def flush(self) -> Iterator[Entry]:
        """See `Parser.flush`."""
        yield from self._taken()
        yield from self._reader.flush()

    def _taken(self) -> Iterator[Entry]:
        values, self._values = self._values, {}
        if values:
            fields = {name: Number(name, value) for name, value in {"step": float(self._step), **values}.items()}
            yield from self._reader.take(Line(fields, "", clock_s=self._time_s))


def event_of(message: bytes) -> ScalarEvent:
    """The scalars in a record.

    Raises:
        LogFormatError: it is no event.
    """
    step, time_s, values = 0, 0.0, dict[str, float]()
    for number, value in fields(message):
        if number == 1 and isinstance(value, bytes) and len(value) == 8:
            (time_s,) = struct.unpack("<d", value)
        elif number == 2 and isinstance(value, int):
            step = value - (value >> 63 << 64)  # a signed number
        elif number == 5 and isinstance(value, bytes):
            values = dict(_scalars(value))
    return ScalarEvent(time_s, step, values)


def _scalars(summary: bytes) -> Iterator[tuple[str, float]]:
    for number, value in fields(summary):
        if number != 1 or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for inner, content in fields(value):
            if inner == 1 and isinstance(content, bytes):
                tag = content.decode("utf-8", "replace")
            elif inner == 2 and isinstance(content, bytes) and len(content) == 4:
                (scalar,) = struct.unpack("<f", content)
            elif inner == 8 and isinstance(content, bytes):
                scalar = _tensor(content)
        if tag and scalar is not None:
            yield tag, scalar


def _tensor(message: bytes) -> float | None:
    """The number in a tensor of one float or double; None for any other."""
    found: list[float] = []
    wide = False
    for number, value in fields(message):
        if number == 1:
            wide = value == 2
        elif number in (4, 5, 6) and isinstance(value, bytes):
            form = "d" if number == 6 or (number == 4 and wide) else "f"
            if len(value) == struct.calcsize(form):
                found += struct.unpack(f"<{form}", value)
    return found[0] if len(found) == 1 else None
