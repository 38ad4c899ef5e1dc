"""The outbox table: which messages are due, and the outcome of each try."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from sqlalchemy import Connection, Engine, RowMapping, and_, func, insert, select, update
from sqlalchemy.orm import aliased

from rankwatch_service.labels import incident_labels
from rankwatch_service.notify.counts import NotificationCounts, ReceiverCounts
from rankwatch_service.notify.lease import Lease
from rankwatch_service.notify.retry import GIVE_UP_AFTER_S, RetryDecision
from rankwatch_service.notify.sender import TryOutcome
from rankwatch_service.policy.control_records import SilenceSet
from rankwatch_service.policy.notification import MESSAGE_TYPES, encoded
from rankwatch_service.policy.routing import mutes
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Delivery, Incident, Outbox, Receiver, Silence

RECEIVER_IN_FLIGHT_MAX: Final = 8
"""Messages in flight to one receiver. There is no limit over all receivers, so a slow one cannot delay another."""


@dataclass(frozen=True, slots=True)
class DueMessage:
    """One message to send now."""

    id: str
    receiver: str
    url: str
    secret: str
    body: bytes
    tries: int
    created_unix_ns: int
    """When it became due."""


@dataclass(frozen=True, slots=True)
class EndedTry:
    """One try that has ended, and what to do next."""

    message: DueMessage
    outcome: TryOutcome
    decision: RetryDecision
    at_unix_ns: int


class OutboxTable:
    """Reads due messages; records tries while this process holds the lease. Blocking; for one thread at a time."""

    def __init__(self, engine: Engine, lease: Lease) -> None:
        self._engine = engine
        self._lease = lease

    def due(self, now_unix_ns: int, in_flight: Mapping[str, Collection[str]]) -> list[DueMessage]:
        """Messages to send now, oldest first for each receiver.

        Only the oldest undelivered message of an incident to a receiver is due, so `opened` arrives before
        `resolved`. Messages about commands wait for none. Messages to disabled receivers wait. A message to a receiver
        with `after_s` that was not notified of the incident before is due only while nobody has acknowledged it; else
        it is marked as unneeded, or silenced.

        Args:
            now_unix_ns: the time.
            in_flight: ids of the messages being sent, by receiver; they are left out and count towards the limit.

        Raises:
            LeaseLostError: another notifier holds the lease; nothing was marked.
        """
        with read(self._engine) as connection:
            names = connection.scalars(
                select(Outbox.receiver)
                .where(Outbox.state == "waiting", Outbox.next_try_unix_ns <= now_unix_ns)
                .distinct()
                .order_by(Outbox.receiver)
            ).all()
            # One query for each receiver, so that a backlog of one takes no place of the others.
            found: list[RowMapping] = []
            for name in names:
                busy = in_flight.get(name, ())
                if len(busy) < RECEIVER_IN_FLIGHT_MAX:
                    found += _heads(connection, name, now_unix_ns, busy)
        heads, unneeded = _held(self._engine, found, now_unix_ns)
        if unneeded:
            with write(self._engine) as connection:
                self._lease.confirm(connection)
                for message_id, state in unneeded.items():
                    connection.execute(update(Outbox).where(Outbox.id == message_id).values(state=state))
        return heads

    def record(self, ended: Sequence[EndedTry]) -> None:
        """Commit the outcomes of tries in one transaction: deliveries, states of messages, and states of receivers.

        Raises:
            LeaseLostError: another notifier holds the lease; nothing was recorded.
        """
        with write(self._engine) as connection:
            self._lease.confirm(connection)
            counts = NotificationCounts(connection)
            for one in ended:
                _record(connection, one)
                _count(counts.of(one.message.receiver), one)
            counts.store(max(one.at_unix_ns for one in ended))

    def give_up(self, now_unix_ns: int, in_flight: Collection[str]) -> int:
        """Mark waiting messages that are older than `GIVE_UP_AFTER_S`, or whose receiver was removed, as failed.

        Args:
            now_unix_ns: the time.
            in_flight: ids of the messages being sent; they are left out until their tries are recorded.

        Returns:
            How many were marked.

        Raises:
            LeaseLostError: another notifier holds the lease; nothing was marked.
        """
        oldest_unix_ns = now_unix_ns - GIVE_UP_AFTER_S * 1_000_000_000
        given_up = (
            Outbox.state == "waiting",
            (Outbox.created_unix_ns < oldest_unix_ns) | Outbox.receiver.not_in(select(Receiver.name)),
            Outbox.id.not_in(list(in_flight)),
        )
        with write(self._engine) as connection:
            self._lease.confirm(connection)
            by_receiver = select(Outbox.receiver, func.count()).where(*given_up).group_by(Outbox.receiver)
            found = connection.execute(by_receiver).all()
            if not found:
                return 0
            connection.execute(update(Outbox).where(*given_up).values(state="failed"))
            counts = NotificationCounts(connection)
            for receiver, count in found:
                counts.of(receiver).failed += count
            counts.store(now_unix_ns)
        return sum(count for _, count in found)


def _count(counts: ReceiverCounts, one: EndedTry) -> None:
    if one.outcome.delivered:
        counts.add_delivery(max(one.at_unix_ns - one.message.created_unix_ns, 0) / 1e9)
    elif one.outcome.status is None:
        counts.unanswered += 1
    else:
        counts.refused += 1
    counts.failed += one.decision.state == "failed"


def _record(connection: Connection, one: EndedTry) -> None:
    message, outcome, decision, now_unix_ns = one.message, one.outcome, one.decision, one.at_unix_ns
    connection.execute(
        insert(Delivery).values(
            outbox_id=message.id,
            at_unix_ns=now_unix_ns,
            status=outcome.status,
            error=outcome.error,
            seconds=outcome.seconds,
        )
    )
    connection.execute(
        update(Outbox)
        .where(Outbox.id == message.id)
        .values(
            state=decision.state,
            tries=message.tries + 1,
            next_try_unix_ns=decision.next_try_unix_ns,
            delivered_unix_ns=now_unix_ns if outcome.delivered else None,
        )
    )
    if decision.receiver_gone:
        connection.execute(
            update(Receiver)
            .where(Receiver.name == message.receiver)
            .values(enabled=False, disabled_reason="the receiver answered 410: it is gone")
        )
    if outcome.retry_after_s is not None and not outcome.delivered:
        # Retry-After applies to the receiver, so its other messages wait as well.
        until_unix_ns = now_unix_ns + int(outcome.retry_after_s * 1e9)
        connection.execute(
            update(Outbox)
            .where(
                Outbox.receiver == message.receiver, Outbox.state == "waiting", Outbox.next_try_unix_ns < until_unix_ns
            )
            .values(next_try_unix_ns=until_unix_ns)
        )


def _heads(connection: Connection, receiver: str, now_unix_ns: int, busy: Collection[str]) -> Sequence[RowMapping]:
    """The due messages of a receiver that no earlier message of their incident precedes, oldest first."""
    earlier = aliased(Outbox)
    is_behind = (
        select(earlier.id)
        .where(
            earlier.incident_id == Outbox.incident_id,
            earlier.command_id == Outbox.command_id,
            earlier.receiver == Outbox.receiver,
            earlier.state == "waiting",
            earlier.transition < Outbox.transition,
        )
        .exists()
    )
    tried = aliased(Outbox)
    other_tried = (
        select(Delivery.id)
        .join(tried, tried.id == Delivery.outbox_id)
        .where(
            tried.incident_id == Outbox.incident_id,
            tried.receiver == Outbox.receiver,
            tried.command_id == "",
            tried.id != Outbox.id,
        )
        .exists()
    )
    is_held = and_(Receiver.after_s > 0, Outbox.command_id == "", ~other_tried)
    was_tried = select(Delivery.id).where(Delivery.outbox_id == Outbox.id).exists()
    columns = (Outbox.id, Outbox.receiver, Outbox.body, Outbox.tries, Outbox.created_unix_ns)
    held = (is_held.label("is_held"), was_tried.label("was_tried"), Incident.state.label("incident_state"))
    rows = connection.execute(
        select(*columns, Receiver.url, Receiver.secret, *held)
        .join(Receiver, Receiver.name == Outbox.receiver)
        .outerjoin(Incident, Incident.id == Outbox.incident_id)
        .where(
            Outbox.receiver == receiver,
            Receiver.enabled,
            Outbox.state == "waiting",
            Outbox.next_try_unix_ns <= now_unix_ns,
            Outbox.id.not_in(list(busy)),
            ~is_behind,
        )
        .order_by(Outbox.created_unix_ns, Outbox.id)
        .limit(RECEIVER_IN_FLIGHT_MAX - len(busy))
    )
    return rows.mappings().all()


def _held(engine: Engine, rows: Sequence[RowMapping], now_unix_ns: int) -> tuple[list[DueMessage], dict[str, str]]:
    """The messages to send, and the states of those that nobody needs any more, by id."""
    messages: list[DueMessage] = []
    unneeded: dict[str, str] = {}
    silences = _silences(engine, now_unix_ns) if any(row["is_held"] for row in rows) else []
    for row in rows:
        body = row["body"]
        if row["is_held"]:
            content = json.loads(body)
            labels = incident_labels(content["data"])
            if not row["was_tried"] and row["incident_state"] in ("acknowledged", "resolved"):
                unneeded[row["id"]] = "unneeded"
                continue
            if not row["was_tried"] and any(mutes(silence, labels, now_unix_ns) for silence in silences):
                unneeded[row["id"]] = "silenced"
                continue
            # The first message of an incident to a receiver says that it opened.
            body = encoded(content | {"type": MESSAGE_TYPES["opened"]})
        message = {name: row[name] for name in ("id", "receiver", "url", "secret", "tries", "created_unix_ns")}
        messages.append(DueMessage(**message, body=body))
    return messages, unneeded


def _silences(engine: Engine, now_unix_ns: int) -> list[SilenceSet]:
    with read(engine) as connection:
        active = select(Silence.__table__).where(Silence.ends_unix_ns > now_unix_ns)
        return [msgspec.convert(dict(row), SilenceSet) for row in connection.execute(active).mappings()]
