"""Reports hosts that cannot give training what they gave it before: their processors are taken away or limited, or
their memory is not enough. What is judged, and from when on, stands in `host_rules`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from rankwatch_detectors.base import Kind
from rankwatch_detectors.devices.counter_detector import CounterDetector
from rankwatch_detectors.devices.held_rules import DeviceProblem
from rankwatch_detectors.devices.host_rules import HostRules, HostRulesConfig
from rankwatch_detectors.scope import IncidentScope


@dataclass(frozen=True, slots=True)
class HostDegradedConfig:
    """Settings of the host_degraded detector."""

    counters: HostRulesConfig = field(default_factory=HostRulesConfig)


class HostDegradedDetector(CounterDetector):
    """Episodes by host."""

    DEVICES: ClassVar[str] = "host"
    CAUSE: ClassVar[str] = "host"
    NAMED: ClassVar[str] = "device"
    WELL: ClassVar[str] = "The host does as it should again."

    def __init__(self, config: HostDegradedConfig) -> None:
        super().__init__(Kind.HOST_DEGRADED, 1, HostRules(config.counters))

    def _sentence(self, scope: IncidentScope, problem: DeviceProblem, host: str, device: str) -> str:  # noqa: ARG002
        figure = dict(problem.evidence or {})

        def share(name: str) -> str:
            return f"{100 * figure[name]:.0f} % of the time, where {100 * figure[f'usual_{name}']:.0f} % are usual"

        match problem.what:
            case "throttled":
                return (
                    f"Host {host}: the container's limit of processor time is reached {share('cpu_throttled_ratio')}."
                )
            case "steal":
                return f"Host {host}: the hypervisor gives its processors to others {share('cpu_steal_ratio')}."
            case "memory":
                return f"Host {host}: all tasks wait for memory {share('memory_pressure_ratio')}."
        new = figure["new_errors"]
        return f"Host {host}: the kernel killed {new:.0f} process{'es' * (new > 1)} for want of memory."
