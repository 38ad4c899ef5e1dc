"""What one line of a log says of a step, and by which names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

LINE_BYTES_MAX: Final = 1 << 20
"""A longer line is cut: it is no line of a log, but part of a file of another kind."""

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
STEP_NAMES: Final = (
    "train/global_step",
    "trainer/global_step",
    "global_step",
    "step",
    "iteration",
    "iter",
    "_step",
)
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
    """Reads one format. A file that begins anew gets a new parser."""

    def feed(self, data: bytes) -> Iterator[Entry]:
        """The entries that these further bytes complete."""

    def flush(self) -> Iterator[Entry]:
        """Nothing came for a while: the entries that only a further one would have completed."""


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


def row_of(fields: Mapping[str, float]) -> LoggedStep | None:
    """The row of a table, by the names of its columns; None without the number of a step."""
    by_name = {name.lower(): value for name, value in fields.items()}
    step, time_s = _first_of(STEP_NAMES, by_name), _first_of(TIME_NAMES, by_name)
    if step is None or not 0 <= step < 1 << 47:
        return None
    values: dict[str, float] = {}
    for name, value in fields.items():
        if name.lower() not in _NO_VALUES:
            values.setdefault(known_name(name), value)
    return LoggedStep(int(step), values, values.pop("step_time_s", None), time_s)


def _first_of(names: Iterable[str], fields: Mapping[str, float]) -> float | None:
    return next((fields[name] for name in names if name in fields), None)
