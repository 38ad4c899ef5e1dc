"""The hosts and switches of a job as units that are judged: which ranks are theirs, and what value they have.

The value of a host is the lower quartile of its ranks', that of a switch the lower quartile of its hosts'. So a host is
slow as a whole only if no more than a quarter of its ranks are as fast as ever: 7 of 8 ranks are slow, or all of 4.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rankwatch_detectors.base import Bools, Floats, Ints, Topology
from rankwatch_detectors.scope import IncidentScope
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.group_quartiles import GroupQuartiles
from rankwatch_detectors.statistics.peers import GROUP_MIN, PeerGroups, everyone

_NOBODY = np.zeros(0, dtype=np.int64)


class PlaceUnits(Stateful):
    """Hosts, then switches, each in the order of their names. Memory: 17 bytes for each rank, 16 for each host."""

    STATE: ClassVar[tuple[str, ...]] = ("texts", "judged", "_of_hosts", "_of_switches", "_compared")

    def __init__(self) -> None:
        self.texts: list[str] = []
        """The scope of each unit, as text."""
        self.judged: Bools = np.zeros(0, dtype=np.bool_)
        """Hosts of several ranks and switches of several hosts; none of a kind of which there are fewer than three."""
        self._of_hosts = GroupQuartiles(_NOBODY, 0)
        """Ranks by host."""
        self._of_switches = GroupQuartiles(_NOBODY, 1)
        """Hosts by switch; the last group are those whose switch is not known."""
        self._compared: Bools = np.zeros(0, dtype=np.bool_)
        """Ranks whose peers are on three hosts or more, and for the most part not on their own."""

    @classmethod
    def of(cls, topology: Topology) -> PlaceUnits:
        """The hosts and switches of these ranks."""
        units, hosts = cls(), sorted(set(topology.host))
        switch_of = dict(zip(topology.host, topology.switch, strict=True)) if topology.switch else {}
        switches = sorted(set(switch_of.values()) - {""})
        host_number = {host: index for index, host in enumerate(hosts)}
        switch_number = {switch: index for index, switch in enumerate(switches)}
        host_of = np.asarray([host_number[host] for host in topology.host], dtype=np.int64)
        below = [switch_number.get(switch_of.get(host, ""), len(switches)) for host in hosts]
        units._of_hosts = GroupQuartiles(host_of, len(hosts))
        units._of_switches = GroupQuartiles(np.asarray(below, dtype=np.int64), len(switches) + 1)
        units._compared = _compared(topology.peer_group, host_of)
        units.texts = [str(IncidentScope.of_host(host)) for host in hosts]
        units.texts += [str(IncidentScope.of_switch(switch)) for switch in switches]
        units.judged = units._judged(np.asarray([bool(host) for host in hosts], dtype=np.bool_))
        return units

    def _judged(self, named: Bools) -> Bools:
        ranks, below = self._of_hosts.sizes, self._of_switches.sizes[:-1]
        known = named & (2 * self._of_hosts.counts(self._compared) > ranks)
        known_below = self._of_switches.counts(known)[:-1]
        # A switch with half of the hosts is what the others are compared with.
        of_switches = (known_below > 1) & (2 * known_below > below) & (2 * below < ranks.size)
        return np.concatenate([_enough(known & (ranks > 1)), _enough(of_switches)])

    @property
    def count(self) -> int:
        """How many units there are."""
        return len(self.texts)

    @property
    def hosts(self) -> int:
        """How many of them are hosts: the first ones."""
        return int(self._of_hosts.sizes.size)

    def same_as(self, other: PlaceUnits) -> bool:
        """Whether these are the same units of the same ranks."""
        return self.texts == other.texts and all(
            np.array_equal(mine, theirs)
            for mine, theirs in (
                (self._of_hosts.group, other._of_hosts.group),
                (self._of_switches.group, other._of_switches.group),
                (self._compared, other._compared),
            )
        )

    def values(self, of_ranks: Floats, usable: Bools) -> Floats:
        """The value of each unit; NaN if it is not judged, or not more than half of its parts have a value.

        Args:
            of_ranks: the value of each rank.
            usable: ranks that have one.
        """
        values = self._of_hosts.of(of_ranks, usable & self._compared)
        if self.count > self.hosts:
            values = np.concatenate([values, self._of_switches.of(values, np.isfinite(values))[:-1]])
        return values if everyone(self.judged) else np.where(self.judged, values, np.nan)

    def whole(self, ranks: Bools) -> Bools:
        """Units of which no more than a quarter is not among these ranks."""
        return self.with_switches(self._of_hosts.whole(ranks | ~self._compared))

    def with_switches(self, hosts: Bools) -> Bools:
        """These hosts, and the switches of which no more than a quarter is not among them."""
        return np.concatenate([hosts, self._of_switches.whole(hosts)[:-1]])

    def ranks_within(self, units: Bools) -> Bools:
        """Ranks whose host is among these units, and whose switch is too if it is known."""
        switches = np.append(units[self.hosts :], True)
        hosts = units[: self.hosts] & switches[self._of_switches.group]
        within: Bools = hosts[self._of_hosts.group]
        return within

    def host_of(self, rank: int) -> int:
        """The host of a rank."""
        return int(self._of_hosts.group[rank])

    def switch_of(self, unit: int) -> int | None:
        """The switch of a host, if it is known; of a switch None."""
        switch = self.hosts + int(self._of_switches.group[unit]) if unit < self.hosts else self.count
        return switch if switch < self.count else None

    def hosts_of(self, unit: int) -> Ints:
        """The host itself, or the hosts of the switch."""
        return np.asarray([unit]) if unit < self.hosts else np.flatnonzero(self._of_switches.group == unit - self.hosts)

    def ranks_of(self, unit: int) -> list[int]:
        """The ranks of a unit, ascending."""
        return [int(rank) for rank in np.flatnonzero(np.isin(self._of_hosts.group, self.hosts_of(unit)))]


def _enough(judged: Bools) -> Bools:
    return judged & (np.count_nonzero(judged) >= GROUP_MIN)


def _compared(peer_group: Ints, host_of: Ints) -> Bools:
    groups = PeerGroups()
    groups.regroup(peer_group)
    hosts = int(host_of.max(initial=0)) + 1
    pairs, pair_of, together = np.unique(groups.number * hosts + host_of, return_inverse=True, return_counts=True)
    hosts_of_group = np.bincount(pairs // hosts, minlength=groups.count)
    sizes = np.bincount(groups.number, minlength=groups.count)
    here = together[np.asarray(pair_of).reshape(-1)]
    compared: Bools = (hosts_of_group >= GROUP_MIN)[groups.number] & (2 * here < sizes[groups.number])
    return compared
