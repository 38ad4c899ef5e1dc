"""The one transaction of a batch: position, ticks and everything that follows from them, or nothing.

Two things keep an effect from being written twice: the position is committed with the effects, and only by the
partition's owner (`stream.saved`); and ids are derived from what they name, so writing one again gives one row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from sqlalchemy import Connection, delete, func, insert, select, update

from rankwatch import wire
from rankwatch_service.job.effects import Effects
from rankwatch_service.log import control_log, sql_log
from rankwatch_service.log.base import Offsets, StoredTick
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.orders import traces
from rankwatch_service.orders.commands import record_request, set_state
from rankwatch_service.orders.order import CommandOutcome
from rankwatch_service.store import job_removal
from rankwatch_service.store.engine import upsert
from rankwatch_service.store.models import (
    Announcement,
    Attempt,
    Checkpoint,
    Command,
    Feed,
    HostRecord,
    IdleJob,
    Incident,
    IncidentTransition,
    Job,
    JobDevice,
    JobHostDevice,
    Snapshot,
    StreamGrant,
    StreamPosition,
    StreamTick,
)
from rankwatch_service.store.rows import (
    announcement_row,
    attempt_columns,
    attempt_row,
    checkpoint_row,
    command_row,
    feed_row,
    host_record_row,
    incident_row,
    job_row,
    transition_row,
)
from rankwatch_service.stream.saved import own, store_grants, trim_grants

TRIM_RECORDS: Final = 1_000
"""Control records removed in one transaction, so that other writers do not wait for long."""


def resume(connection: Connection, partition: int, epoch: int, position: int, is_new_log: bool) -> None:
    """Set the position at which a start goes on. If the log is new, remove what refers to positions in the old one.

    Raises:
        FencedError: as in `own`.
    """
    needed = {"position_needed": position} if is_new_log else {}
    own(connection, partition, epoch, position=position, **needed)
    if is_new_log:
        _forget_old_log(connection, partition, position)


def _forget_old_log(connection: Connection, partition: int, position: int) -> None:
    # The newest tick stays, because the time in the new log goes on from it.
    newest = connection.scalar(select(func.max(StreamTick.number)).where(StreamTick.partition == partition))
    connection.execute(delete(StreamTick).where(StreamTick.partition == partition, StreamTick.number < newest))
    connection.execute(update(StreamTick).where(StreamTick.partition == partition).values(position=position))
    # Settings come from the control log, which is not new.
    mine = Snapshot.partition == partition
    connection.execute(delete(Snapshot).where(mine, Snapshot.job != ALL_JOBS))
    connection.execute(update(Snapshot).where(mine).values(position=position))
    connection.execute(delete(IdleJob).where(IdleJob.partition == partition))
    connection.execute(delete(StreamGrant).where(StreamGrant.partition == partition))


def forget(connection: Connection, partition: int, kept: Offsets, partitions: int) -> None:
    """Remove the ticks and control records that no start needs any more, in the caller's write transaction.

    Args:
        connection: of that transaction.
        partition: whose ticks are removed.
        kept: the earliest position from which a start of the partition may replay.
        partitions: how many the source has now. What only partitions that it had before need is removed.
    """
    connection.execute(
        delete(StreamTick).where(StreamTick.partition == partition, StreamTick.number < kept.tick_number)
    )
    trim_grants(connection, partition, kept.position)
    # A former owner that does not know yet that it was fenced may call this with an older place.
    mine = (StreamPosition.partition == partition, StreamPosition.position_needed <= kept.position)
    needed = {"position_needed": kept.position, "control_needed": kept.control_position}
    connection.execute(update(StreamPosition).where(*mine).values(needed))
    living = StreamPosition.partition < partitions
    needed_by_all = connection.scalar(select(func.min(StreamPosition.control_needed)).where(living)) or 0
    control_log.trim(connection, needed_by_all, TRIM_RECORDS)


def commit(
    connection: Connection,
    partition: int,
    epoch: int,
    offsets: Offsets,
    ticks: Sequence[StoredTick],
    effects: Effects,
    now_unix_ns: int,
) -> None:
    """Write everything that follows from one batch, in the caller's write transaction.

    Commands are stamped with `now_unix_ns`: the tick that decided on them may be a second old, and that is not part of
    how long a command takes.

    Raises:
        FencedError: as in `own`.
    """
    own(connection, partition, epoch, **asdict(offsets))
    if ticks:
        connection.execute(insert(StreamTick), [{"partition": partition, **asdict(tick)} for tick in ticks])
    for job in effects.deleted_jobs:
        job_removal.delete_job(connection, job, now_unix_ns)
    store_grants(connection, partition, effects.grants)
    _jobs(connection, effects)
    _incidents(connection, effects)
    _commands(connection, effects, now_unix_ns)
    traces.store(connection, effects.traces)
    for _, received in effects.stacks:
        set_state(connection, received.command, traces.stacks_outcome(received), "stream", now_unix_ns)
    for job, entry in effects.checkpoints:
        row = checkpoint_row(job, entry)
        connection.execute(upsert(connection, Checkpoint, row), row)
    for refused in effects.refused:
        detail = f"partition {partition}, position {refused.position}: {refused.detail}"
        sql_log.keep(connection, "stream", refused.reason, detail, refused.value, refused.at_unix_ns)
    if effects.feed:
        connection.execute(insert(Feed), list(map(feed_row, effects.feed)))


def _jobs(connection: Connection, effects: Effects) -> None:
    if summaries := list(map(job_row, effects.jobs.values())):
        connection.execute(upsert(connection, Job, summaries[0]), summaries)
    attempts: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for (job, attempt), change in effects.attempts.items():
        columns = attempt_columns(change)
        attempts[tuple(columns)].append(attempt_row(job, attempt, columns))
    for changed, changes in attempts.items():
        connection.execute(upsert(connection, Attempt, changed), changes)
    rows = [{"job": job, **asdict(device)} for job, device in effects.devices]
    if others := [row for row in rows if row["kind"] != wire.GPU]:
        connection.execute(upsert(connection, JobHostDevice, others[0]), others)
    if gpus := [{name: row[name] for name in row if name != "kind"} for row in rows if row["kind"] == wire.GPU]:
        connection.execute(upsert(connection, JobDevice, gpus[0]), gpus)


def _incidents(connection: Connection, effects: Effects) -> None:
    newest = {transition.incident.id: transition.incident for transition in effects.transitions}
    for incident in newest.values():  # before its transitions, which refer to it by a foreign key
        row = incident_row(incident)
        connection.execute(upsert(connection, Incident, row), row)
    for transition in effects.transitions:
        connection.execute(upsert(connection, IncidentTransition), transition_row(transition))
    if announcements := list(map(announcement_row, effects.announcements)):
        connection.execute(insert(Announcement), announcements)
    for entry in effects.host_incidents:
        row = host_record_row(entry)
        reported = [name for name in row if name != "host_id"]  # a later host of its name may have its record by now
        connection.execute(upsert(connection, HostRecord, reported), row)


def _commands(connection: Connection, effects: Effects, now_unix_ns: int) -> None:
    for request in effects.commands:
        row = command_row(request) | {"requested_unix_ns": now_unix_ns}
        # The audit trail gets a request once, even if the command was inserted before.
        if connection.execute(upsert(connection, Command), row).rowcount:
            record_request(connection, request, now_unix_ns)
            if request.refused_because:
                outcome = CommandOutcome("refused", request.refused_because)
                set_state(connection, request.id, outcome, request.requested_by, now_unix_ns)
