"""A machine on which one user runs the service, jobs that are simulated, and commands."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.service.process import Role, Up
from tests.support.store.postgres_server import _programs

JOB = ("--job", "gpt", "--ranks", "8", "--step-s", "0.2")


class Machine(Up):
    """`rankwatch up` and commands, as one user on a machine of their own."""

    def __init__(self, folder, database_url=""):
        self.environment = {"PATH": f"{_programs()}:{os.environ['PATH']}"}
        url = ("--database-url", database_url) if database_url else ()
        super().__init__(folder, *url, environment=self.environment)
        self.database_url = database_url or f"sqlite:///{self.data}/rankwatch.db"
        self.where = ("--data", str(self.data), *url)

    def end(self):
        if self.process is not None and self.process.poll() is None:
            self.stop()

    def command(self, *arguments):
        """Run a command of this user; returns its exit status and what it printed."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("RANKWATCH_")}
        self.folder.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "rankwatch_service", *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env=clean | self.environment | {"XDG_CONFIG_HOME": str(self.folder / "config")},
        )
        return done.returncode, done.stdout + done.stderr

    def simulated(self, *arguments):
        """A job that sends to this service, as a process of its own."""
        token = (self.data / "ingest-token").read_text().strip()
        to = ("--live", "--url", self.http.url, "--token", token)
        return Role(self.folder / "job", "simulate", *to, *JOB, *arguments)

    def items(self, path, **how):
        return self.http.ask("GET", f"/api/v1/{path}", **how).json()["items"]

    def steps(self):
        return max((job["step"] for job in self.items("jobs")), default=-1)

    def audit(self):
        return [(row["action"], row["target"]) for row in reversed(self.items("audit"))]


@contextmanager
def machines(request: pytest.FixtureRequest, folder: Path, database: str, count: int) -> Iterator[list[Machine]]:
    """Machines that have nothing yet, each with a database of its own of this kind."""
    with ExitStack() as stack:
        made = []
        for number in range(count):
            url = stack.enter_context(request.getfixturevalue("postgres").empty()) if database == "postgresql" else ""
            machine = Machine(folder / f"machine-{number}", url)
            stack.callback(machine.end)
            made.append(machine)
        yield made


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
