"""The certificate of the api: files that are read again when they change, and the pin by which agents know it."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

import structlog
from cryptography import x509

from rankwatch.trust import pin_of

LOOK_EVERY_S: Final = 2.0
"""How often the api looks whether its certificate was renewed."""

_log = structlog.get_logger(__name__)


class CertificateError(ValueError):
    """The files are no certificate with its key; the message names them."""


class ServedCertificate:
    """The certificate in force. One thread calls `look`; any may read `context`."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read the files.

        Args:
            certificate: in PEM form, followed by those between it and its authority.
            key: its private key in PEM form, without a passphrase.

        Raises:
            CertificateError: they cannot be used.
        """
        self._certificate = certificate
        self._key = key
        self._stamp = self._stamped()
        self.context = self._read()
        """How new connections are made."""

    def look(self) -> None:
        """Read the files if they have changed; files that cannot be used are logged once, and change nothing."""
        stamp = self._stamped()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self.context = self._read()
        except CertificateError as error:
            _log.warning("certificate_not_renewed", detail=str(error))
        else:
            _log.info("certificate_renewed", file=str(self._certificate))

    def _stamped(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp_of(file) for file in (self._certificate, self._key))

    def _read(self) -> ssl.SSLContext:
        for file in (self._certificate, self._key):
            try:
                file.open().close()
            except OSError as error:
                raise CertificateError(f"{file} cannot be read: {error.strerror}") from error
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            # Without a passphrase here, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self._certificate, self._key, password="")
        except (ssl.SSLError, ValueError) as error:
            raise CertificateError(
                f"{self._certificate} and {self._key} are no certificate with its key, both in PEM form and the key "
                f"without a passphrase: {error}"
            ) from error
        return context


def token_pin(certificate: Path) -> str:
    """The pin that tokens for agents end with; empty if an authority vouches for the certificate, not itself.

    Raises:
        CertificateError: the file cannot be used.
    """
    try:
        read = x509.load_pem_x509_certificate(certificate.read_bytes())
        return pin_of(certificate) if read.issuer == read.subject else ""
    except OSError as error:
        raise CertificateError(f"{certificate} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CertificateError(f"{certificate} has no certificate in PEM form") from error


def _stamp_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
