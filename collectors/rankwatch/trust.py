"""What a client demands of the service before it sends anything, its token included.

Over https the service proves itself by a certificate of a trusted authority, or by the certificate whose SHA-256, the
pin, the token names. Plain http is for this machine, or for whoever asks for it; there the service proves itself when
an agent enrols, by the enrolment key in the token, before the agent obeys it.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

CA_FILE: Final = "RANKWATCH_CA_FILE"
INSECURE: Final = "RANKWATCH_INSECURE"

_PIN: Final = re.compile(r"[0-9a-fA-F]{64}")
_ENROLMENT_KEY: Final = re.compile(r"k[0-9a-f]{32}")
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)

_OTHER_NAME: Final = "use a URL with a name that the certificate has, or give the service one with this name"
_HINTS: Final = {
    9: "check the clock of this machine and of the one that made the certificate",
    10: "renew the certificate of the service, or check the clock of this machine",
    62: _OTHER_NAME,
    64: _OTHER_NAME,
}
"""What to do, by OpenSSL's X509_V_ERR: not yet valid, expired, another host name, another address. Where none stands
here, no trusted authority has signed the certificate."""


@dataclass(frozen=True, slots=True)
class Trust:
    """What a client demands of one service."""

    pin: str = ""
    """SHA-256 of the service's certificate (DER), in small hexadecimal digits; empty: an authority vouches for it."""
    ca_file: str = ""
    """PEM file of the trusted authorities; empty: the system's."""
    insecure: bool = False
    """Plain http to other machines is allowed."""
    enrolment_key: bytes = field(default=b"", repr=False)
    """The key that proves to an enrolling agent that the service has issued the token; empty: no proof is needed."""

    def check(self, url: str) -> None:
        """Refuse a URL at which the service could not prove itself.

        Raises:
            ValueError: it is no http or https URL with a host, or it is plain http where that is not enough.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{url!r} is not the URL of a service: it has the form http://HOST:PORT or https://HOST:PORT"
            )
        if parts.scheme == "https":
            return
        if self.pin:
            raise ValueError(f"{url}: the token names the certificate of its service, so the URL must be https")
        if not (self.insecure or is_loopback(parts.hostname)):
            raise ValueError(
                f"{url}: plain http to another machine would show it the token, and prove nothing; "
                f"use https, or {INSECURE}=1 in a network that you trust"
            )

    def context(self) -> ssl.SSLContext:
        """How connections over https are made.

        Raises:
            ValueError: the file of authorities cannot be used.
        """
        if self.pin:
            return _PinContext(self.pin)
        try:
            changed_ns = Path(self.ca_file).stat().st_mtime_ns if self.ca_file else 0
            return _context(self.ca_file, changed_ns)
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(f"{CA_FILE}: {self.ca_file} cannot be used: {error.strerror or error}") from error


def trust_of(text: str, environment: Mapping[str, str], certificate: str = "", *, insecure: bool = False) -> Trust:
    """What is demanded of the service of a token.

    Args:
        text: the token as it was issued.
        environment: for `RANKWATCH_CA_FILE` and `RANKWATCH_INSECURE`.
        certificate: the service's own certificate file, on its machine; one that cannot be read is ignored.
        insecure: whether plain http to another machine is allowed whatever the environment says.

    Raises:
        ValueError: the token ends with something else than a pin or an enrolment key.
    """
    _, pin, enrolment_key = split_token(text)
    if not pin and certificate:
        try:
            pin = pin_of(Path(certificate))
        except (OSError, ValueError):
            pin = ""  # then an authority has to vouch for the service
    return Trust(pin, environment.get(CA_FILE, ""), insecure or is_insecure(environment), enrolment_key)


class TokenText(NamedTuple):
    """The parts of a token as it was issued."""

    token: str
    """What is sent."""
    pin: str = ""
    """SHA-256 of the service's certificate."""
    enrolment_key: bytes = b""


def split_token(text: str) -> TokenText:
    """Split a token as it was issued; tokens themselves have no dots.

    Raises:
        ValueError: what follows the dot is neither a pin nor an enrolment key.
    """
    token, dot, end = text.rpartition(".")
    if not dot:
        return TokenText(text)
    if _ENROLMENT_KEY.fullmatch(end):
        return TokenText(token, enrolment_key=bytes.fromhex(end[1:]))
    if not _PIN.fullmatch(end):
        raise ValueError("the token was not copied as a whole: what follows its dot is 64 digits, or k and 32 digits")
    return TokenText(token, end.lower())


def pin_of(certificate: Path) -> str:
    """The pin of the first certificate in a PEM file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it has no certificate.
    """
    found = _PEM.search(certificate.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{certificate} has no certificate in PEM form")
    return sha256(ssl.PEM_cert_to_DER_cert(found.group())).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine, without asking a name server."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_insecure(environment: Mapping[str, str]) -> bool:
    """Whether `RANKWATCH_INSECURE` allows plain http to other machines."""
    return environment.get(INSECURE, "").lower() in ("1", "true")


def explain_tls_error(url: str, error: BaseException | None) -> str:
    """One line for people: why the service at this URL was not believed; empty if the error has another cause."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    if error is None:
        return ""
    if isinstance(error, PinError):
        return f"{url}: {error}"
    why = getattr(error, "verify_message", "") or str(error)
    hint = _HINTS.get(getattr(error, "verify_code", 0), f"set {CA_FILE} to the file of its authority")
    return (
        f"{url}: the certificate is not trusted ({why.rstrip('.')}); {hint}, or use a token that names the certificate"
    )


class PinError(ssl.SSLCertVerificationError):
    """The service has another certificate than the token names."""


class _PinSocket(ssl.SSLSocket):
    """Verifies the certificate before anything can be sent."""

    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        certificate = self.getpeercert(binary_form=True)
        assert isinstance(self.context, _PinContext)
        if certificate is None or sha256(certificate).hexdigest() != self.context.pin:
            raise PinError(
                1,
                "the service has another certificate than the token names, so nothing was sent: it is not your service,"
                " or its certificate was renewed and the token must be made anew",
            )


class _PinContext(ssl.SSLContext):
    """Connections to the holder of one certificate, whatever it says about names, dates and authorities."""

    sslsocket_class = _PinSocket
    pin: str

    def __new__(cls, pin: str) -> _PinContext:
        context = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.pin = pin
        return context


@lru_cache(maxsize=4)
def _context(ca_file: str, _changed_ns: int) -> ssl.SSLContext:
    """Kept, since reading the system's authorities takes 20 ms, and a channel is opened after each failure."""
    return ssl.create_default_context(cafile=ca_file or None)
