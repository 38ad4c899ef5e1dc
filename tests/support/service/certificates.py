"""Certificates that tests make."""

from __future__ import annotations

import datetime as dt
import ipaddress
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority(NamedTuple):
    """What signs certificates."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certificate(
    certificate: Path, keystore: Path, address: str = "127.0.0.1", signer: Authority | None = None
) -> Authority:
    """Write a certificate for an address, alone and with its key before it; without a signer it signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{address} {x509.random_serial_number() % 10**6}")])
    now = dt.datetime.now(dt.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(signer.certificate.subject if signer else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
        .sign(signer.key if signer else key, hashes.SHA256())
    )
    public = signed.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    certificate.write_bytes(public)
    keystore.write_bytes(private + public)
    return Authority(signed, key)
