"""Removes every row of a job but those of the log, of the series and of the audit trail, which keeps everything.

The log is trimmed by position (`stream`), and series are removed in pieces (`series.rows`).
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, delete, insert, select

from rankwatch_service.store.models import (
    Agent,
    AgentView,
    AlertRow,
    Announcement,
    Attempt,
    Base,
    Checkpoint,
    Command,
    Delivery,
    Feed,
    HostRecord,
    IdleJob,
    Incident,
    Job,
    JobDevice,
    JobHostDevice,
    JobOwnership,
    MessageLimitRow,
    Outbox,
    SignedJob,
    Snapshot,
)

OF_JOB: Final[tuple[type[Base], ...]] = (
    Agent,
    AgentView,
    AlertRow,
    Announcement,
    Attempt,
    Checkpoint,
    Command,  # with its orders and traces
    HostRecord,
    Incident,  # with its transitions and feedback
    JobDevice,
    JobHostDevice,
    JobOwnership,
    MessageLimitRow,
    IdleJob,
    SignedJob,
    Snapshot,  # with its chunks
)
"""Tables whose rows belong to the job that their column `job` names."""


def delete_job(connection: Connection, job: str, now_unix_ns: int) -> None:
    """Delete the job and announce it in the feed, in a write transaction. Also right where there is no such job."""
    mine = select(Outbox.id).join(Incident, Incident.id == Outbox.incident_id).where(Incident.job == job)
    connection.execute(delete(Delivery).where(Delivery.outbox_id.in_(mine)))
    connection.execute(delete(Outbox).where(Outbox.id.in_(mine)))
    for table in OF_JOB:
        connection.execute(delete(table).where(table.__table__.c.job == job))
    connection.execute(delete(Job).where(Job.name == job))
    # First, because SQLite gives the id of a newest row that is deleted to the next one.
    news = insert(Feed).values(topic="job", job=job, data={"state": "deleted"}, at_unix_ns=now_unix_ns)
    announced = connection.scalar(news.returning(Feed.id))
    connection.execute(delete(Feed).where(Feed.job == job, Feed.id < announced))
