"""The state of stream as the store knows it: partitions with their owners, and processes, as last reported."""

from __future__ import annotations

from sqlalchemy import Connection, select

from rankwatch_service.api.reply import ApiReply
from rankwatch_service.store.models import LogPartition, StreamPosition, StreamProcess, StreamReport


class PartitionState(ApiReply):
    """One partition of the log of telemetry."""

    partition: int
    owner: str
    """HOST:PID of the process that reported it; empty if none has."""
    epoch: int
    """Grows whenever another process takes the partition over."""
    position: int
    """Committed up to here."""
    end: int
    """Position of the next record; with Kafka, as last reported by the owner."""
    lag: int
    """Records not committed yet."""
    lost_records: int
    """Records that the log removed before this owner could read them."""
    tick_unix_ns: int
    """Time of its newest tick; does not advance while all its jobs are idle."""
    reported_unix_ns: int


class ProcessState(ApiReply):
    """One stream process of the last 24 hours."""

    owner: str
    started_unix_ns: int
    counters: dict[str, int]
    """Events since its start, by name."""
    reported_unix_ns: int


class StreamState(ApiReply):
    """All partitions and processes of stream."""

    partitions: list[PartitionState]
    processes: list[ProcessState]


def partitions(connection: Connection, in_store: bool) -> list[PartitionState]:
    """All partitions that ever had an owner or, if the log is in the store, were ever written to."""
    committed = {row.partition: row for row in connection.execute(select(StreamPosition.__table__))}
    reports = {row.partition: row for row in connection.execute(select(StreamReport.__table__))}
    ends: dict[int, int] = {}
    if in_store:
        written = connection.execute(select(LogPartition.partition, LogPartition.next_position))
        ends = {partition: end for partition, end in written}  # noqa: C416 - rows are no tuples to the type checker
    states = []
    for partition in sorted({*committed, *ends}):
        row, report = committed.get(partition), reports.get(partition)
        position = row.position if row is not None else 0
        end = ends.get(partition, report.end if report is not None else position)
        states.append(
            PartitionState(
                partition=partition,
                owner=report.owner if report is not None else "",
                epoch=row.epoch if row is not None else 0,
                position=position,
                end=end,
                lag=max(end - position, 0),
                lost_records=report.lost_records if report is not None else 0,
                tick_unix_ns=report.tick_unix_ns if report is not None else 0,
                reported_unix_ns=report.at_unix_ns if report is not None else 0,
            )
        )
    return states


def processes(connection: Connection) -> list[ProcessState]:
    """Processes of the last 24 hours, newest start first."""
    rows = connection.execute(select(StreamProcess.__table__).order_by(StreamProcess.started_unix_ns.desc()))
    return [
        ProcessState(
            owner=row.owner,
            started_unix_ns=row.started_unix_ns,
            counters=row.counters,
            reported_unix_ns=row.at_unix_ns,
        )
        for row in rows
    ]
