"""Checks the addresses that webhooks may go to, against requests into private networks (SSRF).

A receiver's name is resolved once for each try, every address is checked, and the connection is made to the checked
address, so that a second DNS response cannot redirect it (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final
from urllib.parse import urlsplit

from rankwatch_service.allow_list import AllowList

ADDRESSES_MAX: Final = 4
"""Addresses of one name that are tried in turn, within the time limit of one try."""

URL_CHARS_MAX: Final = 2_048

_WEB_PORTS: Final = (80, 443)
_NAT64: Final = IPv6Network("64:ff9b::/96")

METADATA: Final[Mapping[IPv4Address | IPv6Address, str]] = {
    ip_address(address): source
    for address, source in (
        ("fd00:ec2::254", "AWS: docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html"),
        ("fd20:ce::254", "Google Cloud: cloud.google.com/compute/docs/metadata/querying-metadata"),
        ("168.63.129.16", "Azure: learn.microsoft.com/azure/virtual-network/what-is-ip-address-168-63-129-16"),
        ("192.0.0.192", "Oracle Cloud Classic: docs.oracle.com/en/cloud/iaas/compute-iaas-cloud"),
        ("fd00:c1::a9fe:a9fe", "Oracle Cloud: docs.oracle.com/iaas/Content/Compute/Tasks/gettingmetadata.htm"),
        ("100.100.100.200", "Alibaba Cloud: alibabacloud.com/help/en/ecs/user-guide/view-instance-metadata"),
    )
}
"""Where clouds tell a machine its credentials, outside of the link-local ranges, which are refused as a whole: address
-> cloud and page that names it. They are refused in every form, whatever is allowed."""


class AddressError(Exception):
    """Webhooks must not go to this target. A retry helps only if the receiver or its DNS entry was changed."""


def checked_url(url: str) -> tuple[str, int]:
    """Split a receiver's URL into host name and port.

    Raises:
        AddressError: not http or https, user information before the host, a port that is neither 80, 443 nor
            above 1023, or too long.
    """
    if len(url) > URL_CHARS_MAX:
        raise AddressError(f"the URL is longer than {URL_CHARS_MAX} characters")
    # urlsplit() removes tabs and line breaks, so what it returns would not be what is stored and shown.
    if not url.isprintable() or " " in url:
        raise AddressError("the URL must not contain spaces, line breaks or other invisible characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise AddressError(f"not a URL: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise AddressError("the URL must begin with http:// or https://")
    if "@" in parts.netloc:
        raise AddressError("the URL must not contain a user name")
    if not parts.hostname:
        raise AddressError("the URL has no host")
    if port is None:
        port = 443 if parts.scheme == "https" else 80
    check_port(port)
    return parts.hostname, port


def check_port(port: int) -> None:
    """Check that a port is not one of another protocol.

    Raises:
        AddressError: it is neither 80, 443 nor above 1023.
    """
    if port < 1024 and port not in _WEB_PORTS:
        raise AddressError(f"port {port} is not allowed: use 80, 443 or a port above 1023")


def masked_url(url: str) -> str:
    """A receiver's URL without path and query, which are the secret of most chat webhooks.

    >>> masked_url("https://hooks.example:8443/T00/B00/XXXX?key=1")
    'https://hooks.example:8443/…'
    """
    scheme, separator, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.partition('?')[0]}" + ("/…" if path or "?" in host else slash)


def check_address(host: str, address: IPv4Address | IPv6Address, private: AllowList) -> None:
    """Check one resolved address.

    Args:
        host: the name that leads to it.
        address: an IPv6 address that embeds an IPv4 address (mapped, 6to4, NAT64, Teredo) is checked as that address.
        private: loopback and private addresses that are allowed. Link-local, multicast, unspecified and reserved ones
            are always refused.

    Raises:
        AddressError: webhooks must not go there.
    """
    inner = _effective(address)
    if (
        inner in METADATA
        or inner.is_link_local
        or inner.is_multicast
        or inner.is_unspecified
        or (inner.is_reserved and not inner.is_loopback)
    ):
        raise AddressError(f"webhooks must never go to {address}")
    if not inner.is_global and not private.allows(host, inner):
        raise AddressError(
            f"{address} is a private address; to allow it, add it or its name to RANKWATCH_NOTIFY_ALLOW of the roles "
            "api and notify"
        )


async def resolved(host: str, port: int, private: AllowList) -> list[str]:
    """Resolve a name and check every address.

    Returns:
        One to `ADDRESSES_MAX` addresses to connect to, in order of preference.

    Raises:
        AddressError: any address is refused, even if others are allowed: such a name is not trusted.
        OSError: the name cannot be resolved.
    """
    answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
    for address in addresses:
        check_address(host, ip_address(address), private)
    return addresses[:ADDRESSES_MAX]


def _effective(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address that an IPv6 address leads to, if it embeds one; else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    teredo = address.teredo
    return address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None) or address
