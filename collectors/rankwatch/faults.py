"""The boundary between the SDK and training: errors of the SDK end here."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from rankwatch.recorder import Recorder

LOG_EVERY_S: Final = 60.0
"""Errors are logged at most this often; all are counted."""

_log = logging.getLogger("rankwatch")
_log.addHandler(logging.NullHandler())


class Faults:
    """Errors inside the SDK that training did not see. `with faults:` catches those of its body."""

    def __init__(self, recorder: Recorder, now: Callable[[], int]) -> None:
        self.count = 0
        self.last: Exception | None = None
        self._recorder = recorder
        self._now = now
        self._next_log_ns = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.caught(error)
        return True

    def caught(self, error: Exception) -> None:
        """Count an error, keep it without its frames, and log it if none was logged in the last minute."""
        self.count += 1
        # Its traceback would keep the frames, and with them the step's tensors, alive.
        self.last = error.with_traceback(None)
        self._recorder.drop("errors")
        now_ns = self._now()
        if now_ns >= self._next_log_ns:
            self._next_log_ns = now_ns + int(LOG_EVERY_S * 1e9)
            _log.error("training goes on after an error in rankwatch: %s: %s", type(error).__name__, error)
