"""Reverse proxies whose word about the address of a client counts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from starlette.datastructures import Headers

from rankwatch_service.allow_list import allow_list

Address = IPv4Address | IPv6Address
_FOR: Final = re.compile(r'(?:^|;)\s*for\s*=\s*"?([^";]*)"?', re.IGNORECASE)


class TrustedProxies:
    """The proxies of the setting `trusted_proxies`; none by default, so that nobody's word counts."""

    def __init__(self, listed: str = "") -> None:
        """Parse the setting.

        Args:
            listed: addresses and networks, with commas.

        Raises:
            ValueError: the list is malformed.
        """
        self._networks = allow_list(listed).networks

    def __contains__(self, address: str) -> bool:
        found = _address(address)
        return found is not None and any(found in network for network in self._networks)

    def client_of(self, peer: str, headers: Headers) -> str:
        """The address that a request comes from.

        It is the peer of the connection, unless that is a trusted proxy. A proxy adds the address of its own peer to
        the right of X-Forwarded-For (else to Forwarded), so what stands left of the first that is no trusted proxy may
        be invented.
        """
        client = peer
        if peer not in self:
            return client
        for named in _named(headers):
            found = _address(named)
            if found is None:
                break
            client = str(found)
            if client not in self:
                break
        return client


def _named(headers: Headers) -> Iterator[str]:
    """The addresses that proxies have added, from right to left."""
    added = headers.getlist("x-forwarded-for")
    if added:
        yield from (one.strip() for one in reversed(",".join(added).split(",")))
        return
    for one in reversed(",".join(headers.getlist("forwarded")).split(",")):
        found = _FOR.search(one)
        yield found.group(1) if found else ""


def _address(text: str) -> Address | None:
    """An address as proxies write it, perhaps with a port; None if it is none."""
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::\d+)?", text)
    bare = bracketed.group(1) if bracketed else text.partition(":")[0] if text.count(":") == 1 else text
    try:
        found = ip_address(bare)
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found
