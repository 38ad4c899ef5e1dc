"""Decides once who is notified of each announcement, by the stages of `pipeline`, and writes it to the outbox.

An announcement is removed in the transaction that writes its notifications, so a notifier that is killed neither loses
nor repeats a decision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import structlog
from sqlalchemy import ColumnElement, Connection, Engine, delete, exists, select, update
from sqlalchemy.orm import aliased

from rankwatch_service.incidents.kinds import ENDED_BY_ITSELF
from rankwatch_service.notify.lease import Lease
from rankwatch_service.notify.message_limit import MessageLimit
from rankwatch_service.notify.pipeline import Notification, ReceiverRoute, Situation, notifications
from rankwatch_service.notify.receivers import receiver_routes, silences_at
from rankwatch_service.policy.announcement import Announcement
from rankwatch_service.policy.notification import message_body, message_id
from rankwatch_service.store import models
from rankwatch_service.store.engine import read, upsert, write
from rankwatch_service.store.rows import announcement_of

ROUTED_MAX: Final = 20
"""Announcements decided on in one transaction: about 1 ms each, and other writers wait."""

_log = structlog.get_logger(__name__)

UNTOLD: Final = ("silenced", "held", "unneeded")
"""States of notifications that did not notify their receiver of the incident."""


class Router:
    """Routes announcements while this process holds the lease. Blocking; for one thread at a time."""

    def __init__(self, engine: Engine, lease: Lease) -> None:
        self._engine = engine
        self._lease = lease

    def route(self) -> bool:
        """Decide who is notified of new announcements, in their order.

        Returns:
            Whether there may be more: at most `ROUTED_MAX` are decided on.

        Raises:
            LeaseLostError: another notifier holds the lease; nothing was decided.
        """
        with read(self._engine) as connection:
            if (
                connection.execute(select(models.Announcement.id).where(~models.Announcement.held).limit(1)).first()
                is None
            ):
                return False
        with write(self._engine) as connection:
            self._lease.confirm(connection)
            routing = _Routing(connection)
            new = routing.new()
            for id_, announcement in new:
                routing.decide(id_, announcement)
            routing.store()
        return len(new) == ROUTED_MAX

    def release(self, now_unix_ns: int) -> None:
        """Notify of what was held back and there is room for, if it still matters; forget what does not.

        Raises:
            LeaseLostError: another notifier holds the lease; nothing was decided.
        """
        with read(self._engine) as connection:
            if next(_Routing(connection).ripe(now_unix_ns), None) is None:
                return
        with write(self._engine) as connection:
            self._lease.confirm(connection)
            routing = _Routing(connection)
            for id_, announcement, is_needed in routing.ripe(now_unix_ns):
                if is_needed:
                    routing.release(id_, announcement, now_unix_ns)
                else:
                    routing.drop(id_, announcement)
            routing.store()


class _Routing:
    """The decisions of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._limits: dict[str, MessageLimit] = {}

    def new(self) -> list[tuple[int, Announcement]]:
        """The first announcements that are not decided on, with the ids of their rows."""
        row = models.Announcement
        query = select(row.__table__).where(~row.held).order_by(row.id).limit(ROUTED_MAX)
        return [(found["id"], announcement_of(found)) for found in self._connection.execute(query).mappings()]

    def ripe(self, now_unix_ns: int) -> Iterator[tuple[int, Announcement, bool]]:
        """What was held back and is to be decided now: id of the row, announcement, and whether it is still needed.

        A notification is needed if it reports an open incident of which nobody was notified, or the end of one of which
        somebody was. What has ended by itself and may come back waits. The announcements come without their data.
        """
        row, newer, incident, limit = (
            models.Announcement,
            aliased(models.Announcement),
            models.Incident,
            models.MessageLimitRow,
        )
        is_newest = ~exists().where(newer.incident_id == row.incident_id, newer.command_id == "", newer.id > row.id)
        is_told = exists().where(*_reported(row.incident_id)).label("is_told")
        columns = [column for column in row.__table__.columns if column.name != "data"]
        query = (
            select(*columns, incident.state, incident.evidence, limit.state.label("limit"), is_told)
            .outerjoin(incident, incident.id == row.incident_id)
            .join(limit, limit.job == row.job)
            .where(row.held, is_newest)
            .order_by(row.id)
        )
        for found in self._connection.execute(query).mappings().all():
            announcement, is_over = announcement_of({**found, "data": {}}), found["state"] == "resolved"
            if found["state"] in (None, "acknowledged") or is_over is not found["is_told"]:
                yield found["id"], announcement, False
                continue
            may_come_back = not is_over and found["evidence"].get(ENDED_BY_ITSELF)
            if announcement.job not in self._limits:
                self._limits[announcement.job] = MessageLimit.restored(found["limit"])
            if not may_come_back and self._limits[announcement.job].allows(announcement, now_unix_ns):
                yield found["id"], announcement, True

    def decide(self, id_: int, announcement: Announcement) -> None:
        """Write who is notified, and remove the announcement unless its incident waits for room."""
        now_unix_ns = announcement.at_unix_ns
        if announcement.command_id:
            self._write(announcement, now_unix_ns)
            self._remove(id_)
            return
        limit, incident_id = self._limit(announcement.job), announcement.incident_id
        waited = incident_id in limit.waiting
        states = self._write(announcement, now_unix_ns)
        if "waiting" in states:
            limit.record_sent(announcement, now_unix_ns)
        elif "held" in states:
            limit.hold(announcement)
        row = models.Announcement
        if waited:
            self._connection.execute(delete(row).where(row.incident_id == incident_id, row.held, row.id != id_))
        if incident_id in limit.waiting:
            self._connection.execute(update(row).where(row.id == id_).values(held=True))
        else:
            self._remove(id_)

    def release(self, id_: int, announcement: Announcement, now_unix_ns: int) -> None:
        """Notify of what was held back, once: also where a silence mutes it now, or nobody gets it any more."""
        row = models.Announcement
        data = self._connection.execute(select(row.data).where(row.id == id_)).scalar_one()
        announcement = replace(announcement, data=data)
        self.drop(id_, announcement)
        if "waiting" in self._write(announcement, now_unix_ns, changed=_SENT):
            self._limit(announcement.job).record_sent(announcement, now_unix_ns)

    def drop(self, id_: int, announcement: Announcement) -> None:
        """Forget an announcement that was held back."""
        self._limit(announcement.job).drop(announcement.incident_id)
        self._remove(id_)

    def store(self) -> None:
        """Write the limits."""
        for job, limit in self._limits.items():
            row = {"job": job, "state": limit.state()}
            self._connection.execute(upsert(self._connection, models.MessageLimitRow, row), row)

    def _write(self, announcement: Announcement, now_unix_ns: int, changed: tuple[str, ...] = ()) -> set[str]:
        """Write the notifications to the outbox; returns their states."""
        is_command = bool(announcement.command_id)
        limit = MessageLimit() if is_command else self._limit(announcement.job)
        notified = set(
            self._connection.scalars(select(models.Outbox.receiver).where(*_reported(announcement.incident_id)))
        )
        silences = silences_at(self._connection, now_unix_ns)
        situation = Situation(announcement, silences, notified, limit, now_unix_ns)
        held_before = 0 if is_command else limit.held(announcement)
        rows = [row for receiver in self._receivers for row in _rows_for(receiver, situation, held_before)]
        if rows:
            self._connection.execute(upsert(self._connection, models.Outbox, changed), rows)
        return {row["state"] for row in rows}

    def _remove(self, id_: int) -> None:
        self._connection.execute(delete(models.Announcement).where(models.Announcement.id == id_))

    @cached_property
    def _receivers(self) -> tuple[ReceiverRoute, ...]:
        return receiver_routes(self._connection)

    def _limit(self, job: str) -> MessageLimit:
        if job not in self._limits:
            row = models.MessageLimitRow
            state = self._connection.scalar(select(row.state).where(row.job == job))
            self._limits[job] = MessageLimit() if state is None else MessageLimit.restored(state)
        return self._limits[job]


def _rows_for(receiver: ReceiverRoute, situation: Situation, held_before: int) -> list[dict[str, Any]]:
    """The notification of one receiver, if it is notified: one that fails keeps nothing back from the others."""
    announcement = situation.announcement
    try:
        return [outbox_row(announcement, one, held_before) for one in notifications(situation, [receiver])]
    except Exception:  # noqa: BLE001 - logged
        _log.exception("receiver_not_routed", receiver=receiver.name, incident=announcement.incident_id)
        return []


_SENT: Final = ("body", "state", "next_try_unix_ns", "created_unix_ns")
"""Columns of a notification that was held back which change when it is released."""


def _reported(incident_id: Any) -> tuple[ColumnElement[bool], ...]:
    """Of the outbox: the notifications that have notified their receivers of an incident, or will."""
    row = models.Outbox
    return row.incident_id == incident_id, row.command_id == "", row.state.not_in(UNTOLD)


def outbox_row(announcement: Announcement, notification: Notification, held_before: int = 0) -> dict[str, Any]:
    """Columns of `outbox`."""
    receiver = notification.receiver.name
    subject = announcement.command_id or announcement.incident_id
    return {
        # Derived, so that the same notification is stored once, however often it is decided on.
        "id": message_id(subject, announcement.transition, receiver),
        "receiver": receiver,
        "incident_id": announcement.incident_id,
        "transition": announcement.transition,
        "command_id": announcement.command_id,
        "body": message_body(notification.type, announcement.at_unix_ns, announcement.data, held_before),
        "state": notification.state,
        "tries": 0,
        "next_try_unix_ns": notification.due_unix_ns,
        "created_unix_ns": notification.due_unix_ns,
        "delivered_unix_ns": None,
    }
