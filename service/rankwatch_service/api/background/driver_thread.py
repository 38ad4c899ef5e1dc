"""The thread that runs the driver in an api process, and what has to be tidied up from time to time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import structlog

from rankwatch_service.clock import Clock
from rankwatch_service.store.errors import StoreError

BUSY_S: Final = 0.05
"""Between two looks while an order is open: agents post views that often."""

IDLE_S: Final = 1.0
"""Between two looks while nothing is: only time can matter then, changes wake it."""

TIDY_S: Final = 60.0

_log = structlog.get_logger(__name__)


class DriverThread(threading.Thread):
    """Calls `drive` whenever it is woken, every `BUSY_S` while that says so, and `tidy` every `TIDY_S`.

    A call that raises is counted and tried again: a database that is away must not end the orders for good.
    """

    def __init__(
        self, drive: Callable[[], bool], tidy: Callable[[], None], failed: Callable[[], None], clock: Clock
    ) -> None:
        super().__init__(name="driver", daemon=True)
        self._drive = drive
        self._tidy = tidy
        self._failed = failed
        self._clock = clock
        self._wake = threading.Event()
        self._stopping = False

    @property
    def alive(self) -> bool:
        """Whether orders are being driven."""
        return self.is_alive() and not self._stopping

    def wake(self) -> None:
        """Something may have changed. Callable from any thread, never blocks."""
        self._wake.set()

    def stop(self) -> None:
        """End after the current look."""
        self._stopping = True
        self._wake.set()
        self.join()

    def run(self) -> None:
        """Drive until stopped. Not for callers."""
        tidied_s = float("-inf")
        while not self._stopping:
            self._wake.clear()
            busy = True
            try:
                busy = self._drive()
                if self._clock.monotonic_s() - tidied_s >= TIDY_S:
                    tidied_s = self._clock.monotonic_s()
                    self._tidy()
            except StoreError as error:
                self._failed()
                _log.warning("driver_without_database", error=str(error))
            except Exception:  # noqa: BLE001 - see above
                self._failed()
                _log.exception("driver_failed")
            self._wake.wait(BUSY_S if busy else IDLE_S)
