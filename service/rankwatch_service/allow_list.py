"""Lists of hosts in settings: names, addresses and networks, with commas between them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import Final

_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


@dataclass(frozen=True, slots=True)
class AllowList:
    """Hosts that a setting allows."""

    names: frozenset[str]
    """In small letters."""
    networks: tuple[IPv4Network | IPv6Network, ...]

    def allows(self, name: str, address: IPv4Address | IPv6Address) -> bool:
        """Whether a host is in the list, by the name it was asked for under or by its address."""
        return name.lower() in self.names or any(address in network for network in self.networks)


EVERY_ADDRESS: Final = AllowList(frozenset(), (IPv4Network("0.0.0.0/0"), IPv6Network("::/0")))


def allow_list(text: str) -> AllowList:
    """Read a list such as `alertmanager.internal, 10.1.0.0/16, ::1`.

    Raises:
        ValueError: an entry is neither a host name, an address nor a network.
    """
    names: set[str] = set()
    networks: list[IPv4Network | IPv6Network] = []
    for entry in filter(None, map(str.strip, text.split(","))):
        try:
            networks.append(ip_network(entry))
        except ValueError as error:
            if "/" in entry or not _NAME.fullmatch(entry) or entry.replace(".", "").isdigit():
                raise ValueError(f"{entry!r} is neither a host name, an address nor a network: {error}") from error
            names.add(entry.lower())
    return AllowList(frozenset(names), tuple(networks))
