"""The names that requests may ask for in `Host`.

A page of another site may let its own name lead to this service (DNS rebinding); a browser then takes both for one
site. Such a request asks for that name, and is refused. An address in `Host` cannot be a name of somebody else's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from rankwatch_service.allow_list import allow_list
from rankwatch_service.settings import Settings

_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9_.-]{1,253}))(?::[0-9]{1,5})?")


def own_names(settings: Settings, machine: str) -> frozenset[str]:
    """All names by which the service may be asked for, in small letters.

    Args:
        settings: of the service.
        machine: the name of the machine it runs on, in full or its first label.
    """
    public = urlsplit(settings.public_url).hostname or ""
    names = {"localhost", settings.host, public, machine, machine.partition(".")[0]} - {""}
    return frozenset(map(str.lower, names)) | allow_list(settings.allowed_hosts).names


def asked_host(values: Sequence[str]) -> str:
    """The host that a request asks for, without its port and in small letters.

    Args:
        values: of all its `Host` headers.

    Raises:
        ValueError: there is none, more than one, or it is malformed.
    """
    found = _HOST.fullmatch(values[0]) if len(values) == 1 else None
    if found is None:
        raise ValueError("a request needs exactly one Host header, with a name or an address")
    return (found[1] or found[2]).lower().removesuffix(".")


def is_address(host: str) -> bool:
    """Whether this is an IPv4 or IPv6 address."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
