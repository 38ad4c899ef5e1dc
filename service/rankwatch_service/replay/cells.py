"""Reads columns of a file as numbers or texts; a field that is neither is an error with its row."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankwatch_detectors.base import Bools, Floats, Ints
from rankwatch_service.replay.layout import ReplayError

SHOWN_CHARS: Final = 40


@dataclass(frozen=True, slots=True)
class CellPlace:
    """The place of a column, for errors."""

    path: str
    column: str
    first_row: int
    """Number of the first row of the batch."""

    def error(self, what: str, index: int | None = None) -> ReplayError:
        """An error at the row with this index in the batch."""
        return ReplayError(self.path, what, None if index is None else self.first_row + index, self.column)


def is_number(column: Any) -> bool:
    """Whether a column has a numeric type."""
    kind = column.type
    tests = (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean, pa.types.is_decimal)
    return any(test(kind) for test in tests)


def numbers(column: Any, place: CellPlace) -> tuple[Floats, Bools | None]:
    """Values and where they are present (None: everywhere); `nan` and `inf` are values.

    Raises:
        ReplayError: a field is not a number.
    """
    if not (is_number(column) or _is_text(column)):
        raise place.error(f"of type {column.type}, not numbers")
    cast = _cast(column, place)
    present = None if cast.null_count == 0 else pc.is_valid(cast).to_numpy(zero_copy_only=False)
    values = cast.fill_null(0.0) if present is not None else cast
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64), present


def integers(column: Any, place: CellPlace, highest: int) -> tuple[Ints, Bools | None]:
    """Whole numbers from 0 to `highest`.

    Raises:
        ReplayError: a field is something else.
    """
    values, present = numbers(column, place)
    wrong = ~((values >= 0) & (values <= highest) & (values == np.floor(values)))
    if wrong.any():
        index = int(wrong.argmax())
        raise place.error(f"{values[index]:g} is not a whole number from 0 to {highest}", index)
    return values.astype(np.int64), present


def counts(column: Any, place: CellPlace, highest: int) -> tuple[Ints, Bools | None]:
    """Whole numbers from 0 to `highest`; "true" and "false" are 1 and 0.

    Raises:
        ReplayError: a field is something else.
    """
    if _is_text(column) and not pa.types.is_null(column.type):
        plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        for word, number in (("true", "1"), ("false", "0")):
            plain = pc.if_else(pc.match_substring_regex(plain, rf"^\s*{word}\s*$", ignore_case=True), number, plain)
        column = plain
    return integers(column, place, highest)


def bits(column: Any, place: CellPlace) -> tuple[Ints, Bools | None]:
    """Fingerprints: 64-bit integers as they are, of any text the first 64 bits of its hash.

    Raises:
        ReplayError: they are of another type.
    """
    present = None if column.null_count == 0 else pc.is_valid(column).to_numpy(zero_copy_only=False)
    if _is_text(column):
        coded = column.dictionary_encode() if not pa.types.is_dictionary(column.type) else column
        hashes = [_hashed(text) for text in _decoded(coded.dictionary, place)]
        codes = coded.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return np.asarray(hashes or [0], dtype=np.int64)[codes], present
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise place.error(f"of type {column.type}, neither whole numbers nor texts")
    values = column.fill_null(0).to_numpy(zero_copy_only=False)
    return values.astype(np.float64).view(np.int64) if values.dtype.kind == "f" else values.astype(np.int64), present


def texts(column: Any, place: CellPlace) -> tuple[list[str], Ints]:
    """The distinct texts of a column, and which of them each row has; an empty field is "".

    Raises:
        ReplayError: they are of a type that has no text.
    """
    try:
        as_text = column if _is_text(column) else pc.cast(column, pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise place.error(f"of type {column.type}, not texts") from error
    coded = as_text if pa.types.is_dictionary(as_text.type) else as_text.dictionary_encode()
    known = _decoded(coded.dictionary, place)
    codes = coded.indices.fill_null(len(known)).to_numpy(zero_copy_only=False)
    return [*known, ""], np.asarray(codes, dtype=np.int64)


def _decoded(known: Any, place: CellPlace) -> list[str]:
    try:
        return [str(text) for text in known.to_pylist()]
    except UnicodeDecodeError as error:
        raise place.error("is not UTF-8") from error


def _is_text(column: Any) -> bool:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind))


def _cast(column: Any, place: CellPlace) -> Any:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    with suppress(pa.ArrowInvalid):
        return pc.cast(column, pa.float64(), safe=False)
    try:
        trimmed = pc.utf8_trim_whitespace(column)
    except pa.ArrowInvalid as error:
        raise place.error("is not UTF-8") from error
    trimmed = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)
    try:
        return pc.cast(trimmed, pa.float64())
    except pa.ArrowInvalid:
        index = _first_wrong(trimmed)
        text = trimmed[index].as_py()
        hint = "; decimals need a point" if "," in text else ""
        raise place.error(f"{text[:SHOWN_CHARS]!r} is not a number{hint}", index) from None


def _first_wrong(column: Any) -> int:
    """Index of the first text that is not a number; there must be one."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            pc.cast(column.slice(low, middle - low), pa.float64())
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low


def _hashed(text: str) -> int:
    try:
        number = int(text, 10)
    except ValueError:
        return int.from_bytes(sha256(text.encode()).digest()[:8], "little", signed=True)
    return (number + 2**63) % 2**64 - 2**63
