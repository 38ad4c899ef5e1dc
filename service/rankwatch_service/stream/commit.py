"""The one transaction of a batch: positions, ticks and everything that follows from them, or nothing of it.

Ids are derived, so that an effect which is there already is left as it is: the second guard, not the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from sqlalchemy import Connection, delete, func, insert, select, update

from rankwatch_service.job.effects import Effects
from rankwatch_service.log import dead_letters
from rankwatch_service.log.base import ALL_JOBS
from rankwatch_service.orders.commands import record_request
from rankwatch_service.policy.checkpoint_ledger import Entry
from rankwatch_service.store.models import (
    Attempt,
    Checkpoint,
    Command,
    Feed,
    HostRecord,
    Incident,
    IncidentTransition,
    Job,
    Outbox,
    RestingJob,
    Snapshot,
    StreamPosition,
    StreamTick,
)
from rankwatch_service.store.rows import command_row, host_record_row, incident_row, outbox_row, transition_row
from rankwatch_service.store.upsert import upsert

_NEW_ATTEMPT: Final[dict[str, Any]] = {
    "started_unix_ns": 0,
    "ended_unix_ns": None,
    "world_size": 0,
    "first_step": None,
    "last_step": None,
    "topology": {},
    "number": 0,
}


class FencedError(Exception):
    """Another process has taken over this partition: nothing was committed, and nothing more may be."""


@dataclass(frozen=True, slots=True)
class Place:
    """How far a partition is processed.

    Every record below `position`, every tick up to `tick_number` and every control record below `control_position`.
    """

    position: int
    tick_number: int
    control_position: int

    def is_later(self, other: Place) -> bool:
        """Whether more of the same log and the same ticks is processed here."""
        return (self.tick_number, self.position) > (other.tick_number, other.position)


@dataclass(frozen=True, slots=True)
class StoredTick:
    """Before the record at `position` the time was `time_unix_ns`.

    By then the control records below `control_position` had been applied.
    """

    number: int
    position: int
    control_position: int
    time_unix_ns: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A partition taken over: where to go on, the epoch that only this owner has, and where the logs are kept from."""

    place: Place
    epoch: int
    needed_position: int
    needed_control: int


def claim(connection: Connection, partition: int) -> Claim:
    """Take over a partition; whoever had it can commit nothing more."""
    row = connection.execute(select(StreamPosition.__table__).filter_by(partition=partition)).one_or_none()
    if row is None:
        connection.execute(insert(StreamPosition).values(partition=partition, position=0, tick_number=0, epoch=1))
        return Claim(Place(0, 0, 0), 1, 0, 0)
    taken = update(StreamPosition).where(StreamPosition.partition == partition).values(epoch=row.epoch + 1)
    connection.execute(taken)
    place = Place(row.position, row.tick_number, row.control_position)
    return Claim(place, row.epoch + 1, row.position_needed, row.control_needed)


def own(connection: Connection, partition: int, epoch: int, **columns: int) -> None:
    """Set columns of a partition's position, as its owner.

    Raises:
        FencedError: the partition has another owner now; the caller must let the transaction go.
    """
    mine = (StreamPosition.partition == partition, StreamPosition.epoch == epoch)
    if connection.execute(update(StreamPosition).where(*mine).values(columns | {"epoch": epoch})).rowcount != 1:
        raise FencedError(f"partition {partition} was taken over by another process")


def begin_another_log(connection: Connection, partition: int, epoch: int, position: int) -> None:
    """The log was made anew and is read from `position` on: what refers to places in the old one goes.

    Raises:
        FencedError: as in `own`.
    """
    own(connection, partition, epoch, position=position, position_needed=position)
    newest = connection.scalar(select(func.max(StreamTick.number)).where(StreamTick.partition == partition))
    connection.execute(delete(StreamTick).where(StreamTick.partition == partition, StreamTick.number < newest))
    connection.execute(update(StreamTick).where(StreamTick.partition == partition).values(position=position))
    # What people have set comes from the other log, which goes on.
    mine = Snapshot.partition == partition
    connection.execute(delete(Snapshot).where(mine, Snapshot.job != ALL_JOBS))
    connection.execute(update(Snapshot).where(mine).values(position=position))
    connection.execute(delete(RestingJob).where(RestingJob.partition == partition))


def commit(
    connection: Connection,
    partition: int,
    epoch: int,
    place: Place,
    ticks: Sequence[StoredTick],
    effects: Effects,
    now_unix_ns: int,
) -> None:
    """Write everything that one batch led to, in the caller's writing transaction.

    Commands count as requested at `now_unix_ns`: decisions are made at the time of the last tick, which may be a second
    ago, and whoever measures how long a command took must not count that.

    Raises:
        FencedError: as in `own`.
    """
    own(connection, partition, epoch, **asdict(place))
    if ticks:
        connection.execute(insert(StreamTick), [{"partition": partition, **asdict(tick)} for tick in ticks])
    _jobs(connection, effects)
    _incidents(connection, effects)
    _commands(connection, effects, now_unix_ns)
    for job, entry in effects.checkpoints:
        row = _checkpoint(job, entry)
        connection.execute(upsert(connection, Checkpoint, row), row)
    for refused in effects.refused:
        detail = f"partition {partition}, position {refused.position}: {refused.detail}"
        dead_letters.keep(connection, "stream", refused.reason, detail, refused.value, refused.at_unix_ns)
    if effects.feed:
        connection.execute(insert(Feed), effects.feed)


def _jobs(connection: Connection, effects: Effects) -> None:
    for row in effects.jobs.values():
        connection.execute(upsert(connection, Job, row), row)
    for (job, attempt), columns in effects.attempts.items():
        row = {"job": job, "attempt": attempt} | _NEW_ATTEMPT | columns
        connection.execute(upsert(connection, Attempt, columns), row)


def _incidents(connection: Connection, effects: Effects) -> None:
    newest = {transition.incident.id: transition.incident for transition in effects.transitions}
    for incident in newest.values():
        row = incident_row(incident)
        connection.execute(upsert(connection, Incident, row), row)
    for transition in effects.transitions:
        connection.execute(upsert(connection, IncidentTransition), transition_row(transition))
    for notification in effects.notifications:
        connection.execute(upsert(connection, Outbox), outbox_row(notification))
    for entry in effects.host_incidents:
        row = host_record_row(entry)
        connection.execute(upsert(connection, HostRecord, row), row)


def _commands(connection: Connection, effects: Effects, now_unix_ns: int) -> None:
    for request in effects.commands:
        row = command_row(request) | {"requested_unix_ns": now_unix_ns}
        if connection.execute(upsert(connection, Command), row).rowcount:
            record_request(connection, request, now_unix_ns)


def _checkpoint(job: str, entry: Entry) -> dict[str, Any]:
    return {
        "job": job,
        "id": entry.id,
        "attempt": entry.attempt,
        "step": entry.step,
        "tier": str(entry.tier),
        "location": entry.location,
        "shards_expected": entry.shards_expected,
        "shards": list(entry.shards),
        "seconds": entry.seconds,
        "bytes": entry.bytes,
        "verdict": str(entry.verdict),
        "verdict_reason": entry.reason,
        "saved_unix_ns": entry.saved_unix_ns,
    }
