"""All tables, the same on SQLite and PostgreSQL; other modules import them from here.

Times are integer nanoseconds since the Unix epoch.

`stream` writes positions, ticks, incidents, announcements and the commands that it requests, in one transaction for
each batch; `api` writes commands, orders, tokens, settings and audit; `notify` turns announcements into the outbox, and
writes deliveries.
"""

from rankwatch_service.store.models.access import (
    Agent,
    Audit,
    IdempotentReply,
    MetricRuleRow,
    PolicyRule,
    Setting,
    SignedJob,
    Token,
    TuningVersion,
)
from rankwatch_service.store.models.base import Base
from rankwatch_service.store.models.commands import AgentView, Checkpoint, Command, HostRecord, Order, RankTrace
from rankwatch_service.store.models.incidents import (
    AlertRow,
    Announcement,
    Delivery,
    Feed,
    Incident,
    IncidentFeedback,
    IncidentTransition,
    Lease,
    MessageLimitRow,
    Outbox,
    Receiver,
    Silence,
    UsedLink,
)
from rankwatch_service.store.models.jobs import (
    Attempt,
    Job,
    JobDevice,
    JobHostDevice,
    JobOwnership,
    SeriesChunk,
    SeriesRollup,
)
from rankwatch_service.store.models.streaming import (
    ControlEnd,
    ControlRecord,
    DeadLetter,
    IdleJob,
    LogPartition,
    LogRecord,
    Snapshot,
    SnapshotChunk,
    StreamGrant,
    StreamPosition,
    StreamProcess,
    StreamReport,
    StreamTick,
)

__all__ = [
    "Agent",
    "AgentView",
    "AlertRow",
    "Announcement",
    "Attempt",
    "Audit",
    "Base",
    "Checkpoint",
    "Command",
    "ControlEnd",
    "ControlRecord",
    "DeadLetter",
    "Delivery",
    "Feed",
    "HostRecord",
    "IdempotentReply",
    "IdleJob",
    "Incident",
    "IncidentFeedback",
    "IncidentTransition",
    "Job",
    "JobDevice",
    "JobHostDevice",
    "JobOwnership",
    "Lease",
    "LogPartition",
    "LogRecord",
    "MessageLimitRow",
    "MetricRuleRow",
    "Order",
    "Outbox",
    "PolicyRule",
    "RankTrace",
    "Receiver",
    "SeriesChunk",
    "SeriesRollup",
    "Setting",
    "SignedJob",
    "Silence",
    "Snapshot",
    "SnapshotChunk",
    "StreamGrant",
    "StreamPosition",
    "StreamProcess",
    "StreamReport",
    "StreamTick",
    "Token",
    "TuningVersion",
    "UsedLink",
]
