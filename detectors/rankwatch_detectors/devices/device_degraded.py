"""Reports devices that the hardware throttles, because of heat or its power supply, and those whose counters say that
they do less than they can, or than their peers.

Agents tell once a minute which of their devices are throttled, and when it is over. It is information from the first
whole minute on, so that a slow rank has its cause, and a warning once it was so in six of ten minutes, whether or not
training has felt it yet. Counters are judged by `gpu_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import Finding, Kind, Occurrence, Severity
from rankwatch_detectors.devices.counter_detector import CounterDetector
from rankwatch_detectors.devices.gpu_rules import GpuRules, GpuRulesConfig
from rankwatch_detectors.devices.held_rules import MINUTE_S, DeviceProblem
from rankwatch_detectors.scope import IncidentScope

RECOVERY: Final = {1: "reset the GPU", 2: "restart the host", 3: "drain P2P", 4: "drain and reset"}
"""NVML's recovery actions."""
MINUTES_MAX: Final = 10
"""Minutes that an agent looks back on."""


@dataclass(frozen=True, slots=True)
class DeviceDegradedConfig:
    """Settings of the device_degraded detector; which minutes count is up to the agent (`agent/devices.py`)."""

    often: int = 6
    """Minutes of the last ten from which on it is a warning: gpud's figure."""
    counters: GpuRulesConfig = field(default_factory=GpuRulesConfig)


class DeviceDegradedDetector(CounterDetector):
    """Episodes by GPU: scope "rank:N" of the rank that runs on it, "host:NAME" where that is not known."""

    DEVICES: ClassVar[str] = "gpu"
    CAUSE: ClassVar[str] = "device"
    NAMED: ClassVar[str] = "device_uuid"
    WELL: ClassVar[str] = "The device does as it should again."

    def __init__(self, config: DeviceDegradedConfig) -> None:
        super().__init__(Kind.DEVICE_DEGRADED, 6, GpuRules(config.counters))
        self._config = config

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        same_launch = occurrence.attempt.rpartition(".")[0] == self.attempt.rpartition(".")[0]
        scope = self._places.scope_of(occurrence) if occurrence.kind == "device_throttled" and same_launch else None
        if scope is None:
            return ()
        fields = occurrence.fields
        device = str(fields.get("device_uuid") or fields.get("pci_bus_id") or fields.get("index"))
        minutes = fields.get("minutes")
        if not isinstance(minutes, int) or minutes <= 0:
            return self._over(scope, {device}, "The hardware does not slow the device down any more.")
        evidence = {name: value for name, value in occurrence.fields.items() if value not in (None, "", -1)}
        severity = Severity.WARNING if minutes >= self._config.often else Severity.INFO
        summary = _throttled(scope, minutes, occurrence.host, evidence)
        since_s = self.now_s - MINUTE_S * min(minutes, MINUTES_MAX)
        return self._tell(scope, device, severity, summary, {**evidence, "host": occurrence.host}, since_s)

    def _scope_at(self, host: str, device: str) -> IncidentScope | None:
        return self._places.scope_at(host, device)

    def _sentence(self, scope: IncidentScope, problem: DeviceProblem, host: str, device: str) -> str:
        return _told(scope, problem, host, device)


def _throttled(scope: IncidentScope, minutes: int, host: str, evidence: Mapping[str, Any]) -> str:
    name = evidence.get("device_uuid") or evidence.get("pci_bus_id") or "a device"
    where = _where(scope, host)
    reasons = evidence.get("reasons")
    why = f" ({', '.join(map(str, reasons))})" if isinstance(reasons, list | tuple) and reasons else ""
    # Neither temperature nor clock: the evidence has them as of its newest report, and a summary is read later.
    return f"The hardware slows {name} of {where} down{why}, in {minutes} of ten minutes."


def _told(scope: IncidentScope, trouble: DeviceProblem, host: str, uuid: str) -> str:
    figure = dict(trouble.evidence or {})
    name = f"{uuid or 'a device'} of {_where(scope, host)}"
    match trouble.what:
        case "power":
            return (
                f"{name} draws {figure['power_w']:.0f} W under load, where {figure['usual_power_w']:.0f} W are usual "
                f"for it; its peers draw {figure['peers_power_w']:.0f} W."
            )
        case "clock":
            return (
                f"{name} runs at {figure['sm_clock_hz'] / 1e6:,.0f} MHz under load, where "
                f"{figure['usual_sm_clock_hz'] / 1e6:,.0f} MHz are usual for it; its peers run at "
                f"{figure['peers_sm_clock_hz'] / 1e6:,.0f} MHz."
            )
        case "link":
            return (
                f"The PCIe link of {name} has {figure['pcie_width']:.0f} of {figure['pcie_width_max']:.0f} lanes: "
                "copies to and from it are slower."
            )
        case "speed":
            return (
                f"The PCIe link of {name} runs at generation {figure['pcie_generation']:.0f} under load, where it can "
                f"{figure['pcie_generation_max']:.0f}: copies to and from it are slower."
            )
        case "replays":
            return (
                f"The PCIe link of {name} repeats {figure['pcie_replays_per_minute']:,.0f} packets a minute; "
                f"{figure['allowed_per_minute']:.0f} are within its specification."
            )
        case "unequal":
            share = figure["sm_clock_hz"] / figure["sm_clock_max_hz"]
            return (
                f"{name} runs at {figure['sm_clock_hz'] / 1e6:,.0f} MHz under load, {100 * share:.0f} % of its highest "
                f"clock, and has since it was first seen; its peers run at {100 * figure['peers_share']:.0f} %."
            )
        case "margin":
            return f"{name} is at the temperature at which the hardware slows it down."
        case "remap":
            return f"{name} could not replace bad rows of its memory by spare ones."
        case "pending":
            return f"{name} has bad rows of memory that are replaced at its next reset."
        case "ecc":
            return f"{name} counts {figure['ecc_uncorrected']:.0f} errors of its memory that could not be corrected."
        case "links":
            return (
                f"{name} has {figure['nvlinks_active']:.0f} active NVLinks, where "
                f"{figure['usual_nvlinks_active']:.0f} are usual."
            )
        case "nvlink":
            return f"NVLinks of {name} had {figure['new_errors']:.0f} new errors, replays or recoveries."
    action = RECOVERY.get(round(figure["recovery_action"]), "another recovery action")
    return f"The driver recommends for {name}: {action}."


def _where(scope: IncidentScope, host: str) -> str:
    return f"host {host}" if scope.host is not None else f"rank {scope.number} on {host}"
