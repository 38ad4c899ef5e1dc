"""Removes rows that nobody needs, lets alerts expire, and sends stream the precision of each kind."""

from __future__ import annotations

from typing import Final

from sqlalchemy import ColumnElement, Connection, Engine, delete, exists, func, inspect, select, tuple_

from rankwatch_service.access.tokens import TokenKind
from rankwatch_service.alerts import LASTS_S, AlertRows
from rankwatch_service.clock import Clock
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.control_records import PrecisionSet, encode_control
from rankwatch_service.store.engine import read, upsert, write, write_aside
from rankwatch_service.store.models import (
    Agent,
    AgentView,
    AlertRow,
    Base,
    Command,
    Delivery,
    Feed,
    HostRecord,
    IdempotentReply,
    Incident,
    IncidentFeedback,
    IncidentTransition,
    Job,
    Outbox,
    Setting,
    SignedJob,
    Token,
)
from rankwatch_service.store.settings_rows import precision_by_kind

_DAY_NS: Final = 86_400 * 10**9

FEED_ROWS_MAX: Final = 50_000
"""Rows that a browser can catch up with: a week of a busy installation, 15 MB."""

VIEW_NS: Final = _DAY_NS
"""Age at which the last view of an agent is removed, and an agent that has posted none since; its attempt ended long
before."""

REPLY_NS: Final = _DAY_NS
"""How long the reply to an `Idempotency-Key` is kept."""

HISTORY_NS: Final = 90 * _DAY_NS
"""Finished commands (with their orders) and final notifications (with their deliveries)."""

RECORD_NS: Final = 400 * _DAY_NS
"""Records of hosts, and transitions and feedback of resolved incidents. The incidents themselves are kept."""

EXPIRED_NS: Final = 7 * _DAY_NS
"""How long expired sessions and login tokens stay in the list of tokens."""

CHUNK_ROWS: Final = 1_000
"""Rows removed in one transaction, about 10 ms."""

CHUNKS_MAX: Final = 10
"""Chunks of one table in one run, so that other writers wait only briefly. Once a minute this is 166 rows/s, three
times what 48 busy jobs write to the feed."""


def remove_expired(engine: Engine, now_unix_ns: int) -> int:
    """Remove expired rows, at most `CHUNKS_MAX` chunks of each table; return how many were removed."""
    with read(engine) as connection:
        newest = connection.scalar(select(func.max(Feed.id))) or 0
    short_lived = Token.kind.in_((TokenKind.SESSION, TokenKind.LOGIN))
    settled = (Outbox.state != "waiting") & (Outbox.created_unix_ns < now_unix_ns - HISTORY_NS)
    ancient = select(Incident.id).where(Incident.resolved_unix_ns < now_unix_ns - RECORD_NS)
    tried = select(Delivery.id).where(Delivery.outbox_id == Outbox.id).exists()
    viewed = exists().where(AgentView.agent == Agent.id)
    # A job that has stored anything of its agents is known to stream, or its agents still report.
    begun = exists().where(Job.name == SignedJob.job) | exists().where(Agent.job == SignedJob.job)
    expired: tuple[tuple[type[Base], ColumnElement[bool]], ...] = (
        (Feed, Feed.id <= newest - FEED_ROWS_MAX),
        (IdempotentReply, IdempotentReply.at_unix_ns < now_unix_ns - REPLY_NS),
        (AgentView, AgentView.at_unix_ns < now_unix_ns - VIEW_NS),
        (Agent, (Agent.enrolled_unix_ns < now_unix_ns - VIEW_NS) & ~viewed),
        (SignedJob, (SignedJob.enrolled_unix_ns < now_unix_ns - VIEW_NS) & ~begun),
        (Token, short_lived & (Token.expires_unix_ns < now_unix_ns - EXPIRED_NS)),
        (Command, Command.finished_unix_ns < now_unix_ns - HISTORY_NS),
        (Delivery, Delivery.outbox_id.in_(select(Outbox.id).where(settled))),
        (Outbox, settled & ~tried),
        (IncidentTransition, IncidentTransition.incident_id.in_(ancient)),
        (IncidentFeedback, IncidentFeedback.incident_id.in_(ancient)),
        (HostRecord, HostRecord.at_unix_ns < now_unix_ns - RECORD_NS),
    )
    return sum(_remove(engine, table, where) for table, where in expired)


def _remove(engine: Engine, table: type[Base], where: ColumnElement[bool]) -> int:
    columns = inspect(table).primary_key
    # Skip the rows that another api process is removing now. As a subquery of the DELETE, PostgreSQL may run this once
    # for each row, and then the limit holds for nothing.
    chunk = select(*columns).where(where).limit(CHUNK_ROWS).with_for_update(skip_locked=True)
    removed = 0
    for _ in range(CHUNKS_MAX):
        with write_aside(engine) as connection:
            keys = [tuple(row) for row in connection.execute(chunk)]
            if keys:
                connection.execute(delete(table).where(tuple_(*columns).in_(keys)))
        removed += len(keys)
        if len(keys) < CHUNK_ROWS:
            break
    return removed


GRACE_S: Final = float(LASTS_S)
"""Nothing expires in this time after an api process has begun: while none ran, no repeat could arrive."""


class AlertExpiry:
    """Ends alerts whose `endsAt` has passed. Several api processes may do so beside each other."""

    def __init__(self, engine: Engine, controls: ControlLog, clock: Clock) -> None:
        self._engine = engine
        self._controls = controls
        self._clock = clock
        self._since_s = clock.monotonic_s()

    def run(self) -> int:
        """End what is due; returns how many alerts that were."""
        now = self._clock.unix_ns()
        if self._clock.monotonic_s() - self._since_s < GRACE_S:
            return 0
        with read(self._engine) as connection:
            if not connection.scalar(select(exists().where(AlertRow.ends_unix_ns <= now))):
                return 0
        with write(self._engine) as connection:
            return AlertRows(connection, self._controls, now).expire()


SETTING: Final = "precision"
"""Holds the precision that stream was sent last."""


def report_precision(connection: Connection, controls: ControlLog, now_unix_ns: int) -> None:
    """Send stream the precision, in a `write`, unless it has this one already."""
    counted = _counted(connection, now_unix_ns)
    if counted == _reported(connection):
        return
    row = {"name": SETTING, "value": counted, "updated_unix_ns": now_unix_ns}
    connection.execute(upsert(connection, Setting, row), row)
    record = PrecisionSet({kind: (useful, noise) for kind, (useful, noise) in counted.items()})
    controls.append_in(connection, [Entry(ALL_JOBS, encode_control(record))])


def report_changed_precision(engine: Engine, controls: ControlLog, clock: Clock) -> None:
    """Send stream the precision if it has changed without new feedback."""
    now = clock.unix_ns()
    with read(engine) as connection:
        if _counted(connection, now) == _reported(connection):
            return
    with write(engine) as connection:
        report_precision(connection, controls, now)


def _counted(connection: Connection, now_unix_ns: int) -> dict[str, list[int]]:
    found = precision_by_kind(connection, now_unix_ns)
    return {kind: [of_kind.useful, of_kind.noise] for kind, of_kind in found.items() if of_kind.judged}


def _reported(connection: Connection) -> dict[str, list[int]]:
    return connection.scalar(select(Setting.value).where(Setting.name == SETTING)) or {}
