"""What the Kafka client says in its log alone: why it cannot connect.

A wrong password, an unknown certificate and a dead broker are all the same `KafkaTimeoutError` to its caller.
"""

from __future__ import annotations

import logging
from typing import Final

TEXT_CHARS_MAX: Final = 300


class _Newest(logging.Handler):
    """Keeps the newest warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        told = record.getMessage()
        if "Unable to bootstrap" not in told:  # which the caller hears as an error
            self.text = told[:TEXT_CHARS_MAX]


_newest: Final = _Newest()


def listen() -> None:
    """Begin to listen to the client, and keep its lines out of our logs: in an outage it writes many a second."""
    logger = logging.getLogger("kafka")
    if _newest not in logger.handlers:
        logger.addHandler(_newest)
        logger.propagate = False
    _newest.text = ""


def explained(error: BaseException) -> str:
    """The error with what the client said last before it."""
    told = f"{type(error).__name__}: {error}"[:TEXT_CHARS_MAX]
    return f"{told} ({_newest.text})" if _newest.text else told
