"""Reports hosts whose network ports are down, flap, lost speed or count errors, judged by their own past and by other
hosts' ports.

A single flap is tolerated: links recover by themselves in seconds. The second within five minutes is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import DeviceCounters, Kind
from rankwatch_detectors.devices.counter_detector import CounterDetector, DeviceProblem, HeldRules, column, grown
from rankwatch_detectors.scope import IncidentScope


@dataclass(frozen=True, slots=True)
class PortRulesConfig:
    """Settings of the rules; a slot is 5 s."""

    dropped_slots: int = 48
    """A link that is down for so long is a warning: 4 minutes, gpud's figure for a dropped one."""
    flaps: int = 2
    """Times that a link went down, after which that is a warning, unless `flap_slots` lay between two of them."""
    flap_slots: int = 60
    """Five minutes, as ByteRobust waits for a second alert before it acts."""
    rate_slots: int = 2
    """Slots in a row at a lower speed before it is reported."""
    warning_slots: int = 60
    """Slots of it after which it is a warning."""
    errors_reported: int = 3
    """Readings with new errors from which on they are reported: links are allowed a few errors in an hour."""
    errors_warning: int = 12
    errors_quiet_slots: int = 30
    """Slots without new errors after which these are over."""
    retransmissions_per_s: float = 10.0
    retransmissions_of_peers: float = 10.0
    """Retransmissions are reported where they exceed both this rate per second and this multiple of the other ports'
    median."""
    retransmissions_slots: int = 12
    """Slots in a row before they are reported. They are never a warning: they show in collectives if they matter."""
    peers_min: int = 4
    """Ports without which retransmissions are not compared."""


class PortRules(HeldRules):
    """Judges a job's network ports slot by slot. Memory: linear in ports."""

    STATE: ClassVar[str] = "_fastest _was_up"

    def __init__(self, config: PortRulesConfig) -> None:
        super().__init__()
        self._config = config

    def begin_launch(self) -> None:
        """A job is about the ports that are up while it runs: one without a cable may be down for years."""
        super().begin_launch()
        self._was_up: Any = None
        self._fastest: Any = None
        """The highest speed that each port was seen with."""

    def _rules(self, counters: DeviceCounters) -> Iterator[DeviceProblem]:
        config, size = self._config, len(counters.devices)
        up, reported = column(counters, "link_up", size)
        well = reported & (up > 0)
        self._was_up = was_up = grown(self._was_up, size)
        was_up[well] = 1
        down = reported & (up == 0) & (was_up > 0)
        yield from self._evaluate("down", down, well, 1, {}, config.dropped_slots)
        yield from self._rising(
            "flap",
            ("link_downs",),
            config.flaps,
            counters,
            quiet_slots=config.flap_slots,
            reported=config.flaps,
            each=True,
        )
        yield from self._rising(
            "errors",
            ("port_errors",),
            config.errors_warning,
            counters,
            quiet_slots=config.errors_quiet_slots,
            reported=config.errors_reported,
        )
        speed, reported = column(counters, "link_bits_per_s", size)
        reported &= well
        self._fastest = fastest = grown(self._fastest, size)
        fastest[reported] = np.maximum(fastest, speed)[reported]
        slow = reported & (speed < fastest)
        figures = {"link_bits_per_s": speed, "usual_link_bits_per_s": fastest}
        yield from self._evaluate("speed", slow, reported & ~slow, config.rate_slots, figures, config.warning_slots)
        yield from self._retransmits(counters)

    def _retransmits(self, counters: DeviceCounters) -> Iterator[DeviceProblem]:
        config, size = self._config, len(counters.devices)
        value, reported = column(counters, "retransmissions_per_s", size)
        if np.count_nonzero(reported) < config.peers_min:
            return
        usual = float(np.median(value[reported]))
        many = reported & (value > max(config.retransmissions_per_s, config.retransmissions_of_peers * usual))
        figures = {"retransmissions_per_s": value, "peers_retransmissions_per_s": np.full(size, usual)}
        yield from self._evaluate(
            "retransmissions", many, reported & ~many, config.retransmissions_slots, figures, np.inf
        )


@dataclass(frozen=True, slots=True)
class NetworkDegradedConfig:
    """Settings of the network_degraded detector."""

    counters: PortRulesConfig = field(default_factory=PortRulesConfig)


class NetworkDegradedDetector(CounterDetector):
    """Episodes by host: that of the port."""

    DEVICES: ClassVar[str] = "port"
    CAUSE: ClassVar[str] = "network"
    NAMED: ClassVar[str] = "port"
    WELL: ClassVar[str] = "The port is back to its usual rates."

    def __init__(self, config: NetworkDegradedConfig) -> None:
        super().__init__(Kind.NETWORK_DEGRADED, 4, PortRules(config.counters))

    def _sentence(self, scope: IncidentScope, problem: DeviceProblem, host: str, device: str) -> str:  # noqa: ARG002
        figure, name = dict(problem.evidence or {}), f"Port {device} of host {host}"
        match problem.what:
            case "down":
                return f"{name} is down."
            case "flap":
                return f"{name} went down again within five minutes."
            case "errors":
                return f"{name} counts errors: {figure['new_errors']:.0f} new ones."
            case "speed":
                fast, slow = figure["usual_link_bits_per_s"] / 1e9, figure["link_bits_per_s"] / 1e9
                return f"{name} runs at {slow:g} Gbit/s, where {fast:g} Gbit/s are usual for it."
        many, usual = figure["retransmissions_per_s"], figure["peers_retransmissions_per_s"]
        return f"{name} retransmits {many:,.0f} packets a second, its peers {usual:,.0f}."
