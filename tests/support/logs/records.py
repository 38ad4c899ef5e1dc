"""Writes binary logs of protobuf records as W&B and TensorBoard do."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

BLOCK = 32_768
HEAD = 7


def field(number: int, value: int | bytes) -> bytes:
    """A varint or a length-delimited field."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


class WandbWriter:
    """A file `run-ID.wandb`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self._append(struct.pack("<4sHB", b":W&B", 0xBEE1, 0))

    def history(self, step: int, values: Mapping[str, float], *, nested: bool = False) -> None:
        items = b""
        for name, value in {"_step": step, **values}.items():
            shown = json.dumps(value) if value == value else '"NaN"'
            key = field(2, name.encode()) if nested else field(1, name.encode())
            items += field(1, key + field(16, shown.encode()))
        self._record(field(1, step) + field(2, items + field(2, field(1, step))))

    def exit(self, code: int) -> None:
        self._record(field(18, field(1, code) if code else b""))

    def output(self, text: str) -> None:
        """Anything that is no history, as large as wanted."""
        self._record(field(13, field(3, text.encode())))

    def _record(self, data: bytes) -> None:
        first = True
        while True:
            left = BLOCK - self._size % BLOCK
            if left < HEAD:
                self._append(bytes(left))
                continue
            part, data = data[: left - HEAD], data[left - HEAD :]
            kind = (1 if first else 4) if not data else (2 if first else 3)
            checksum = zlib.crc32(part, zlib.crc32(bytes([kind])))
            self._append(struct.pack("<IHB", checksum, len(part), kind) + part)
            first = False
            if not data:
                return

    def _append(self, data: bytes) -> None:
        with self._path.open("ab") as file:
            file.write(data)
        self._size += len(data)


def write_event_file(path: Path, scalars: Iterable[tuple[float, int, str, float]]) -> None:
    """An event file of TensorBoard, without checksums: an event for each time, step, tag and value."""
    with path.open("wb") as file:
        for time_s, step, tag, value in scalars:
            scalar = field(1, tag.encode()) + varint(2 << 3 | 5) + struct.pack("<f", value)
            event = varint(1 << 3 | 1) + struct.pack("<d", time_s) + field(2, step) + field(5, field(1, scalar))
            file.write(struct.pack("<QI", len(event), 0) + event + bytes(4))
