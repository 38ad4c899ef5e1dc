"""What incidents need to know about where ranks run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Placement(Protocol):
    """Switches, hosts and devices of the ranks of the running attempt. Unknown ranks are left out."""

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

    def pids_of(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        """Process ids of these ranks by host, as the processes see them, in the order of the ranks."""
        ...

    def ranks_of(self, host: str) -> list[int]:
        """Ranks that run on a host, ascending."""
        ...

    def switch_of(self, hosts: Iterable[str]) -> str:
        """The switch of these hosts; empty unless all have the same and it is known."""
        ...

    def ranks_below(self, switch: str) -> list[int]:
        """Ranks on the hosts of a switch, ascending."""
        ...
