"""Addresses, credentials and topics of Kafka: the same for agents and the service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from rankwatch.wire import BATCH_BYTES_MAX

PREFIX: Final = "rankwatch"
SECURITY_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
SASL_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
SSL_FILES: Final = ("ssl_cafile", "ssl_certfile", "ssl_keyfile")
COMPRESSIONS: Final = ("zstd", "lz4", "gzip", "none")

MESSAGE_BYTES_MAX: Final = BATCH_BYTES_MAX + 64 * 1024
"""Largest message of rankwatch's topics: the largest batch, with its key and headers."""
REQUEST_TIMEOUT_MS: Final = 10_000
"""How long a client waits for a broker's answer to one request."""
RECONNECT_MAX_MS: Final = 1_000
"""With the client's default of 30 s a recovered broker would stay unused for as long."""


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """How to reach Kafka. Names in the environment are these in capitals, after `RANKWATCH_KAFKA_`."""

    bootstrap: str
    """HOST:PORT of one or more brokers, with commas; in the environment `RANKWATCH_KAFKA`."""
    prefix: str = PREFIX
    """Topics are PREFIX.telemetry, PREFIX.dead-letters and PREFIX.incidents."""
    security_protocol: str = "PLAINTEXT"
    sasl_mechanism: str = "PLAIN"
    sasl_username: str = ""
    sasl_password: str = field(default="", repr=False)
    """Left out of repr, so that it is never logged."""
    ssl_cafile: str = ""
    """File of trusted certificates; the system's if empty."""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    """The client's own certificate and key, where brokers ask for one."""
    compression: str = "zstd"

    def __post_init__(self) -> None:
        """Validate the settings.

        Raises:
            ValueError: a setting is invalid; the message names it and says why.
        """
        for address in self.brokers:
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
                raise ValueError(f"kafka: {address!r} is not HOST:PORT")
        for name, value, known in (
            ("security_protocol", self.security_protocol, SECURITY_PROTOCOLS),
            ("sasl_mechanism", self.sasl_mechanism, SASL_MECHANISMS),
            ("compression", self.compression, COMPRESSIONS),
        ):
            if value not in known:
                raise ValueError(f"kafka_{name}: {value!r} is none of {', '.join(known)}")
        for name in SSL_FILES:
            path = getattr(self, name)
            if path and not Path(path).is_file():
                raise ValueError(f"kafka_{name}: there is no file {path}")
        if self.uses_password and not (self.sasl_username and self.sasl_password):
            raise ValueError(f"kafka_security_protocol: {self.security_protocol} needs a user name and a password")

    @property
    def brokers(self) -> list[str]:
        """The bootstrap addresses."""
        return [address.strip() for address in self.bootstrap.split(",")]

    @property
    def uses_password(self) -> bool:
        """Whether brokers ask for a user name and a password."""
        return self.security_protocol.startswith("SASL")

    @property
    def telemetry_topic(self) -> str:
        """Batches (`rankwatch.wire.Batch` as msgpack), keyed by job."""
        return f"{self.prefix}.telemetry"

    @property
    def dead_letters_topic(self) -> str:
        """Records of the telemetry topic that could not be used, unchanged."""
        return f"{self.prefix}.dead-letters"


def from_environment(environment: Mapping[str, str], bootstrap: str = "") -> KafkaSettings | None:
    """Settings from `RANKWATCH_KAFKA…`; None if neither it nor the argument names a broker.

    Raises:
        ValueError: a setting is malformed.
    """
    brokers = bootstrap or environment.get("RANKWATCH_KAFKA", "")
    if not brokers:
        return None
    given = {}
    for name in KafkaSettings.__slots__:
        value = environment.get(f"RANKWATCH_KAFKA_{name.upper()}", "")
        if value and name != "bootstrap":
            given[name] = value
    return KafkaSettings(brokers, **given)


def client_options(settings: KafkaSettings) -> dict[str, Any]:
    """Arguments that every client of kafka-python takes: addresses, security, time-outs."""
    options: dict[str, Any] = {
        "bootstrap_servers": settings.brokers,
        "security_protocol": settings.security_protocol,
        "request_timeout_ms": REQUEST_TIMEOUT_MS,
        "reconnect_backoff_max_ms": RECONNECT_MAX_MS,
    }
    if settings.uses_password:
        options["sasl_mechanism"] = settings.sasl_mechanism
        options["sasl_plain_username"] = settings.sasl_username
        options["sasl_plain_password"] = settings.sasl_password
    for name in SSL_FILES:
        if path := getattr(settings, name):
            options[name] = path
    return options


def partition_of(key: str, partitions: int) -> int:
    """The partition for records of this key (a job's name); the same in every process, unlike `hash`."""
    return crc32(key.encode()) % partitions
