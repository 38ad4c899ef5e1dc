"""Tells stream of the messages that the api refused as forged, so that an incident of their job opens."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Final

from sqlalchemy import Engine

from rankwatch_service.access.agents import ForgedError, Origin
from rankwatch_service.clock import Clock
from rankwatch_service.log.base import Entry
from rankwatch_service.log.control_log import ControlLog
from rankwatch_service.policy.control_records import TelemetryRefused, encode_control
from rankwatch_service.store.engine import write

EVERY_S: Final = 5.0
"""Between two control records about one kind of forgery in one job; those in between are counted."""

KINDS_MAX: Final = 4_096
"""(job, kind) pairs that are remembered, about 1 MB; the oldest makes room."""


@dataclass(slots=True)
class _Kind:
    sent_s: float
    count: int = 0


class Forgeries:
    """What was refused as forged. Thread-safe."""

    def __init__(self, engine: Engine, controls: ControlLog, clock: Clock) -> None:
        self._engine = engine
        self._controls = controls
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._lock = Lock()

    def add(self, origin: Origin, error: ForgedError, source: str) -> None:
        """Count a forged message, and report it unless one of its kind was reported just now."""
        now_s, key = self._clock.monotonic_s(), (origin.job, error.what)
        with self._lock:
            kind = self._kinds.pop(key, None) or _Kind(float("-inf"))
            if len(self._kinds) >= KINDS_MAX:
                del self._kinds[next(iter(self._kinds))]
            self._kinds[key] = kind
            kind.count += 1
            if now_s - kind.sent_s < EVERY_S:
                return
            kind.sent_s, count, kind.count = now_s, kind.count, 0
        fields: dict[str, str | int] = {"what": error.what, "host": origin.host, "agent": error.agent}
        fields |= {"source": source, "count": count}
        record = TelemetryRefused("forged", fields)
        with write(self._engine) as connection:
            self._controls.append_in(connection, [Entry(origin.job, encode_control(record))])
