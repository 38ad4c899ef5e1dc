"""Receivers of notifications, and silences: reads them, adds the incidents topic as a receiver, encrypts secrets.

A receiver's URL and signing secret are encrypted with the secret key of the service: the path of most chat webhooks is
a secret too.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, Engine, delete, insert, select

from rankwatch_service.access.secret_key import CHECK, SecretKey
from rankwatch_service.clock import Clock
from rankwatch_service.notify.pipeline import ReceiverRoute, Silence
from rankwatch_service.notify.receiver_types.base import new_secret
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Agent, IdempotentReply, Receiver, Setting
from rankwatch_service.store.models import Silence as SilenceRow

TOPIC_URL: Final = "kafka:"
"""URL of the receiver that is the incidents topic, whatever the topic's name."""
TOPIC_RECEIVER: Final = "incidents-topic"


def receiver_routes(connection: Connection) -> tuple[ReceiverRoute, ...]:
    """What each receiver subscribes to, in order of their names."""
    rows = connection.execute(select(Receiver.__table__).order_by(Receiver.name)).mappings()
    return tuple(
        ReceiverRoute(
            row["name"],
            tuple(row["kinds"]),
            tuple(row["severities"]),
            tuple(row["jobs"]),
            row["enabled"],
            tuple(row["projects"]),
            tuple(row["matchers"]),
            row["after_s"],
        )
        for row in rows
    )


def silences_at(connection: Connection, unix_ns: int) -> tuple[Silence, ...]:
    """The silences in force at a time, which may be past: a change may be decided on late."""
    in_force = (SilenceRow.starts_unix_ns <= unix_ns, SilenceRow.ends_unix_ns > unix_ns)
    rows = connection.execute(select(SilenceRow.__table__).where(*in_force)).mappings()
    names = ("job", "kind", "scope", "starts_unix_ns", "ends_unix_ns")
    return tuple(Silence(**{name: row[name] for name in names}, matchers=tuple(row["matchers"])) for row in rows)


def forget_secret_key(connection: Connection) -> list[str]:
    """Make the next start create a new key, in a write transaction; what the old one encrypted is removed.

    Agents, whose secrets are derived from the key, enrol again.

    Returns:
        Names of the receivers that were removed.
    """
    names = list(connection.scalars(select(Receiver.name).order_by(Receiver.name)))
    for table in (Receiver, IdempotentReply, Agent):
        connection.execute(delete(table))
    connection.execute(delete(Setting).where(Setting.name == CHECK))
    return names


def add_topic_receiver(engine: Engine, clock: Clock, secret_key: SecretKey) -> None:
    """Add the incidents topic as a receiver, unless there is one of its name; users can disable it.

    Raises:
        StoreBusyError: the database is busy; try again.
    """
    topic = {
        "name": TOPIC_RECEIVER,
        "url": secret_key.encrypt(TOPIC_URL),
        "kinds": [],
        "severities": [],
        "jobs": [],
        "projects": [],
        "matchers": [],
        "after_s": 0,
    }
    with write(engine) as connection:
        if connection.scalar(select(Receiver.name).where(Receiver.name == TOPIC_RECEIVER)) is not None:
            return
        now = clock.unix_ns()
        # The topic needs no signature, but users may later set the URL of a webhook.
        secret = secret_key.encrypt(new_secret())
        row = topic | {"secret": secret, "enabled": True, "disabled_reason": "", "created_unix_ns": now}
        connection.execute(insert(Receiver).values(**row))
        audit_trail.append(connection, now, "api", "receiver.add", TOPIC_RECEIVER, "ok", fields={"host": TOPIC_URL})
