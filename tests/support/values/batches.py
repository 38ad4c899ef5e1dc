"""Small telemetry batches, written out by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankwatch import wire
from rankwatch_service.telemetry.bundle import Bundle, BundleTable, read_bundle
from rankwatch_service.telemetry.columns import records
from rankwatch_service.telemetry.envelope import decode_envelope


def column(values: Sequence[Any], dtype: str = "f8") -> wire.Column:
    """None is absent."""
    present = np.array([value is not None for value in values])
    data = np.array([0 if value is None else value for value in values], dtype=f"<{dtype}").tobytes()
    return wire.Column(dtype, data, 0, None if present.all() else np.packbits(present, bitorder="little").tobytes())


def table(
    step: Sequence[int], rank: Sequence[int], exact: Mapping[str, Sequence[Any]] | None = None, **values: Sequence[Any]
) -> wire.Table:
    columns = {"step": column(step, "i8"), "rank": column(rank, "u4")}
    columns |= {name: column(cells) for name, cells in values.items()}
    columns |= {name: column(cells, "i8") for name, cells in (exact or {}).items()}
    return wire.Table(len(step), columns)


def batch(seq: int = 0, **fields: Any) -> wire.Batch:
    header = {"job": "gpt", "attempt": "l.0", "host": "node-1", "boot": "b1", "sent_unix_ns": 1}
    return wire.Batch(**({"schema": wire.SCHEMA_VERSION, "seq": seq} | header | fields))


def bundle(*batches: wire.Batch) -> Bundle:
    """As the stream reads them."""
    return read_bundle([decode_envelope(wire.encode(one)) for one in batches])


def rows(*tables: wire.Table) -> BundleTable:
    """The rows of batches that have one table each."""
    return BundleTable(records(*tables), np.repeat(range(len(tables)), [one.rows for one in tables]))


def ranks(world_size: int, host: str = "node-1", chosen: Sequence[int] | None = None) -> tuple[wire.RankInfo, ...]:
    return tuple(
        wire.RankInfo(rank, world_size, rank, host, f"GPU-{rank}", 1_000 + rank, dp=rank)
        for rank in (range(world_size) if chosen is None else chosen)
    )


def progress(rank: int, step: int, **fields: Any) -> wire.Progress:
    return wire.Progress(rank, step, **({"phase": "forward", "phase_age_s": 0.0, "step_age_s": 0.0} | fields))
