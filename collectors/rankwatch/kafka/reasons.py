"""Why the Kafka client cannot connect, which it says only in its log.

A wrong password, an unknown certificate and a dead broker are all the same `KafkaTimeoutError` to its caller.
"""

from __future__ import annotations

import logging
from typing import Final

TEXT_CHARS_MAX: Final = 300

_REFUSED: Final = ("Authentication", "Authorization", "SaslMechanism", "[SSL:", "CERTIFICATE")
"""Log lines about a broker that answered: they are the reason, whatever other lines say."""

_CLOSED: Final = "socket disconnected"
"""Log line of a refusal whose answer was lost because the broker closed the connection first."""

_VAGUE: Final = ("Unable to bootstrap", "not ready; waiting", "timed out")
"""Log lines that name no reason."""


class _MostTelling(logging.Handler):
    """Keeps the newest warning, unless the one before is more specific."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self._weight = 0

    def emit(self, record: logging.LogRecord) -> None:
        told = record.getMessage()
        weight = _weight(told)
        if weight >= self._weight:
            self.text, self._weight = told[:TEXT_CHARS_MAX], weight

    def forget(self) -> None:
        self.text, self._weight = "", 0


def _weight(told: str) -> int:
    if any(words in told for words in _REFUSED):
        return 3
    if _CLOSED in told:
        return 1
    return 0 if any(words in told for words in _VAGUE) else 2


_heard: Final = _MostTelling()


def listen() -> None:
    """Start reading a new client's log lines, and keep them out of our logs: in an outage it writes many a second."""
    logger = logging.getLogger("kafka")
    if _heard not in logger.handlers:
        logger.addHandler(_heard)
        logger.propagate = False
    _heard.forget()


def explained(error: BaseException) -> str:
    """The error, with the most specific line that the client has logged since `listen`."""
    told = (str(error) or type(error).__name__)[:TEXT_CHARS_MAX]
    return f"{told} ({_heard.text})" if _heard.text else told


def closed_at_once() -> bool:
    """Whether the most specific line since `listen` is that brokers close connections."""
    return _CLOSED in _heard.text
