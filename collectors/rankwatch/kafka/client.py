"""Opens a client of kafka-python: one that gets nowhere says why, and leaves no thread and no socket behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kafka.errors import KafkaError
from kafka.net.compat import KafkaNetClient

from rankwatch.kafka.reasons import closed_at_once, explained, listen
from rankwatch.kafka.settings import KafkaSettings, client_options

CONNECT_S: Final = 10.0
"""How long brokers may take to let a client in."""

CLOSED_HINT: Final = "; it may not accept the user, the password or the mechanism"
"""Brokers close such connections, and now and then nothing of their answer is seen."""


class KafkaAwayError(Exception):
    """No broker answers, or none lets us in; the message says why. Always worth another try."""


def opened(kind: Callable[..., Any], settings: KafkaSettings, within_s: float = CONNECT_S, **more: Any) -> Any:
    """A client of this kind, once a broker has let it in.

    Args:
        kind: KafkaProducer, KafkaConsumer or KafkaAdminClient.
        settings: how to reach the brokers.
        within_s: how long that may take.
        more: the client's further options.

    Raises:
        KafkaAwayError: no broker did.
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
            one.close()  # which a constructor that fails does not do
        if isinstance(error, (KafkaError, OSError)):  # OSError: a certificate that cannot be read
            hint = CLOSED_HINT if settings.sasl_username and closed_at_once() else ""
            raise KafkaAwayError(f"Kafka at {settings.bootstrap}: {explained(error)}{hint}") from error
        raise
