"""One message on its way to the service, and the records that are lost with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from rankwatch import wire

Losses = Counter[tuple[str, str, str]]
"""Records that never reach the service, by (job, attempt, reason)."""

OVERHEAD_BYTES: Final = 200
"""What a parcel costs in memory besides its body."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """An encoded batch, and up to which ring entry it settles each recorder."""

    body: bytes
    positions: Mapping[str, int] = field(default_factory=dict)
    """Recorder path to the sequence number of the last entry in here."""

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return len(self.body) + OVERHEAD_BYTES


def without_records(body: bytes) -> tuple[bytes | None, Losses]:
    """Remove step and values records from an encoded batch: they are most of it, and worth least when old.

    Returns:
        The rest, None if nothing is left that matters; and the removed records, as lost to the spool's limit.
    """
    try:
        batch = wire.decode_batch(body)
    except msgspec.DecodeError:
        return None, Losses({("", "", "spool_torn"): 1})
    losses = Losses()
    rows = sum(table.rows for table in (batch.steps, batch.values) if table is not None)
    if rows:
        losses[batch.job, batch.attempt, "spool"] = rows
    rest = msgspec.structs.replace(batch, steps=None, values=None)
    if not (rest.events or rest.ranks or rest.progress):
        return None, losses
    return wire.encode(rest), losses


def all_records(body: bytes, reason: str) -> Losses:
    """Count everything in an encoded batch as lost for this reason."""
    try:
        batch = wire.decode_batch(body)
    except msgspec.DecodeError:
        return Losses({("", "", reason): 1})
    rows = sum(table.rows for table in (batch.steps, batch.values) if table is not None)
    count = rows + len(batch.progress) + len(batch.events) + len(batch.devices) + len(batch.host_devices)
    return Losses({(batch.job, batch.attempt, reason): max(1, count)})
