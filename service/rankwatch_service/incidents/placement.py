"""What incidents need to know about where ranks run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Placement(Protocol):
    """Hosts and devices of the ranks of the running attempt. Unknown ranks are left out."""

    @property
    def world_size(self) -> int:
        """Ranks of the attempt."""
        ...

    def hosts_of(self, ranks: Iterable[int]) -> list[str]:
        """Hosts of these ranks, each once, in their order."""
        ...

    def devices_of(self, ranks: Iterable[int]) -> list[str]:
        """Device UUIDs of these ranks, each once, in their order."""
        ...

    def ranks_of(self, host: str) -> list[int]:
        """Ranks that run on a host, ascending."""
        ...
