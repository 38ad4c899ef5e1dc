"""Opens clients of kafka-python. One that cannot connect says why, and leaves no thread or socket behind.

The reason why the Kafka client cannot connect, which it only logs.

A wrong password, an unknown certificate and a dead broker are all the same `KafkaTimeoutError` to its caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from kafka.errors import KafkaError
from kafka.net.compat import KafkaNetClient

from rankwatch.kafka.settings import KafkaSettings, client_options

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
        reported = record.getMessage()
        weight = _weight(reported)
        if weight >= self._weight:
            self.text, self._weight = reported[:TEXT_CHARS_MAX], weight

    def forget(self) -> None:
        self.text, self._weight = "", 0


def _weight(reported: str) -> int:
    if any(words in reported for words in _REFUSED):
        return 3
    if _CLOSED in reported:
        return 1
    return 0 if any(words in reported for words in _VAGUE) else 2


_heard: Final = _MostTelling()


def listen() -> None:
    """Start to capture a new client's log lines and keep them out of the process's log: an outage causes many a
    second.
    """
    logger = logging.getLogger("kafka")
    if _heard not in logger.handlers:
        logger.addHandler(_heard)
        logger.propagate = False
    _heard.forget()


def explained(error: BaseException) -> str:
    """The error's text, with the most specific line that the client has logged since `listen`."""
    reported = (str(error) or type(error).__name__)[:TEXT_CHARS_MAX]
    return f"{reported} ({_heard.text})" if _heard.text else reported


def closed_at_once() -> bool:
    """Whether the most specific log line since `listen` says that brokers close connections."""
    return _CLOSED in _heard.text


CONNECT_S: Final = 10.0
"""How long a connection, with authentication, may take."""

CLOSED_HINT: Final = "; it may not accept the user, the password or the mechanism"
"""Brokers close the connection when they reject a login, sometimes before the client has read their answer."""


class KafkaAwayError(Exception):
    """No broker answers or accepts the connection; the message says why. Always worth a retry."""


def opened(kind: Callable[..., Any], settings: KafkaSettings, within_s: float = CONNECT_S, **more: Any) -> Any:
    """Create a client and connect it to a broker.

    Args:
        kind: KafkaProducer, KafkaConsumer or KafkaAdminClient.
        settings: how to reach the brokers.
        within_s: how long connecting may take, in seconds.
        more: further options of the client.

    Raises:
        KafkaAwayError: no broker accepted the connection in time.
    """
    listen()
    made: list[KafkaNetClient] = []

    def net_client(**options: Any) -> KafkaNetClient:
        made.append(KafkaNetClient(**options))
        return made[-1]

    try:
        within_ms = int(within_s * 1000)
        return kind(**client_options(settings), kafka_client=net_client, bootstrap_timeout_ms=within_ms, **more)
    except Exception as error:
        for one in made:
            one.close()  # a constructor that fails does not close it
        if isinstance(error, (KafkaError, OSError)):  # OSError: a certificate that cannot be read
            hint = CLOSED_HINT if settings.sasl_username and closed_at_once() else ""
            raise KafkaAwayError(f"Kafka at {settings.bootstrap}: {explained(error)}{hint}") from error
        raise
