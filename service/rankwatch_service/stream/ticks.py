"""What a replay reads besides telemetry: the stored ticks, and the control records that were applied with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sqlalchemy import Engine, select

from rankwatch_service.log.base import Control, Controls
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import StreamTick
from rankwatch_service.stream.place import Place, StoredTick
from rankwatch_service.stream.ticker import CONTROLS_MAX


def stored_ticks(engine: Engine, partition: int, begin: Place, committed: Place) -> tuple[deque[StoredTick], int]:
    """The ticks after `begin` up to `committed`, and the time before the first of them; 0 if it is not known."""
    with read(engine) as connection:
        rows = connection.execute(
            select(StreamTick.number, StreamTick.position, StreamTick.control_position, StreamTick.time_unix_ns)
            .where(
                StreamTick.partition == partition,
                StreamTick.number >= begin.tick_number,
                StreamTick.number <= committed.tick_number,
            )
            .order_by(StreamTick.number)
        )
        ticks = deque(StoredTick(*row) for row in rows)
    # The tick at `begin` is processed already: a replay needs its time alone.
    if ticks and ticks[0].number == begin.tick_number:
        return ticks, ticks.popleft().time_unix_ns
    return ticks, 0


def applied_controls(
    controls: Controls, concerns: Callable[[Control], bool], begin: Place, committed: Place
) -> deque[Control]:
    """The control records applied since `begin` that concern the partition: few, between two snapshots."""
    applied: deque[Control] = deque()
    position = begin.control_position
    while position < committed.control_position and (found := controls.read(position, CONTROLS_MAX)):
        position = found[-1].position + 1
        applied.extend(c for c in found if c.position < committed.control_position and concerns(c))
    return applied
