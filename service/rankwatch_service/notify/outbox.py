"""The outbox table: which messages are due, and the outcome of each try."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from sqlalchemy import Connection, Engine, RowMapping, and_, func, insert, select, update
from sqlalchemy.orm import aliased

from rankwatch_service.access.job_filter import project_of
from rankwatch_service.labels import incident_labels
from rankwatch_service.notify.lease import Lease
from rankwatch_service.notify.pipeline import still_needed
from rankwatch_service.notify.receivers import silences_at
from rankwatch_service.notify.sender import GIVE_UP_AFTER_S, RetryDecision, TryOutcome
from rankwatch_service.store.engine import read, upsert, write
from rankwatch_service.store.models import Announcement, Delivery, Incident, Outbox, Receiver, Setting

SETTING: Final = "notification_counts"
"""Setting with {receiver: fields of `ReceiverCounts`}."""

LATENCIES_S: Final = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1_800.0, 7_200.0)
"""Bounds of the buckets of latencies: a first try takes up to 15 s, the next ones follow within minutes and hours."""


class ReceiverCounts(msgspec.Struct):
    """What became of the notifications to one receiver since it was added."""

    delivered: int = 0
    refused: int = 0
    """Tries that the receiver answered with an error."""
    unanswered: int = 0
    """Tries that it did not answer."""
    failed: int = 0
    """Notifications given up."""
    latency_s: float = 0.0
    """From the commit to the delivery, summed over all deliveries."""
    latencies: list[int] = msgspec.field(default_factory=lambda: [0] * (len(LATENCIES_S) + 1))
    """Deliveries by latency, not cumulated; the last number is of those beyond `LATENCIES_S`."""

    def add_delivery(self, latency_s: float) -> None:
        """Count a delivery.

        Args:
            latency_s: from the commit of the notification to its delivery.
        """
        self.delivered += 1
        self.latency_s += latency_s
        self.latencies[bisect_left(LATENCIES_S, latency_s)] += 1

    def buckets(self) -> Iterator[tuple[str, int]]:
        """Deliveries up to each bound, as a histogram has them."""
        total = 0
        for bound, count in zip((*map(str, LATENCIES_S), "+Inf"), self.latencies, strict=True):
            total += count
            yield bound, total


class NotificationCounts:
    """The counts of all receivers within one transaction."""

    def __init__(self, connection: Connection) -> None:
        """Read them. Those of receivers that were removed are left out."""
        stored = connection.scalar(select(Setting.value).where(Setting.name == SETTING)) or {}
        names = connection.scalars(select(Receiver.name).order_by(Receiver.name)).all()
        self._connection = connection
        self.by_receiver = {name: msgspec.convert(stored.get(name, {}), ReceiverCounts) for name in names}

    def of(self, receiver: str) -> ReceiverCounts:
        """The counts of a receiver; of one that was removed they are not stored."""
        return self.by_receiver.get(receiver) or ReceiverCounts()

    def store(self, now_unix_ns: int) -> None:
        """Write them in this transaction."""
        row = {"name": SETTING, "value": msgspec.to_builtins(self.by_receiver), "updated_unix_ns": now_unix_ns}
        self._connection.execute(upsert(self._connection, Setting, row), row)


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

        Only the oldest undelivered message of an incident to a receiver is due, so `opened` arrives before `resolved`.
        Messages about commands wait for none. Messages to disabled receivers wait. What a receiver with `after_s` was
        to be notified is checked once more (`pipeline.still_needed`), unless it was notified of the incident before.

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
            states = [_state(connection, row, now_unix_ns) for row in found]
        if set(states) - {"waiting"}:
            with write(self._engine) as connection:
                self._lease.confirm(connection)
                for row, state in zip(found, states, strict=True):
                    if state != "waiting":
                        _keep_back(connection, row, state, now_unix_ns)
        return [
            DueMessage(**{name: row[name] for name in DueMessage.__slots__})
            for row, state in zip(found, states, strict=True)
            if state == "waiting"
        ]

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


def undelivered(connection: Connection) -> tuple[int, int | None]:
    """How many messages wait, and since when the oldest is due; announcements that nobody has decided on count too."""
    waiting = select(func.count(), func.min(Outbox.created_unix_ns)).where(Outbox.state == "waiting")
    new = select(func.count(), func.min(Announcement.at_unix_ns)).where(~Announcement.held)
    found = [tuple(connection.execute(query).one()) for query in (waiting, new)]
    return sum(count for count, _ in found), min((oldest for _, oldest in found if oldest is not None), default=None)


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
    is_told = (
        select(Delivery.id)
        .join(tried, tried.id == Delivery.outbox_id)
        .where(tried.incident_id == Outbox.incident_id, tried.receiver == Outbox.receiver, tried.command_id == "")
        .exists()
    )
    is_delayed = and_(Receiver.after_s > 0, Outbox.command_id == "", ~is_told)
    columns = (Outbox.id, Outbox.receiver, Outbox.incident_id, Outbox.body, Outbox.tries, Outbox.created_unix_ns)
    rows = connection.execute(
        select(*columns, Receiver.url, Receiver.secret, is_delayed.label("is_delayed"))
        .join(Receiver, Receiver.name == Outbox.receiver)
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


def _state(connection: Connection, row: RowMapping, now_unix_ns: int) -> str:
    """What becomes of a message that is due: waiting, so it is sent, unneeded or silenced."""
    if not row["is_delayed"]:
        return "waiting"
    query = select(Incident.__table__).where(Incident.id == row["incident_id"])
    incident = connection.execute(query).mappings().one_or_none()
    if incident is None:
        return "waiting"
    ownership = project_of(connection, incident["job"])
    labels = incident_labels({**incident, "project": ownership.project, "owner": ownership.owner})
    return still_needed(incident["state"], labels, silences_at(connection, now_unix_ns), now_unix_ns)


def _keep_back(connection: Connection, row: RowMapping, state: str, now_unix_ns: int) -> None:
    """Hold back all waiting notifications of the incident to this receiver."""
    same = (Outbox.receiver == row["receiver"], Outbox.incident_id == row["incident_id"], Outbox.command_id == "")
    due = (Outbox.state == "waiting", Outbox.created_unix_ns <= now_unix_ns)
    connection.execute(update(Outbox).where(*same, *due).values(state=state))
