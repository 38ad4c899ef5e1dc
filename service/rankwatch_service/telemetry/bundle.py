"""Bundles: batches of one attempt whose tables are read as one. A single batch is a bundle of one. Pure.

Reading a hundred small tables together costs little more than reading one large table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rankwatch_detectors.base import Ints
from rankwatch_service.telemetry.columns import Block, ColumnError, Records, joined, read_blocks
from rankwatch_service.telemetry.envelope import STEP_MAX, WORLD_SIZE_MAX, BadBatchError, Envelope, Reason, check_range

FAMILIES: Final = ("steps", "values")
"""The tables of a batch."""

_NIL: Final = 0xC0
"""nil in msgpack: the batch has no such table."""


@dataclass(frozen=True)
class BundleTable:
    """The rows that the batches of a bundle have in one family, in the order of sending. Sorted on first use."""

    rows: Records
    batch: Ints
    """[row]: the number of its batch within the bundle."""

    def __len__(self) -> int:
        return len(self.rows.step)

    @cached_property
    def by_step(self) -> Sequence[tuple[int, NDArray[np.intp]]]:
        """(step, indices of its rows), by step. Rows of a step are by rank, those of one rank as they were sent."""
        if len(self) == 0:
            return ()
        order, _ = self._order
        found = self.rows.step[order]
        bounds = [0, *(np.flatnonzero(found[1:] != found[:-1]) + 1).tolist(), len(found)]
        return [(int(found[low]), order[low:high]) for low, high in pairwise(bounds)]

    @property
    def repeats(self) -> bool:
        """Whether a rank has several rows for one step."""
        return len(self) > 0 and self._order[1]

    @cached_property
    def _order(self) -> tuple[NDArray[np.intp], bool]:
        return _in_order(self.rows.step, self.rows.rank)

    def last_batches(self) -> dict[int, int]:
        """The number of the last batch with rows of that step, by step."""
        return {step: int(self.batch[chosen].max()) for step, chosen in self.by_step}

    def chosen(self, rows: NDArray[np.intp]) -> BundleTable:
        """The chosen rows, in that order."""
        return BundleTable(self.rows.rows(rows), self.batch[rows])


@dataclass(frozen=True, slots=True)
class Bundle:
    """Batches of one attempt, in log order, and their tables by family. A family without a table is absent."""

    batches: Sequence[Envelope]
    tables: dict[str, BundleTable]

    @property
    def attempt(self) -> str:
        """The attempt of all its batches."""
        return self.batches[0].attempt

    @property
    def row_count(self) -> int:
        """Rows of all tables."""
        return sum(map(len, self.tables.values()))


def read_bundle(batches: Sequence[Envelope]) -> Bundle:
    """Read and check the tables of batches of one attempt.

    Raises:
        BadBatchError: a table can never be accepted. With several batches, the error does not say whose it is.
    """
    tables = {}
    for family in FAMILIES:
        numbers = [number for number, raw in enumerate(map(attrgetter(family), batches)) if _is_table(raw)]
        if numbers:
            blocks, rows = _read(family, [getattr(batches[number], family) for number in numbers])
            of_table = [numbers[index] for block in blocks for index in block.numbers]
            batch = np.repeat(of_table, [count for block in blocks for count in block.rows])
            tables[family] = BundleTable(rows, batch)
    return Bundle(batches, tables)


def check_tables(batch: Envelope) -> None:
    """Check the tables of one batch as `read_bundle` does.

    Raises:
        BadBatchError: one of its tables can never be accepted.
    """
    for family in FAMILIES:
        raw = getattr(batch, family)
        if _is_table(raw):
            _read(family, [raw])


def table_of(rows: Records) -> BundleTable:
    """The table of a bundle of one with these rows."""
    return BundleTable(rows, np.zeros(len(rows.step), dtype=np.int64))


def _is_table(raw: msgspec.Raw) -> bool:
    written = memoryview(raw)
    return len(written) > 1 or (len(written) == 1 and written[0] != _NIL)


def _read(family: str, tables: Sequence[msgspec.Raw]) -> tuple[list[Block], Records]:
    try:
        blocks = read_blocks(tables)
        rows = joined(blocks)
    except ColumnError as error:
        raise BadBatchError(Reason.COLUMNS, f"{family}: {error}") from error
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadBatchError(Reason.MALFORMED, f"{family}: {error}") from error
    if len(rows.step):
        check_range("step", int(rows.step.min()), 0, STEP_MAX)
        check_range("step", int(rows.step.max()), 0, STEP_MAX)
        check_range("rank", int(rows.rank.min()), 0, WORLD_SIZE_MAX - 1)
        check_range("rank", int(rows.rank.max()), 0, WORLD_SIZE_MAX - 1)
        check_range("kind", int(rows.kind.max()), 0, 2)
    return blocks, rows


def _in_order(steps: Ints, ranks: Ints) -> tuple[NDArray[np.intp], bool]:
    """Row indices sorted by step and rank, those of equal rows in their order; and whether there are equal rows."""
    low, high, width = int(steps.min()), int(steps.max()), int(ranks.max()) + 1
    if (high - low + 1) * width < 2**31:
        # Sorting by one number of 32 bits is three times faster than sorting by two numbers.
        keys = ((steps - low) * width + ranks).astype(np.int32)
        order = np.argsort(keys)
        of_key = keys[order]
        # A stable sort is slower, and is needed only where keys are equal.
        if not (of_key[1:] == of_key[:-1]).any():
            return order, False
        return np.argsort(keys, kind="stable"), True
    order = np.lexsort((ranks, steps))
    of_step, of_rank = steps[order], ranks[order]
    return order, bool(((of_step[1:] == of_step[:-1]) & (of_rank[1:] == of_rank[:-1])).any())
