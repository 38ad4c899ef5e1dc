"""Receivers of notifications, and silences.

A receiver's URL and signing secret are encrypted with the secret key of the service: the path of most chat webhooks is
a secret too.
"""

from __future__ import annotations

from sqlalchemy import Connection, delete, select

from rankwatch_service.access.secret_key import CHECK
from rankwatch_service.notify.pipeline import ReceiverRoute, Silence
from rankwatch_service.store.models import Agent, IdempotentReply, Receiver, Setting
from rankwatch_service.store.models import Silence as SilenceRow


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
