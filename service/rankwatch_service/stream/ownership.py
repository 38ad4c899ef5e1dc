"""Who may commit a partition: the process that claimed it last.

A claim raises the partition's epoch, and every commit names the epoch of its claim. A process that was replaced, and
does not know it yet, commits nothing.
"""

from __future__ import annotations

from sqlalchemy import Connection, insert, select, update

from rankwatch_service.store.models import StreamPosition
from rankwatch_service.stream.place import Claim, Place


class FencedError(Exception):
    """Another process has taken over this partition: nothing was committed, and nothing may be."""


def claim(connection: Connection, partition: int) -> Claim:
    """Take over a partition, in a write transaction; the process that had it can commit nothing more."""
    # Writers take turns, so no other process can insert the row after it was not found here.
    row = connection.execute(select(StreamPosition.__table__).filter_by(partition=partition)).one_or_none()
    if row is None:
        connection.execute(insert(StreamPosition).values(partition=partition, position=0, tick_number=0, epoch=1))
        return Claim(Place(0, 0, 0), 1, 0, 0)
    taken = update(StreamPosition).where(StreamPosition.partition == partition).values(epoch=row.epoch + 1)
    connection.execute(taken)
    place = Place(row.position, row.tick_number, row.control_position)
    return Claim(place, row.epoch + 1, row.position_needed, row.control_needed)


def own(connection: Connection, partition: int, epoch: int, **columns: int) -> None:
    """Set columns of a partition's row in `stream_position`, as its owner; without columns, only check who owns it.

    Raises:
        FencedError: another process has taken it over; the caller must not commit the transaction.
    """
    mine = (StreamPosition.partition == partition, StreamPosition.epoch == epoch)
    # The epoch is set to what it is, because an UPDATE needs a column.
    if connection.execute(update(StreamPosition).where(*mine).values(columns | {"epoch": epoch})).rowcount != 1:
        raise FencedError(f"partition {partition} was taken over by another process")
