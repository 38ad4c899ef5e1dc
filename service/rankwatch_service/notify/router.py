"""Makes messages of the transitions in the outbox: by groups where routes are configured.

Groups are stored in the transaction that stores their messages, so a crash or a lost lease neither loses a message nor
makes another one. A control record tells stream whether routes are configured: only then does stream leave it to this
process to find the receivers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

import msgspec
import structlog
from sqlalchemy import Connection, Engine, RowMapping, delete, insert, select, update

from rankwatch_service.clock import Clock
from rankwatch_service.labels.incident_labels import incident_labels
from rankwatch_service.labels.matcher import Labels
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.notify.lease import Lease
from rankwatch_service.notify.receivers import receiver_routes
from rankwatch_service.notify.routes_source import RoutesSource
from rankwatch_service.policy.control_records import RoutingSet, SilenceSet, encode_control
from rankwatch_service.policy.notification import MESSAGE_TYPES, message_id
from rankwatch_service.policy.routing import is_subscribed, mutes
from rankwatch_service.routing.group import Group, GroupMessage
from rankwatch_service.routing.group_body import group_body, group_job
from rankwatch_service.routing.grouping import IncidentGroups
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Incident, IncidentGroup, Outbox, Receiver, Setting, Silence
from rankwatch_service.store.upsert import upsert

SETTING: Final = "routing"
"""Setting with {is_grouped, error, is_file, text}: whether routes are configured, why the newest ones are not in force,
whether a file has them, and those in force."""

TRANSITIONS_MAX: Final = 500
"""Transitions taken in one transaction; the others follow at once."""

RELOAD_POLL_S: Final = 5.0
"""How often the routes are read."""

DELETED_POLL_S: Final = 60.0
"""How often incidents of deleted jobs are dropped from their groups."""

_NOT_CONFIGURED: Final = {"is_grouped": False, "error": "", "is_file": False, "text": ""}

_log = structlog.get_logger(__name__)


class MessageRouter:
    """Groups transitions and writes messages to the outbox while this process holds the lease. For one thread."""

    def __init__(
        self, engine: Engine, lease: Lease, controls: ControlLog, clock: Clock, routes: RoutesSource | None
    ) -> None:
        """Nothing is read before `advance`.

        Args:
            engine: the store.
            lease: of the notifier.
            controls: tells stream who makes the messages.
            clock: decides what is due.
            routes: where no routes are configured, each transition is a message to each receiver that subscribes.
        """
        self._engine = engine
        self._lease = lease
        self._controls = controls
        self._clock = clock
        self._routes = routes
        self._groups: IncidentGroups | None = None
        self._epoch = 0
        """Epoch of the lease under which the store is as this process knows it; 0: read it again."""
        self._reload_s = self._deleted_s = float("-inf")

    def advance(self) -> int:
        """Take new transitions and write the messages that are due; returns how many were written.

        Raises:
            LeaseLostError: another notifier holds the lease; nothing was written.
        """
        if self._routes is not None and self._clock.monotonic_s() >= self._reload_s:
            self._reload(self._routes)
        if self._epoch != self._lease.epoch:
            self._load()
        epoch, self._epoch = self._epoch, 0  # until what follows is committed
        entries = self._ungrouped()
        written = self._subscribed(entries) if self._groups is None else self._grouped(self._groups, entries)
        self._epoch = epoch
        return written

    def _reload(self, routes: RoutesSource) -> None:
        self._reload_s = self._clock.monotonic_s() + RELOAD_POLL_S
        error = routes.error
        if routes.changed() or routes.error != error:
            self._epoch = 0

    def _load(self) -> None:
        """Read the groups, and tell stream who makes the messages."""
        epoch = self._lease.epoch
        with read(self._engine) as connection:
            rows = connection.scalars(select(IncidentGroup.state).order_by(IncidentGroup.key)).all()
            receivers = set(connection.scalars(select(Receiver.name)))
            status = connection.scalar(select(Setting.value).where(Setting.name == SETTING)) or _NOT_CONFIGURED
        stored = [msgspec.convert(row, Group) for row in rows]
        self._groups = None
        kept: dict[str, Group] = {}
        routing = self._routes.routing if self._routes else None
        if routing is not None:
            self._groups = IncidentGroups(routing, stored, self._clock.unix_ns())
            kept = self._groups.groups
            if unknown := routing.receivers() - receivers:
                _log.warning("routes_name_unknown_receivers", receivers=sorted(unknown))
        removed = {group.key for group in stored} - kept.keys()
        present = _NOT_CONFIGURED | {"is_grouped": routing is not None}
        if self._routes is not None:
            present |= {name: getattr(self._routes, name) for name in ("error", "is_file", "text")}
        if kept or removed or present != status:
            with write(self._engine) as connection:
                self._lease.confirm(connection)
                _write_groups(connection, kept.values(), removed)
                row = {"name": SETTING, "value": present, "updated_unix_ns": self._clock.unix_ns()}
                connection.execute(upsert(connection, Setting, row), row)
                if present["is_grouped"] != status["is_grouped"]:
                    record = RoutingSet(is_grouped=routing is not None)
                    self._controls.append_in(connection, [Entry(ALL_JOBS, encode_control(record))])
        self._epoch = epoch

    def _ungrouped(self) -> Sequence[RowMapping]:
        query = select(Outbox.__table__).where(Outbox.state == "ungrouped")
        with read(self._engine) as connection:
            oldest = query.order_by(Outbox.created_unix_ns, Outbox.transition).limit(TRANSITIONS_MAX)
            return connection.execute(oldest).mappings().all()

    def _grouped(self, groups: IncidentGroups, entries: Sequence[RowMapping]) -> int:
        now_unix_ns = self._clock.unix_ns()
        changed = self._forget_deleted(groups)
        for entry in entries:
            changed |= groups.take(json.loads(entry["body"])["data"], entry["created_unix_ns"], now_unix_ns)
        flushed = groups.flush(now_unix_ns, _SilencesInForce(self._engine, now_unix_ns))
        changed |= {group.key for group in flushed.changed}
        if not (entries or changed or flushed.removed):
            return 0
        with write(self._engine) as connection:
            self._lease.confirm(connection)
            _settle(connection, entries)
            for message in flushed.messages:
                connection.execute(insert(Outbox).values(**_message_row(message)))
            stored = [group for key, group in groups.groups.items() if key in changed]
            _write_groups(connection, stored, flushed.removed)
        return len(flushed.messages)

    def _forget_deleted(self, groups: IncidentGroups) -> set[str]:
        if self._clock.monotonic_s() < self._deleted_s:
            return set()
        self._deleted_s = self._clock.monotonic_s() + DELETED_POLL_S
        with read(self._engine) as connection:
            members = groups.members()
            still_open = set(connection.scalars(select(Incident.id).where(Incident.state != "resolved")))
            ended = members - still_open
            kept = set(connection.scalars(select(Incident.id).where(Incident.id.in_(ended)))) if ended else set()
        return groups.forget(ended - kept)

    def _subscribed(self, entries: Sequence[RowMapping]) -> int:
        """Make messages to the receivers that subscribe, as stream does where no routes are configured."""
        if not entries:
            return 0
        silenced = _SilencesInForce(self._engine, self._clock.unix_ns())
        with write(self._engine) as connection:
            self._lease.confirm(connection)
            _settle(connection, entries)
            rows = []
            for entry in entries:
                message = json.loads(entry["body"])
                if message["type"] not in MESSAGE_TYPES.values():
                    continue
                state = "silenced" if silenced(incident_labels(message["data"])) else "waiting"
                for receiver in receiver_routes(connection):
                    if is_subscribed(receiver, message["data"]):
                        row_id = message_id(entry["incident_id"], entry["transition"], receiver.name)
                        rows.append({**entry, "id": row_id, "receiver": receiver.name, "state": state})
            if rows:
                connection.execute(upsert(connection, Outbox), rows)
        return len(rows)


class _SilencesInForce:
    """Tells which incidents people have silenced. Silences are read when the first incident is asked for."""

    def __init__(self, engine: Engine, now_unix_ns: int) -> None:
        self._engine = engine
        self._now_unix_ns = now_unix_ns
        self._silences: list[SilenceSet] | None = None

    def __call__(self, labels: Labels) -> bool:
        if self._silences is None:
            with read(self._engine) as connection:
                active = select(Silence.__table__).where(Silence.ends_unix_ns > self._now_unix_ns)
                rows = connection.execute(active).mappings().all()
            self._silences = [msgspec.convert(dict(row), SilenceSet) for row in rows]
        return any(mutes(silence, labels, self._now_unix_ns) for silence in self._silences)


def _settle(connection: Connection, entries: Iterable[RowMapping]) -> None:
    """Mark transitions as taken."""
    ids = [entry["id"] for entry in entries]
    if ids:
        connection.execute(update(Outbox).where(Outbox.id.in_(ids)).values(state="grouped"))


def _write_groups(connection: Connection, groups: Iterable[Group], removed: Collection[str]) -> None:
    rows = [{"key": group.key, "state": msgspec.to_builtins(group)} for group in groups]
    if rows:
        connection.execute(upsert(connection, IncidentGroup, ("state",)), rows)
    if removed:
        connection.execute(delete(IncidentGroup).where(IncidentGroup.key.in_(removed)))


def _message_row(message: GroupMessage) -> dict[str, Any]:
    first = (*message.open, *message.resolved)[0]
    return {
        "id": message.id,
        "receiver": message.receiver,
        "incident_id": first.incident_id if group_job(message) else "",
        "transition": message.flush,
        "group_key": message.group_key,
        "body": group_body(message),
        "state": "waiting",
        "next_try_unix_ns": message.at_unix_ns,
        "created_unix_ns": message.at_unix_ns,
        "delivered_unix_ns": None,
    }
