"""Who is told about incidents: what stream hears of it, and the receiver that comes with Kafka."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, Engine, insert, select

from rankwatch_service.clock import Clock
from rankwatch_service.log.base import ALL_JOBS, Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.notify.sign import new_secret
from rankwatch_service.policy.control_records import ReceiverRoute, ReceiversSet, encode_control
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Receiver

TOPIC_URL: Final = "kafka:"
"""Of a receiver: our incidents topic, whatever its name."""
TOPIC_RECEIVER: Final = "incidents-topic"


def tell_stream(connection: Connection, controls: ControlLog) -> None:
    """Append the receivers as they are now to the control log, in the transaction that changed them."""
    rows = connection.execute(select(Receiver.__table__).order_by(Receiver.name)).mappings()
    routes = tuple(
        ReceiverRoute(row["name"], tuple(row["kinds"]), tuple(row["severities"]), tuple(row["jobs"]), row["enabled"])
        for row in rows
    )
    controls.append_in(connection, [Entry(ALL_JOBS, encode_control(ReceiversSet(routes)))])


def add_topic_receiver(engine: Engine, controls: ControlLog, clock: Clock) -> None:
    """Make the incidents topic a receiver unless it is one; who does not want it switches it off.

    Raises:
        StoreBusyError: not now.
    """
    topic = {"name": TOPIC_RECEIVER, "url": TOPIC_URL, "kinds": [], "severities": [], "jobs": []}
    with write(engine) as connection:
        if connection.scalar(select(Receiver.name).where(Receiver.name == TOPIC_RECEIVER)) is not None:
            return
        now = clock.unix_ns()
        # Signs nothing there, but the receiver may be turned into a webhook.
        row = topic | {"secret": new_secret(), "enabled": True, "disabled_reason": "", "created_unix_ns": now}
        connection.execute(insert(Receiver).values(**row))
        tell_stream(connection, controls)
        audit_trail.append(connection, now, "api", "receiver.add", TOPIC_RECEIVER, "ok", fields={"host": TOPIC_URL})
