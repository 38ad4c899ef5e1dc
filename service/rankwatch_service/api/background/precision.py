"""Tells stream the precision of each kind of incident, on which the policy's `precision_min` depends.

It changes with feedback, and because incidents leave the window or are deleted. Stream knows it by control records
alone, so a replay decides by the same figures.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, Engine, select

from rankwatch_service.clock import Clock
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.control_records import PrecisionSet, encode_control
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.feedback_counts import precision_by_kind
from rankwatch_service.store.models import Setting
from rankwatch_service.store.upsert import upsert

SETTING: Final = "precision"
"""Holds what stream was told last."""


def tell_precision(connection: Connection, controls: ControlLog, now_unix_ns: int) -> None:
    """Tell stream, in a `write`, unless it knows the precision as it is."""
    counted = _counted(connection, now_unix_ns)
    if counted == _told(connection):
        return
    row = {"name": SETTING, "value": counted, "updated_unix_ns": now_unix_ns}
    connection.execute(upsert(connection, Setting, row), row)
    record = PrecisionSet({kind: (useful, noise) for kind, (useful, noise) in counted.items()})
    controls.append_in(connection, [Entry(ALL_JOBS, encode_control(record))])


def tell_changed_precision(engine: Engine, controls: ControlLog, clock: Clock) -> None:
    """Tell stream if the precision has changed without new feedback."""
    now = clock.unix_ns()
    with read(engine) as connection:
        if _counted(connection, now) == _told(connection):
            return
    with write(engine) as connection:
        tell_precision(connection, controls, now)


def _counted(connection: Connection, now_unix_ns: int) -> dict[str, list[int]]:
    found = precision_by_kind(connection, now_unix_ns)
    return {kind: [of_kind.useful, of_kind.noise] for kind, of_kind in found.items() if of_kind.judged}


def _told(connection: Connection) -> dict[str, list[int]]:
    return connection.scalar(select(Setting.value).where(Setting.name == SETTING)) or {}
