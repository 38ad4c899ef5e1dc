"""Refused requests: counted, written to the audit trail once a minute, and a brake on guessing tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from threading import Lock
from typing import Final

from sqlalchemy import Engine

from rankwatch_service.clock import Clock
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import write

TRIES_MAX: Final = 20
"""Invalid tokens that one address may send within `WINDOW_S`. A person mistypes a few; agents wait between tries."""

WINDOW_S: Final = 60.0

ADDRESSES_MAX: Final = 4_096
"""Addresses with a window of their own, about 1 MB; the oldest windows make room."""

LINES_MAX: Final = 64
"""Lines that one minute may add to the audit trail, which is never trimmed: 18 MB a day at most. The rest is one line
for each status."""

PATH_CHARS_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Refusal:
    """Key by which the audit trail groups refused requests."""

    status: int
    source: str
    """Address of the caller."""
    actor: str
    """The holder of the token, as the audit trail names them; empty without a valid one."""


class Refusals:
    """The refusals of this process. Thread-safe."""

    def __init__(self, engine: Engine, clock: Clock, count: Callable[[int], None]) -> None:
        """Do no I/O yet.

        Args:
            engine: of the database with the audit trail.
            clock: of the windows.
            count: called with the status of each refusal, for the metrics.
        """
        self._engine = engine
        self._clock = clock
        self._count = count
        self._windows: dict[str, tuple[float, int]] = {}
        self._times: Counter[Refusal] = Counter()
        self._paths: dict[Refusal, str] = {}
        """Of the first of the requests that are refused alike."""
        self._lock = Lock()

    def add(self, refusal: Refusal, path: str, *, invalid_token: bool) -> None:
        """Count a refusal of a request for `path`; one of an invalid token also counts against its address."""
        self._count(refusal.status)
        now_s = self._clock.monotonic_s()
        with self._lock:
            if invalid_token:
                self._add_try(refusal.source, now_s)
            if refusal not in self._paths and len(self._paths) >= LINES_MAX:
                refusal, path = Refusal(refusal.status, "", ""), ""
            self._paths.setdefault(refusal, path[:PATH_CHARS_MAX])
            self._times[refusal] += 1

    def _add_try(self, source: str, now_s: float) -> None:
        since_s, tries = self._window(source, now_s)
        self._windows.pop(source, None)  # the newest try stands last
        if len(self._windows) >= ADDRESSES_MAX:
            del self._windows[next(iter(self._windows))]
        self._windows[source] = since_s, tries + 1

    def wait_s(self, source: str) -> int:
        """Seconds until another unknown token from this address is looked up; 0: now."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            since_s, tries = self._window(source, now_s)
        return ceil(since_s + WINDOW_S - now_s) if tries >= TRIES_MAX else 0

    def _window(self, source: str, now_s: float) -> tuple[float, int]:
        since_s, tries = self._windows.get(source, (now_s, 0))
        return (since_s, tries) if now_s - since_s < WINDOW_S else (now_s, 0)

    def store(self) -> None:
        """Write what was refused since the last call to the audit trail."""
        with self._lock:
            times, self._times = self._times, Counter()
            paths, self._paths = self._paths, {}
        if not times:
            return
        now = self._clock.unix_ns()
        with write(self._engine) as connection:
            for refusal, number in times.items():
                actor, outcome = refusal.actor or "unknown", str(refusal.status)
                fields = {"times": number}
                audit_trail.append(
                    connection,
                    now,
                    actor,
                    "request.refuse",
                    paths[refusal],
                    outcome,
                    source=refusal.source,
                    fields=fields,
                )
