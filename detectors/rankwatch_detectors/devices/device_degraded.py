"""Reports devices that the hardware throttles, because of heat or its power supply, and those whose counters say that
they do less than they can, or than their peers.

Agents tell once a minute which of their devices are throttled, and when it is over. It is information from the first
whole minute on, so that a slow rank has its cause, and a warning once it was so in six of ten minutes, whether or not
training has felt it yet. Counters are judged by `counter_rules`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import (
    AttemptStart,
    DeviceCounters,
    Finding,
    Frame,
    Kind,
    Occurrence,
    Presence,
    Severity,
)
from rankwatch_detectors.devices.counter_rules import CounterRules, CounterRulesConfig, DeviceProblem
from rankwatch_detectors.devices.places import DevicePlaces
from rankwatch_detectors.dispatch import ATTEMPT_ENDED, DispatchingDetector
from rankwatch_detectors.scope import IncidentScope

WELL: Final = "The device does as it should again."
MINUTE_S: Final = 60.0
RECOVERY: Final = {1: "reset the GPU", 2: "restart the host", 3: "drain P2P", 4: "drain and reset"}
"""NVML's recovery actions."""
MINUTES_MAX: Final = 10
"""Minutes that an agent looks back on."""


@dataclass(frozen=True, slots=True)
class DeviceDegradedConfig:
    """Settings of the device_degraded detector; which minutes count is up to the agent (`devices/throttling.py`)."""

    often: int = 6
    """Minutes of the last ten from which on it is a warning: gpud's figure."""
    silent_s: float = 180.0
    """An agent that has told nothing of a throttled device for so long tells it no more."""
    devices_max: int = 64
    """Devices of one host that are told apart where it is not known which ranks compute on them."""
    slot_s: float = 5.0
    """Length of a slot of counters."""
    counters: CounterRulesConfig = field(default_factory=CounterRulesConfig)


class DeviceDegradedDetector(DispatchingDetector):
    """Episodes by device: scope "rank:N" of the rank that runs on it, "host:NAME" where that is not known.

    Memory: linear in throttled devices.
    """

    kind: Kind = Kind.DEVICE_DEGRADED
    STATE: ClassVar[tuple[str, ...]] = (*DispatchingDetector.STATE, "_places", "_step", "_told_s", "_rules")

    def __init__(self, config: DeviceDegradedConfig) -> None:
        super().__init__()
        self.name = "device_degraded"
        self.version = 2
        self._config = config
        self._places = DevicePlaces()
        self._step = -1
        self._told_s: dict[str, dict[str, float]] = {}
        """By text of the scope of each open episode: devices, or a device and a rule, and when it was last told."""
        self._rules = CounterRules(config.counters)

    def _begin(self, start: AttemptStart) -> list[Finding]:
        findings: list[Finding] = []
        if start.launch != self.attempt.rpartition(".")[0]:
            findings = self.episodes.close_all(self.now_s, ATTEMPT_ENDED)
            self._told_s, self._step = {}, -1
        self.attempt, self.world_size = start.attempt, start.topology.world_size
        self._places.learn(start.topology)
        return findings

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        self._step = max(self._step, frame.step)
        return ()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        same_launch = occurrence.attempt.rpartition(".")[0] == self.attempt.rpartition(".")[0]
        scope = self._places.scope_of(occurrence) if occurrence.kind == "device_throttled" and same_launch else None
        if scope is None:
            return ()
        fields, told_s = occurrence.fields, self._told_s.get(str(scope), {})
        device = str(fields.get("device_uuid") or fields.get("pci_bus_id") or fields.get("index"))
        minutes = fields.get("minutes")
        if not isinstance(minutes, int) or minutes <= 0:
            told_s.pop(device, None)
            return () if told_s else self._close(scope, "The hardware does not slow the device down any more.")
        if device not in told_s and len(told_s) >= self._config.devices_max:
            return ()
        evidence = {name: value for name, value in occurrence.fields.items() if value not in (None, "", -1)}
        severity = Severity.WARNING if minutes >= self._config.often else Severity.INFO
        summary = _throttled(scope, minutes, occurrence.host, evidence)
        since_s = self.now_s - MINUTE_S * min(minutes, MINUTES_MAX)
        return self._tell(scope, device, severity, summary, {**evidence, "host": occurrence.host}, since_s)

    def _on_counters(self, counters: DeviceCounters) -> Sequence[Finding]:
        findings: list[Finding] = []
        for trouble in self._rules.see(counters) if self.attempt else ():
            host, uuid = counters.devices[trouble.number]
            scope = self._places.scope_at(host, uuid)
            if scope is None:
                continue
            told_s, key = self._told_s.get(str(scope), {}), f"{uuid or trouble.number} {trouble.what}"
            if trouble.slots == 0:
                if told_s.pop(key, None) is not None and not told_s:
                    findings += self._close(scope, WELL)
            elif key in told_s or len(told_s) < self._config.devices_max:
                summary = _told(scope, trouble, host, uuid)
                evidence = {"device_uuid": uuid, "host": host, "rule": trouble.what, **(trouble.evidence or {})}
                since_s = self.now_s - self._config.slot_s * trouble.slots
                findings += self._tell(scope, key, trouble.severity, summary, evidence, since_s)
        return findings

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:  # noqa: ARG002
        since_s = self.now_s - self._config.silent_s
        silent = [text for text, told_s in self._told_s.items() if all(last_s <= since_s for last_s in told_s.values())]
        why = f"Its agent has told nothing more of it for {self._config.silent_s:.0f} s."
        return [finding for text in silent for finding in self._close(IncidentScope.parse(text), why)]

    def _close(self, scope: IncidentScope, why: str) -> list[Finding]:
        if scope not in self.episodes:
            return []
        self._told_s.pop(str(scope), None)
        return self.episodes.close(scope, self._step if self._step >= 0 else None, self.now_s, why)

    def _tell(
        self,
        scope: IncidentScope,
        key: str,
        severity: Severity,
        summary: str,
        evidence: Mapping[str, Any],
        since_s: float,
    ) -> list[Finding]:
        """Tell of a device: as a new episode, as an update where it is graver than what was told, or as evidence."""
        told: dict[str, Any] = {
            "severity": severity,
            "detected_step": self._step if self._step >= 0 else None,
            "detected_time_s": self.now_s,
            "summary": summary,
            "evidence": evidence,
        }
        findings: list[Finding] = []
        if scope not in self.episodes:
            findings = self.episodes.open(
                scope,
                attempt=self.attempt,
                ranks=() if scope.host is not None else (scope.number,),
                onset_step=None,  # it began before it was told
                onset_time_s=since_s,
                score=(self.now_s - since_s) / MINUTE_S,
                confidence=1.0,
                cause="device",
                **told,
            )
            if not findings:
                return []
        elif self.episodes.told(scope)["severity"] == Severity.INFO and severity is Severity.WARNING:
            findings = self.episodes.update(scope, **told)
        else:
            self.episodes.note(scope, {**self.episodes.told(scope)["evidence"], **evidence})
        self._told_s.setdefault(str(scope), {})[key] = self.now_s
        return findings


def _throttled(scope: IncidentScope, minutes: int, host: str, evidence: Mapping[str, Any]) -> str:
    name = evidence.get("device_uuid") or evidence.get("pci_bus_id") or "a device"
    where = _where(scope, host)
    reasons = evidence.get("reasons")
    why = f" ({', '.join(map(str, reasons))})" if isinstance(reasons, list | tuple) and reasons else ""
    figures = []
    if isinstance(celsius := evidence.get("temperature_celsius"), int | float):
        figures.append(f"{celsius:.0f} °C")
    if isinstance(hertz := evidence.get("sm_clock_hz"), int | float):
        figures.append(f"{hertz / 1e6:,.0f} MHz")
    now = f"; now {', '.join(figures)}" if figures else ""
    lasted = "1 of the last ten minutes" if minutes == 1 else f"{minutes} of the last ten minutes"
    return f"The hardware slows {name} of {where} down{why}, in {lasted}{now}."


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
        case "margin":
            return f"{name} is at the temperature at which the hardware slows it down."
        case "remap":
            return f"{name} could not replace bad rows of its memory by spare ones."
        case "pending":
            return f"{name} has bad rows of memory that are replaced at its next reset."
        case "ecc":
            return f"{name} counts {figure['ecc_uncorrected']:.0f} errors of its memory that could not be corrected."
        case "nvlink":
            return f"NVLinks of {name} had {figure['new_errors']:.0f} new replays or recoveries."
    action = RECOVERY.get(round(figure["recovery_action"]), "another recovery action")
    return f"The driver recommends for {name}: {action}."


def _where(scope: IncidentScope, host: str) -> str:
    return f"host {host}" if scope.host is not None else f"rank {scope.number} on {host}"
