"""Apache Kafka behind TLS and a password, with a certificate made on the spot."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rankwatch.kafka.settings import KafkaSettings
from tests.support.kafka.broker import Broker, kafka_broker
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


def make_certificate(certificate: Path, keystore: Path) -> None:
    """A certificate for 127.0.0.1 that signs itself, alone and with its key before it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = dt.datetime.now(dt.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public = signed.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    certificate.write_bytes(public)
    keystore.write_bytes(private + public)
