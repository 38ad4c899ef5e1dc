"""Ends alerts that are not repeated."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Engine, exists, select

from rankwatch_service.alerts.alert import LASTS_S
from rankwatch_service.alerts.rows import AlertRows
from rankwatch_service.clock import Clock
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import AlertRow

GRACE_S: Final = float(LASTS_S)
"""Nothing expires in this time after an api process has begun: while none ran, no repeat could arrive."""


class AlertExpiry:
    """Ends alerts whose `endsAt` has passed. Several api processes may do so beside each other."""

    def __init__(self, engine: Engine, controls: ControlLog, clock: Clock) -> None:
        self._engine = engine
        self._controls = controls
        self._clock = clock
        self._since_s = clock.monotonic_s()

    def run(self) -> int:
        """End what is due; returns how many alerts that were."""
        now = self._clock.unix_ns()
        if self._clock.monotonic_s() - self._since_s < GRACE_S:
            return 0
        with read(self._engine) as connection:
            if not connection.scalar(select(exists().where(AlertRow.ends_unix_ns <= now))):
                return 0
        with write(self._engine) as connection:
            return AlertRows(connection, self._controls, now).expire()
