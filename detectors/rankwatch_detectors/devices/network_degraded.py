"""Reports hosts whose network ports are down, flap, lost speed or count errors, as `port_rules` judges them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from rankwatch_detectors.base import Kind
from rankwatch_detectors.devices.counter_detector import CounterDetector
from rankwatch_detectors.devices.held_rules import DeviceProblem
from rankwatch_detectors.devices.port_rules import PortRules, PortRulesConfig
from rankwatch_detectors.scope import IncidentScope


@dataclass(frozen=True, slots=True)
class NetworkDegradedConfig:
    """Settings of the network_degraded detector."""

    counters: PortRulesConfig = field(default_factory=PortRulesConfig)


class NetworkDegradedDetector(CounterDetector):
    """Episodes by host: that of the port."""

    DEVICES: ClassVar[str] = "port"
    CAUSE: ClassVar[str] = "network"
    NAMED: ClassVar[str] = "port"
    WELL: ClassVar[str] = "The host's network does as it should again."

    def __init__(self, config: NetworkDegradedConfig) -> None:
        super().__init__(Kind.NETWORK_DEGRADED, 3, PortRules(config.counters))

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
