"""What the detectors of hardware that is degraded share: an episode for each rank's device or each host, in which rules
of counters, and events of agents, tell what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import AttemptStart, DeviceCounters, Finding, Frame, Kind, Presence, Severity
from rankwatch_detectors.devices.held_rules import DeviceProblem, HeldRules
from rankwatch_detectors.devices.places import DevicePlaces
from rankwatch_detectors.dispatch import ATTEMPT_ENDED, DispatchingDetector
from rankwatch_detectors.scope import IncidentScope

MINUTE_S: Final = 60.0
SLOT_S: Final = 5.0
"""Length of a slot of counters."""
SILENT_S: Final = 180.0
"""An agent that has told nothing of something that was wrong for so long tells it no more."""
DEVICES_MAX: Final = 64
"""Problems of one host that are told apart where it is not known which ranks they concern."""


class CounterDetector(DispatchingDetector):
    """Episodes by device. Subclasses give the kind of device, its rules and their sentences.

    Memory: linear in devices with which something is wrong.
    """

    DEVICES: ClassVar[str]
    """gpu, port or host."""
    CAUSE: ClassVar[str]
    NAMED: ClassVar[str]
    """What the evidence calls the device by."""
    WELL: ClassVar[str]
    """Said when it is over."""
    STATE: ClassVar[tuple[str, ...]] = (*DispatchingDetector.STATE, "_places", "_step", "_told_s", "_rules")

    def __init__(self, kind: Kind, version: int, rules: HeldRules) -> None:
        self.kind = kind
        super().__init__()
        self.name = str(kind)
        self.version = version
        self._places = DevicePlaces()
        self._step = -1
        self._told_s: dict[str, dict[str, float]] = {}
        """By text of the scope of each open episode: devices, or a device and a rule, and when it was last told."""
        self._rules = rules

    def _scope_at(self, host: str, device: str) -> IncidentScope | None:  # noqa: ARG002
        """Whom a device's trouble is about; None if the job does not use it."""
        return IncidentScope.of_host(host) if self._places.has(host) else None

    def _sentence(self, scope: IncidentScope, problem: DeviceProblem, host: str, device: str) -> str:
        raise NotImplementedError

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

    def _on_counters(self, counters: DeviceCounters) -> Sequence[Finding]:
        findings: list[Finding] = []
        if not self.attempt or counters.kind != self.DEVICES:
            return findings
        for trouble in self._rules.see(counters):
            host, uuid = counters.devices[trouble.number]
            scope = self._scope_at(host, uuid)
            if scope is None:
                continue
            told_s, key = self._told_s.get(str(scope), {}), f"{uuid or trouble.number} {trouble.what}"
            if trouble.slots == 0:
                if told_s.pop(key, None) is not None and not told_s:
                    findings += self._close(scope, self.WELL)
            elif key in told_s or len(told_s) < DEVICES_MAX:
                summary = self._sentence(scope, trouble, host, uuid)
                evidence = {self.NAMED: uuid, "host": host, "rule": trouble.what, **(trouble.evidence or {})}
                since_s = self.now_s - SLOT_S * trouble.slots
                findings += self._tell(scope, key, trouble.severity, summary, evidence, since_s)
        return findings

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:  # noqa: ARG002
        since_s = self.now_s - SILENT_S
        silent = [text for text, told_s in self._told_s.items() if all(last_s <= since_s for last_s in told_s.values())]
        why = f"Its agent has told nothing more of it for {SILENT_S:.0f} s."
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
                cause=self.CAUSE,
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
