"""The thread of an api process that drives orders, and does the housekeeping in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import structlog

from rankwatch_service.clock import Clock
from rankwatch_service.store.errors import StoreError

BUSY_S: Final = 0.05
"""Time between two passes while an order is open: agents post views that often."""

IDLE_S: Final = 1.0
"""Time between two passes while no order is open: changes wake the thread, only deadlines need the passes."""

HOUSEKEEPING_S: Final = 60.0

_log = structlog.get_logger(__name__)


class DriverThread(threading.Thread):
    """Drives orders whenever it is woken, and every `BUSY_S` while one is open.

    A call that raises is counted and retried: a database outage must not end the driving of orders.
    """

    def __init__(
        self, drive: Callable[[], bool], housekeeping: Callable[[], None], on_failure: Callable[[], None], clock: Clock
    ) -> None:
        """Run nothing until `start`.

        Args:
            drive: one pass over the orders; returns whether any is open.
            housekeeping: called every `HOUSEKEEPING_S`.
            on_failure: called when either of them raised.
            clock: of the housekeeping.
        """
        super().__init__(name="driver", daemon=True)
        self._drive = drive
        self._housekeeping = housekeeping
        self._on_failure = on_failure
        self._clock = clock
        self._wake = threading.Event()
        self._stopping = False

    @property
    def alive(self) -> bool:
        """Whether orders are being driven."""
        return self.is_alive() and not self._stopping

    def wake(self) -> None:
        """Drive now, since something may have changed. Thread-safe; never blocks."""
        self._wake.set()

    def stop(self) -> None:
        """Return after the current pass has ended."""
        self._stopping = True
        self._wake.set()
        self.join()

    def run(self) -> None:
        """Drive until stopped. Called by `start`."""
        housekeeping_s = float("-inf")
        while not self._stopping:
            self._wake.clear()
            busy = True
            try:
                busy = self._drive()
                if self._clock.monotonic_s() - housekeeping_s >= HOUSEKEEPING_S:
                    housekeeping_s = self._clock.monotonic_s()
                    self._housekeeping()
            except StoreError as error:
                self._on_failure()
                _log.warning("driver_database_error", error=str(error))
            except Exception:  # noqa: BLE001 - see the class
                self._on_failure()
                _log.exception("driver_failed")
            self._wake.wait(BUSY_S if busy else IDLE_S)
