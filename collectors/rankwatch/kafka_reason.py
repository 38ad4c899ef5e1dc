"""What the Kafka client says in its log alone: why it cannot connect.

A wrong password, an unknown certificate and a dead broker are all the same `KafkaTimeoutError` to its caller.
"""

from __future__ import annotations

import logging
from typing import Final

TEXT_CHARS_MAX: Final = 300

_VAGUE: Final = ("Unable to bootstrap", "not ready; waiting", "socket disconnected", "timed out")
"""What the client says between, and what a broker does that makes a wrong password wait for its answer."""


class _MostTelling(logging.Handler):
    """Keeps the newest warning, unless it says less than the one before."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self._vague = True

    def emit(self, record: logging.LogRecord) -> None:
        told = record.getMessage()
        vague = any(words in told for words in _VAGUE)
        if self._vague or not vague:
            self.text, self._vague = told[:TEXT_CHARS_MAX], vague

    def forget(self) -> None:
        self.text, self._vague = "", True


_heard: Final = _MostTelling()


def listen() -> None:
    """Begin to listen to a new client, and keep its lines out of our logs: in an outage it writes many a second."""
    logger = logging.getLogger("kafka")
    if _heard not in logger.handlers:
        logger.addHandler(_heard)
        logger.propagate = False
    _heard.forget()


def explained(error: BaseException) -> str:
    """The error, with the most telling thing that the client has said since `listen`."""
    told = (str(error) or type(error).__name__)[:TEXT_CHARS_MAX]
    return f"{told} ({_heard.text})" if _heard.text else told
