"""What one line of a log says of a step, and by which names.

CSV files, and the history in Hugging Face's `trainer_state.json`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

STEP_MAX: Final = 1 << 47
"""Steps are below it: what a recorder can hold."""

_KNOWN: Final = {
    "loss": "loss",
    "lm_loss": "loss",
    "global_avg_loss": "loss",
    "reduced_train_loss": "loss",
    "grad_norm": "grad_norm",
    "gradient_norm": "grad_norm",
    "lr": "lr",
    "learning_rate": "lr",
    "global_batch_size": "batch_size",
    "iteration_time": "step_time_s",
    "step_time_s": "step_time_s",
    "train_step_timing_in_s": "step_time_s",
}
_PREFIX: Final = re.compile(
    r"^(train|training|loss_metrics|optim)/+|^train_(?=loss(?:_step)?$)|(?<=^loss)/train$|(?<=loss)_step$"
)
STEP_NAMES: Final = ("train/global_step", "trainer/global_step", "global_step", "step", "iteration", "iter", "_step")
"""Columns that number the steps, the surest first: `_step` of W&B's tables counts rows."""
TIME_NAMES: Final = ("time_s", "_timestamp", "timestamp")
"""Columns with the time of a row, in Unix seconds."""
_NO_VALUES: Final = frozenset({*STEP_NAMES, *TIME_NAMES, "_runtime"})


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step as a log reports it."""

    step: int
    values: Mapping[str, float]
    """By the names that detectors know."""
    step_time_s: float | None = None
    """Seconds of one step, if the log says so."""
    time_s: float | None = None
    """When it was written, by the log's own clock."""


@dataclass(frozen=True, slots=True)
class LoggedValues:
    """Values of the newest step, which are no report of a step: an evaluation."""

    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class End:
    """The log says that training has ended in order."""


Entry = LoggedStep | LoggedValues | End


class Parser(Protocol):
    """Reads one format. A file that begins anew gets a new parser. `LogIntake` calls it, and bears what it raises."""

    def cut(self, data: bytes) -> Iterator[Any]:
        """The pieces, such as lines, that these further bytes complete."""

    def parse(self, piece: Any) -> Iterator[Entry]:
        """The entries that a piece completes; none of a piece of another kind."""

    def flush(self) -> Iterator[Entry]:
        """Nothing came for a while: the entries that only a further one would have completed."""


class LineCutter:
    """Cuts bytes into lines, each with its end: a line feed or a carriage return, by which progress bars end."""

    def __init__(self, bytes_max: int) -> None:
        """Begin with an empty line.

        Args:
            bytes_max: of a longer line only more than these are kept, so that `text` knows it.
        """
        self._bytes_max = bytes_max
        self._rest = b""

    def cut(self, data: bytes) -> Iterator[bytes]:
        """The lines that these further bytes complete."""
        lines = (self._rest + data).splitlines(keepends=True)
        complete = not lines or lines[-1].endswith((b"\n", b"\r"))
        self._rest = b"" if complete else lines.pop()[: self._bytes_max + 1]
        yield from lines

    def text(self, line: bytes) -> str:
        """A line without its end.

        Raises:
            ValueError: it is too long.
        """
        line = line.rstrip(b"\r\n")
        if len(line) > self._bytes_max:
            raise ValueError(f"longer than {self._bytes_max:,} bytes")
        return line.decode("utf-8", "replace")


def known_name(name: str) -> str:
    """The name by which detectors know a value; a name that none of them knows as it is, for a chart."""
    bare = _PREFIX.sub("", name.strip().lower().replace("-", "_").replace(" ", "_"))
    return _KNOWN.get(bare, name.strip())


def number(text: str) -> float | None:
    """The number that a text is; `nan`, `inf` and thousands with commas are numbers."""
    try:
        return float(text.strip().replace(",", ""))
    except ValueError:
        return None


def step_number(text: str) -> int:
    """The number of a step.

    Raises:
        ValueError: it is too large for one.
    """
    step = int(text)
    if step >= STEP_MAX:
        raise ValueError(f"a step of {len(text)} digits")
    return step


def row_of(fields: Mapping[str, float]) -> LoggedStep | None:
    """The row of a table, by the names of its columns; None without the number of a step.

    Raises:
        ValueError: the number is none of a step.
    """
    by_name = {name.lower(): value for name, value in fields.items()}
    step, time_s = _first_of(STEP_NAMES, by_name), _first_of(TIME_NAMES, by_name)
    if step is None:
        return None
    if not 0 <= step < STEP_MAX:
        raise ValueError(f"no number of a step: {step:g}")
    values: dict[str, float] = {}
    for name, value in fields.items():
        if name.lower() not in _NO_VALUES:
            values.setdefault(known_name(name), value)
    return LoggedStep(int(step), values, values.pop("step_time_s", None), time_s)


def _first_of(names: Iterable[str], fields: Mapping[str, float]) -> float | None:
    return next((fields[name] for name in names if name in fields), None)


SEPARATORS: Final = ",;\t"
ROW_BYTES_MAX: Final = 1 << 20
"""Longest row of a table."""
STATE_BYTES_MAX: Final = 16 << 20
"""Largest `trainer_state.json`: 80,000 entries of 200 bytes."""
_TRAINED: Final = frozenset({"loss", "grad_norm"})
"""A row of a step has one of these, if rows of other kinds stand beside them."""


class CsvTable:
    """A header, then a row for each step; of several ranks in a `rank` column the first one is followed.

    Where some rows have a loss, the others are evaluations.
    """

    def __init__(self, before: CsvTable | None = None) -> None:
        """Read a file from its begin.

        Args:
            before: read what the file was until it began anew. Lightning writes its table anew when it has further
                columns, and the rows that it had are not read again.
        """
        self._before = before
        self._lines = LineCutter(ROW_BYTES_MAX)
        self._names: list[str] = []
        self._separator = ","
        self._rank: float | None = None
        self._rows = 0
        self._known = 0
        """Rows at the begin that were read before."""

    def cut(self, data: bytes) -> Iterator[bytes]:
        """See `Parser.cut`."""
        return self._lines.cut(data)

    def parse(self, piece: bytes) -> Iterator[Entry]:
        """See `Parser.parse`."""
        entry = self._parsed(self._lines.text(piece).removeprefix("\ufeff").strip())
        if entry is not None:
            yield entry

    def flush(self) -> Iterator[Entry]:
        """See `Parser.flush`; an incomplete row may yet go on."""
        return iter(())

    def _parsed(self, line: str) -> Entry | None:
        if not line:
            return None
        if not self._names:
            self._separator = max(SEPARATORS, key=line.count)
            self._names = self._cells(line)
            before, self._before = self._before, None
            if before is not None and set(before._names) < set(self._names):
                self._known = max(before._rows, before._known)
            return None
        self._rows += 1
        if self._rows <= self._known:
            return None
        cells = zip(self._names, self._cells(line), strict=False)
        fields = {name: value for name, text in cells if (value := number(text)) is not None}
        rank = fields.pop("rank", 0.0)
        self._rank = rank if self._rank is None else self._rank
        row = row_of(fields) if rank == self._rank else None
        if row is not None and not _TRAINED & row.values.keys() and _TRAINED & set(map(known_name, self._names)):
            return LoggedValues(row.values)
        return row

    def _cells(self, line: str) -> list[str]:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=self._separator))]


class CsvTables:
    """Makes the readers of one file, each of which knows the one before it."""

    def __init__(self) -> None:
        self._newest: CsvTable | None = None

    def __call__(self) -> CsvTable:
        """A reader for the file, which begins or begins anew."""
        self._newest = CsvTable(self._newest)
        return self._newest


class TrainerState:
    """A `trainer_state.json`, which is written as a whole with each checkpoint: the entries after the newest known."""

    def __init__(self) -> None:
        self._known = 0

    def cut(self, data: bytes) -> Iterator[Mapping[str, Any]]:
        """The further entries of the history; `data` is the whole file. Nothing while it is being written.

        Raises:
            ValueError: it is too large, or there are numbers in it that cannot be read.
            RecursionError: it is nested too deeply.
        """
        if len(data) > STATE_BYTES_MAX:
            raise ValueError(f"larger than {STATE_BYTES_MAX >> 20} MiB")
        try:
            history = json.loads(data)["log_history"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
            return
        further, self._known = history[self._known :], len(history)
        yield from further

    def parse(self, piece: Mapping[str, Any]) -> Iterator[Entry]:
        """See `Parser.parse`."""
        row = row_of({name: float(value) for name, value in piece.items() if isinstance(value, int | float)})
        if row is not None:
            yield row if _TRAINED & row.values.keys() else LoggedValues(row.values)

    def flush(self) -> Iterator[Entry]:
        """See `Parser.flush`; the file is whole."""
        return iter(())
