"""Reports hosts that cannot give training what they gave it before: their processors are taken away or limited, or
their memory is not enough. What is judged, and from when on, stands in `host_rules`. What the provider of a machine
announces (an event `host_notice`) is a warning as long as it stands: there is time to save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from rankwatch_detectors.base import Finding, Kind, Occurrence, Severity
from rankwatch_detectors.devices.counter_detector import CounterDetector
from rankwatch_detectors.devices.held_rules import DeviceProblem
from rankwatch_detectors.devices.host_rules import HostRules, HostRulesConfig
from rankwatch_detectors.scope import IncidentScope

NOTICE: Final = "host_notice"
WHAT: Final = {"preemption": "is about to take away", "maintenance": "will maintain"}
"""By what a notice is about: the words for it."""


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
        super().__init__(Kind.HOST_DEGRADED, 3, HostRules(config.counters))

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        same_launch = occurrence.attempt.rpartition(".")[0] == self.attempt.rpartition(".")[0]
        if occurrence.kind != NOTICE or not same_launch or not self._places.has(occurrence.host):
            return ()
        fields = {name: text for name, text in occurrence.fields.items() if isinstance(text, str) and text}
        scope = IncidentScope.of_host(occurrence.host)
        if fields.get("what") not in WHAT:
            return self._over(scope, {NOTICE}, "The provider has withdrawn its notice.")
        summary = f"The provider {WHAT[fields['what']]} host {occurrence.host}{_when(fields)}."
        evidence = {"host": occurrence.host, "rule": NOTICE, **fields}
        return self._tell(scope, NOTICE, Severity.WARNING, summary, evidence, self.now_s)

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


def _when(fields: Mapping[str, str]) -> str:
    action = f" ({fields['action']})" if "action" in fields else ""
    return f"{action}, not before {fields['at']}" if "at" in fields else action
