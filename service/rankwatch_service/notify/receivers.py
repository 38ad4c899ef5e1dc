"""Receivers of notifications: publishes them to the stream, and adds the incidents topic as one."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, Engine, insert, select

from rankwatch_service.clock import Clock
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.notify.signature import new_secret
from rankwatch_service.policy.control_records import ReceiverRoute, ReceiversSet, encode_control
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Receiver

TOPIC_URL: Final = "kafka:"
"""URL of the receiver that is the incidents topic, whatever the topic's name."""
TOPIC_RECEIVER: Final = "incidents-topic"


def publish_receivers(connection: Connection, controls: ControlLog) -> None:
    """Append all receivers to the control log, for the stream, in the write transaction that changed them."""
    rows = connection.execute(select(Receiver.__table__).order_by(Receiver.name)).mappings()
    routes = tuple(
        ReceiverRoute(row["name"], tuple(row["kinds"]), tuple(row["severities"]), tuple(row["jobs"]), row["enabled"])
        for row in rows
    )
    controls.append_in(connection, [Entry(ALL_JOBS, encode_control(ReceiversSet(routes)))])


def add_topic_receiver(engine: Engine, controls: ControlLog, clock: Clock) -> None:
    """Add the incidents topic as a receiver, unless there is one of its name; users can disable it.

    Raises:
        StoreBusyError: the database is busy; try again.
    """
    topic = {"name": TOPIC_RECEIVER, "url": TOPIC_URL, "kinds": [], "severities": [], "jobs": []}
    with write(engine) as connection:
        if connection.scalar(select(Receiver.name).where(Receiver.name == TOPIC_RECEIVER)) is not None:
            return
        now = clock.unix_ns()
        # The topic needs no signature, but users may later set the URL of a webhook.
        row = topic | {"secret": new_secret(), "enabled": True, "disabled_reason": "", "created_unix_ns": now}
        connection.execute(insert(Receiver).values(**row))
        publish_receivers(connection, controls)
        audit_trail.append(connection, now, "api", "receiver.add", TOPIC_RECEIVER, "ok", fields={"host": TOPIC_URL})
