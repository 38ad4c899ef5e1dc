"""Turns record batches of a file into typed rows: steps, ranks, places, metrics; a wrong field is an error with its
row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankwatch_detectors.base import Bools, Floats, Ints, StepKind
from rankwatch_detectors.metrics import COLUMNS
from rankwatch_service.replay.layout import HARDWARE, OWN_WORK, PLACES, ReplayError, renamed
from rankwatch_service.telemetry.columns import EXACT, FINGERPRINTS, Exact, Records
from rankwatch_service.telemetry.envelope import STEP_MAX, WORLD_SIZE_MAX

SHOWN_CHARS: Final = 40
TEXT_BYTES_MAX: Final = 4096
"""Longest name of a host, an attempt or another thing: they are kept as long as rows name them."""
KNOWN_COLUMNS: Final = frozenset(("time_s", "step", "rank", "attempt", "kind", *HARDWARE, *PLACES, *EXACT, *COLUMNS))


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
        known, codes = _distinct(column)
        for word, number in (("true", "1"), ("false", "0")):
            known = pc.if_else(pc.match_substring_regex(known, rf"^\s*{word}\s*$", ignore_case=True), number, known)
        column = pa.DictionaryArray.from_arrays(codes, known)
    return integers(column, place, highest)


def bits(column: Any, place: CellPlace) -> tuple[Ints, Bools | None]:
    """Fingerprints: 64-bit integers as they are, of any text the first 64 bits of its hash.

    Raises:
        ReplayError: they are of another type.
    """
    present = None if column.null_count == 0 else pc.is_valid(column).to_numpy(zero_copy_only=False)
    if _is_text(column):
        known, indices = _distinct(column)
        hashes = [_hashed(text) for text in _decoded(known, place)]
        codes = indices.fill_null(0).to_numpy(zero_copy_only=False)
        return np.asarray(hashes or [0], dtype=np.int64)[codes], present
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        raise place.error(f"of type {column.type}, neither whole numbers nor texts")
    values = column.fill_null(0).to_numpy(zero_copy_only=False)
    return values.astype(np.float64).view(np.int64) if values.dtype.kind == "f" else values.astype(np.int64), present


def texts(column: Any, place: CellPlace) -> tuple[list[str], Ints]:
    """The distinct texts of a column, and which of them each row has; an empty field is "".

    Raises:
        ReplayError: they are of a type that has no text, or one is too long.
    """
    try:
        as_text = column if _is_text(column) else pc.cast(column, pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise place.error(f"of type {column.type}, not texts") from error
    distinct, indices = _distinct(as_text)
    if len(distinct) and (pc.max(pc.binary_length(distinct)).as_py() or 0) > TEXT_BYTES_MAX:
        raise place.error(f"a text of more than {TEXT_BYTES_MAX} bytes")
    known = _decoded(distinct, place)
    codes = indices.fill_null(len(known)).to_numpy(zero_copy_only=False)
    return [*known, ""], np.asarray(codes, dtype=np.int64)


def _distinct(column: Any) -> tuple[Any, Any]:
    """The distinct texts of a column in the order in which they appear, and which of them each row has."""
    if not pa.types.is_dictionary(column.type):
        coded = column.dictionary_encode()
        return coded.dictionary, coded.indices
    used = pc.unique(column.indices.drop_null())  # a dictionary is that of other rows too
    return column.dictionary.take(used), pc.index_in(column.indices, value_set=used)


def _decoded(known: Any, place: CellPlace) -> list[str]:
    try:
        return [str(text) for text in known.to_pylist()]
    except UnicodeDecodeError as error:
        raise place.error("is not UTF-8") from error


def _is_text(column: Any) -> bool:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind))


def _cast(column: Any, place: CellPlace) -> Any:
    if not pa.types.is_dictionary(column.type):
        return _as_numbers(column, place, lambda index: index)
    known, codes = _distinct(column)
    return _as_numbers(known, place, lambda index: int(pc.index(codes, index).as_py())).take(codes)


def _as_numbers(column: Any, place: CellPlace, row_of: Callable[[int], int]) -> Any:
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
        raise place.error(f"{text[:SHOWN_CHARS]!r} is not a number{hint}", row_of(index)) from None


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


TIME_S_MAX: Final = 1e11
"""A larger time is in milliseconds or smaller units; there have been fewer than 2e9 seconds since 1970."""

COUNT_MAX: Final = 2**53 - 1
"""Limit of counts: floats hold whole numbers exactly up to it."""

_KINDS: Final = tuple(str(kind) for kind in StepKind)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows in file order. All columns are indexed by row."""

    path: str
    first_row: int
    time_s: Floats | None
    """None: the file has no times."""
    attempts: list[tuple[str, int]]
    """The text of each attempt and the index of its first row; "" if the file names none."""
    records: Records
    places: Mapping[str, Ints]
    """dp, tp and pp, as far as the file has them."""
    hardware: Mapping[str, tuple[list[str], Ints]]
    """Of each of `HARDWARE` that the file has: the distinct texts, and which of them each row has."""
    done: int
    """How much of the file has been read, in units of its source's `total`."""

    def part(self, start: int, end: int) -> RowBlock:
        """Rows from `start` to before `end`."""
        inside = [(text, max(begin - start, 0)) for text, begin in self.attempts if begin < end]
        # Of those that began before, the last one goes on.
        first = max(index for index, (_, begin) in enumerate(inside) if begin == 0)
        return RowBlock(
            path=self.path,
            first_row=self.first_row + start,
            time_s=None if self.time_s is None else self.time_s[start:end],
            attempts=inside[first:],
            records=part_of(self.records, start, end),
            places={name: column[start:end] for name, column in self.places.items()},
            hardware={name: (known, codes[start:end]) for name, (known, codes) in self.hardware.items()},
            done=self.done,
        )


class FileSource(Protocol):
    """A file as record batches of named columns."""

    path: str
    names: list[str]
    left_out: list[str]
    """Columns that `batches` leaves out, since they contain texts of unknown meaning."""
    total: int

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Record batches in file order, each with how much of `total` has been read."""
        ...


class RowReader:
    """Reads one source. `left_out` has its text columns without a known name."""

    def __init__(self, source: FileSource, mapping: Mapping[str, str]) -> None:
        """Read the header.

        Raises:
            ReplayError: a column is missing or stands twice.
        """
        self.path = source.path
        self.total = source.total
        self.ours = renamed(source.path, source.names, mapping)
        self.known = set(self.ours.values())
        self.left_out = set(source.left_out)
        self._source = source
        self._row = 1
        self._numeric: set[str] = set()

    @property
    def measured(self) -> list[str]:
        """The metrics that the header names and those derived from them; columns of other names may be texts."""
        names = [COLUMNS.get(name, name) for name in self.ours.values() if name in COLUMNS or name in EXACT]
        return [*names, "busy_s"] if _makes_up_busy_s(names) else names

    def rows(self) -> Iterator[RowBlock]:
        """All rows, a batch at a time.

        Raises:
            ReplayError: a field is wrong for its column. The rows before it have been returned.
        """
        for batch, done in self._source.batches():
            rows, broken = self._sound(batch, done)
            if rows is not None:
                yield rows
            if broken is not None:
                raise broken
            self._row += batch.num_rows
        if self._row == 1:
            raise ReplayError(self.path, "there are no rows")

    def _sound(self, batch: Any, done: int) -> tuple[RowBlock | None, ReplayError | None]:
        """The rows of a batch, or those before the first wrong one and the error of that one."""
        broken = None
        while batch.num_rows:
            try:
                return self._rows(batch, done), broken
            except ReplayError as error:
                # Columns are read one after the other: another column may be wrong in an earlier row.
                broken = error
                batch = batch.slice(0, 0 if error.row is None else error.row - self._row)
        return None, broken

    def _rows(self, batch: Any, done: int) -> RowBlock:
        columns = {self.ours[name]: batch.column(name) for name in batch.schema.names if name in self.ours}
        step, here = integers(columns["step"], self._place("step"), STEP_MAX - 1)
        if here is not None:
            raise self._place("step").error("is empty", int(np.argmin(here)))
        zeros = np.zeros(len(step), dtype=np.int64)
        rank = self._whole(columns, "rank", WORLD_SIZE_MAX - 1)
        exact = {name: self._exact(columns[name], name) for name in EXACT if name in columns}
        names, values, present = self._metrics(columns)
        kind = self._kinds(columns["kind"]) if "kind" in columns else zeros.astype(np.uint8)
        records = Records(step, zeros if rank is None else rank, kind, names, values, present, exact)
        places = {name: self._whole(columns, name, WORLD_SIZE_MAX) for name in PLACES}
        return RowBlock(
            path=self.path,
            first_row=self._row,
            time_s=self._times(columns),
            attempts=runs(*texts(columns["attempt"], self._place("attempt"))) if "attempt" in columns else [("", 0)],
            records=records,
            places={name: column for name, column in places.items() if column is not None},
            hardware={name: texts(columns[name], self._place(name)) for name in HARDWARE if name in columns},
            done=done,
        )

    def _exact(self, column: Any, name: str) -> Exact:
        place = self._place(name)
        return Exact(*(bits(column, place) if name in FINGERPRINTS else counts(column, place, COUNT_MAX)))

    def _place(self, column: str) -> CellPlace:
        theirs = next((name for name, ours in self.ours.items() if ours == column), column)
        return CellPlace(self.path, theirs, self._row)

    def _whole(self, columns: dict[str, Any], name: str, highest: int) -> Ints | None:
        if name not in columns:
            return None
        values, here = integers(columns[name], self._place(name), highest)
        if here is not None and name == "rank":
            raise self._place(name).error("is empty", int(np.argmin(here)))
        return values

    def _times(self, columns: dict[str, Any]) -> Floats | None:
        if "time_s" not in columns:
            return None
        values, here = numbers(columns["time_s"], self._place("time_s"))
        usable = np.isfinite(values) if here is None else here & np.isfinite(values)
        wrong = usable & (np.abs(values) > TIME_S_MAX)
        if wrong.any():
            index = int(wrong.argmax())
            raise self._place("time_s").error(f"{values[index]:g} is too large for a time in seconds", index)
        return np.where(usable, values, np.nan)

    def _kinds(self, column: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
        known, codes = texts(column, self._place("kind"))
        numbers_of = [_KINDS.index(text or "train") if (text or "train") in _KINDS else 255 for text in known]
        kinds = np.asarray(numbers_of, dtype=np.uint8)[codes]
        if (kinds == 255).any():
            index = int((kinds == 255).argmax())
            raise self._place("kind").error(f"{known[codes[index]][:40]!r} is none of {', '.join(_KINDS)}", index)
        return kinds

    def _metrics(self, columns: dict[str, Any]) -> tuple[tuple[str, ...], Floats, Bools | None]:
        found: dict[str, tuple[Floats, Bools | None]] = {}
        for name, column in columns.items():
            if name in COLUMNS:
                found[COLUMNS[name]] = numbers(column, self._place(name))
            elif self._is_metric(name, column):
                found[name] = numbers(column, self._place(name))
        if _makes_up_busy_s(found):
            found["busy_s"] = _sum([found[name] for name in OWN_WORK if name in found])
        rows = len(next(iter(columns.values())))
        values = np.stack([values for values, _ in found.values()]) if found else np.zeros((0, rows))
        if all(present is None for _, present in found.values()):
            return tuple(found), values, None
        everywhere = np.ones(rows, dtype=np.bool_)
        present = np.stack([everywhere if here is None else here for _, here in found.values()])
        return tuple(found), values, present

    def _is_metric(self, name: str, column: Any) -> bool:
        """Whether a column of another name has numbers; its first batch with values decides."""
        if name in KNOWN_COLUMNS or name in self.left_out:
            return False
        if name in self._numeric or is_number(column):
            return True
        if column.null_count == len(column):
            return False
        try:
            numbers(column, self._place(name))
        except ReplayError:
            self.left_out.add(name)
            return False
        self._numeric.add(name)
        return True


def part_of(records: Records, start: int, end: int) -> Records:
    """Records from `start` to before `end`, as views."""
    exact = {
        name: Exact(column.values[start:end], None if column.present is None else column.present[start:end])
        for name, column in records.exact.items()
    }
    return Records(
        step=records.step[start:end],
        rank=records.rank[start:end],
        kind=records.kind[start:end],
        names=records.names,
        values=records.values[:, start:end],
        present=None if records.present is None else records.present[:, start:end],
        exact=exact,
    )


def runs(known: list[str], codes: Ints) -> list[tuple[str, int]]:
    """Runs of equal codes: the text and the first index of each."""
    starts = [0, *(np.flatnonzero(codes[1:] != codes[:-1]) + 1).tolist()]
    return [(known[codes[start]], start) for start in starts]


def _makes_up_busy_s(names: Collection[str]) -> bool:
    return "busy_s" not in names and any(name in names for name in OWN_WORK)


def _sum(parts: list[tuple[Floats, Bools | None]]) -> tuple[Floats, Bools | None]:
    """Sum of columns; present where every one of them is."""
    total = np.sum([values for values, _ in parts], axis=0)
    masks = [present for _, present in parts if present is not None]
    return total, np.logical_and.reduce(masks) if masks else None
