"""Apache Kafka behind TLS and a password, with a certificate made on the spot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rankwatch.kafka.settings import KafkaSettings
from tests.support.kafka.broker import Broker, kafka_broker
from tests.support.service.certificates import make_certificate
from tests.support.service.process import free_port

USER = "rankwatch"
PASSWORD = "correct-horse"


@contextmanager
def secure_kafka(folder: Path) -> Iterator[tuple[Broker, KafkaSettings]]:
    """The broker, with a plain listener for its own use, and the settings of the secure one."""
    certificate, keystore = folder / "certificate.pem", folder / "keystore.pem"
    make_certificate(certificate, keystore)
    plain, secure, controller = free_port(), free_port(), free_port()
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    extra = {
        "listeners": f"PLAINTEXT://127.0.0.1:{plain},CLIENT://127.0.0.1:{secure},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{plain},CLIENT://127.0.0.1:{secure}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,CLIENT:SASL_SSL",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(keystore),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(certificate),
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.client.plain.sasl.jaas.config": f'{login} user_{USER}="{PASSWORD}";',
    }
    with kafka_broker("apache", extra, port=plain) as broker:
        yield (
            broker,
            KafkaSettings(
                bootstrap=f"127.0.0.1:{secure}",
                security_protocol="SASL_SSL",
                sasl_username=USER,
                sasl_password=PASSWORD,
                ssl_cafile=str(certificate),
            ),
        )
