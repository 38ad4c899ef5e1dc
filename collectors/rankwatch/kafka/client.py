"""Opens clients of kafka-python. One that cannot connect says why, and leaves no thread or socket behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kafka.errors import KafkaError
from kafka.net.compat import KafkaNetClient

from rankwatch.kafka.reasons import closed_at_once, explained, listen
from rankwatch.kafka.settings import KafkaSettings, client_options

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
