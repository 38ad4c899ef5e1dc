"""Reports devices that the hardware throttles, because of heat or its power supply.

Agents tell once a minute which of their devices are throttled, and when it is over. It is information from the first
whole minute on, so that a slow rank has its cause, and a warning once it was so in six of ten minutes, whether or not
training has felt it yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import AttemptStart, Finding, Frame, Kind, Occurrence, Presence, Severity
from rankwatch_detectors.devices.places import DevicePlaces
from rankwatch_detectors.dispatch import ATTEMPT_ENDED, DispatchingDetector
from rankwatch_detectors.scope import IncidentScope

MINUTE_S: Final = 60.0
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


class DeviceDegradedDetector(DispatchingDetector):
    """Episodes by device: scope "rank:N" of the rank that runs on it, "host:NAME" where that is not known.

    Memory: linear in throttled devices.
    """

    kind: Kind = Kind.DEVICE_DEGRADED
    STATE: ClassVar[tuple[str, ...]] = (*DispatchingDetector.STATE, "_places", "_step", "_told_s")

    def __init__(self, config: DeviceDegradedConfig) -> None:
        super().__init__()
        self.name = "device_degraded"
        self.version = 1
        self._config = config
        self._places = DevicePlaces()
        self._step = -1
        self._told_s: dict[str, dict[str, float]] = {}
        """By text of the scope of each open episode, its throttled devices and when the agent last told of each."""

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
        findings = self._tell(scope, minutes, occurrence)
        if scope in self.episodes:
            self._told_s.setdefault(str(scope), {})[device] = self.now_s
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

    def _tell(self, scope: IncidentScope, minutes: int, occurrence: Occurrence) -> list[Finding]:
        severity = Severity.WARNING if minutes >= self._config.often else Severity.INFO
        evidence = {name: value for name, value in occurrence.fields.items() if value not in (None, "", -1)}
        step = self._step if self._step >= 0 else None
        told: dict[str, Any] = {
            "severity": severity,
            "detected_step": step,
            "detected_time_s": self.now_s,
            "summary": _sentence(scope, minutes, occurrence.host, evidence),
            "evidence": {**evidence, "host": occurrence.host},
        }
        if scope not in self.episodes:
            return self.episodes.open(
                scope,
                attempt=self.attempt,
                ranks=() if scope.host is not None else (scope.number,),
                onset_step=None,  # it began minutes ago
                onset_time_s=self.now_s - MINUTE_S * min(minutes, MINUTES_MAX),
                score=float(minutes),
                confidence=1.0,
                cause="device",
                **told,
            )
        if self.episodes.told(scope)["severity"] == Severity.INFO and severity is Severity.WARNING:
            return self.episodes.update(scope, **told)
        self.episodes.note(scope, told["evidence"])
        return []


def _sentence(scope: IncidentScope, minutes: int, host: str, evidence: Mapping[str, Any]) -> str:
    name = evidence.get("device_uuid") or evidence.get("pci_bus_id") or "a device"
    where = f"host {host}" if scope.host is not None else f"rank {scope.number} on {host}"
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
