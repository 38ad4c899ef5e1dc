"""Reports hosts whose network ports are down, flap, lost speed or count errors, and what is slow in a matrix of delays.

Ports are judged by `port_rules`. A matrix of delays between hosts (`delay_matrix`) comes as an event, from a job or a
probe that measures one; each one replaces the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar, Final

from rankwatch_detectors.base import Finding, Kind, Occurrence, Severity
from rankwatch_detectors.devices.counter_detector import CounterDetector
from rankwatch_detectors.devices.delay_matrix import SlowPath, slow_paths
from rankwatch_detectors.devices.held_rules import DeviceProblem
from rankwatch_detectors.devices.port_rules import PortRules, PortRulesConfig
from rankwatch_detectors.scope import IncidentScope

MATRIX: Final = "delay_matrix"


@dataclass(frozen=True, slots=True)
class NetworkDegradedConfig:
    """Settings of the network_degraded detector."""

    counters: PortRulesConfig = field(default_factory=PortRulesConfig)


class NetworkDegradedDetector(CounterDetector):
    """Episodes by host: that of the port, or the sender of a slow link."""

    DEVICES: ClassVar[str] = "port"
    CAUSE: ClassVar[str] = "network"
    NAMED: ClassVar[str] = "port"
    WELL: ClassVar[str] = "The host's network does as it should again."

    def __init__(self, config: NetworkDegradedConfig) -> None:
        super().__init__(Kind.NETWORK_DEGRADED, 3, PortRules(config.counters))

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.kind != MATRIX or occurrence.attempt != self.attempt:
            return ()
        slow = {path.host: path for path in slow_paths(occurrence.fields) if self._places.has(path.host)}
        findings = list[Finding]()
        for host, path in slow.items():
            evidence = {"host": host, "rule": MATRIX, **asdict(path)}
            scope = IncidentScope.of_host(host)
            findings += self._tell(scope, MATRIX, Severity.WARNING, _slow(path), evidence, self.now_s)
        for text in [text for text, troubles in self._troubles.items() if MATRIX in troubles]:
            if IncidentScope.parse(text).host not in slow:
                findings += self._over(IncidentScope.parse(text), {MATRIX}, self.WELL)
        return findings

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


def _slow(path: SlowPath) -> str:
    where = {"sender": "sends", "receiver": "receives", "both": "sends and receives"}
    what = f"{where[path.part]} slowly" if path.part in where else f"has a slow {path.part}"
    return f"Host {path.host} {what}: {1e3 * path.delay_s:.3g} ms, where {1e3 * path.usual_s:.3g} ms are usual."
