"""What the detectors of hardware that is degraded share: an episode for each rank's device or each host, in which rules
of counters, and events of agents, tell what is wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import AttemptStart, DeviceCounters, Finding, Frame, Kind, Presence, Severity
from rankwatch_detectors.devices.held_rules import MINUTE_S, SLOT_S, DeviceProblem, HeldRules
from rankwatch_detectors.devices.places import DevicePlaces
from rankwatch_detectors.dispatch import ATTEMPT_ENDED, DispatchingDetector
from rankwatch_detectors.scope import IncidentScope

PASSED_MAX: Final = 128
"""Steps whose time is remembered, one for each slot: ten minutes, as far as agents look back."""
SILENT_S: Final = 180.0
"""An agent that has told nothing of something that was wrong for so long tells it no more."""
DEVICES_MAX: Final = 64
"""Problems of one host that are told apart where it is not known which ranks they concern."""
BESIDES_MAX: Final = 4
"""Of what is wrong besides the worst, sentences in the evidence; the summary has the first."""
REFRESH_S: Final = 60.0
REFRESH_SHARE: Final = 0.1
"""Where only figures changed, they are told again after a minute, or a tenth of how long it has lasted if that is more:
60 times in a day."""


class CounterDetector(DispatchingDetector, ABC):
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
    STATE: ClassVar[tuple[str, ...]] = (
        *DispatchingDetector.STATE,
        "_places",
        "_step",
        "_passed",
        "_troubles",
        "_rules",
    )

    def __init__(self, kind: Kind, version: int, rules: HeldRules) -> None:
        self.kind = kind
        super().__init__()
        self.name = str(kind)
        self.version = version
        self._places = DevicePlaces()
        self._step = -1
        self._passed: list[tuple[float, int]] = []
        """Times with the newest step then, oldest first."""
        self._troubles: dict[str, dict[str, dict[str, Any]]] = {}
        """By text of the scope of each open episode, and by rule and device or event: what was told of it last
        (`severity`, `summary`, `evidence`), and when (`told_s`)."""
        self._rules = rules

    def _scope_at(self, host: str, device: str) -> IncidentScope | None:  # noqa: ARG002
        """Whom a device's trouble is about; None if the job does not use it."""
        return IncidentScope.of_host(host) if self._places.has(host) else None

    @abstractmethod
    def _sentence(self, scope: IncidentScope, problem: DeviceProblem, host: str, device: str) -> str:
        """A problem for people."""

    def _begin(self, start: AttemptStart) -> list[Finding]:
        findings: list[Finding] = []
        if start.launch != self.attempt.rpartition(".")[0]:
            findings = self.episodes.close_all(self.now_s, ATTEMPT_ENDED)
            self._troubles, self._step, self._passed = {}, -1, []
            self._rules.begin_launch()
        self.attempt, self.world_size = start.attempt, start.topology.world_size
        self._places.learn(start.topology)
        return findings

    def _on_frame(self, frame: Frame) -> Sequence[Finding]:
        self._step = max(self._step, frame.step)
        if not self._passed or self.now_s >= self._passed[-1][0] + SLOT_S:
            self._passed = [*self._passed[1 - PASSED_MAX :], (self.now_s, self._step)]
        return ()

    def _on_counters(self, counters: DeviceCounters) -> Sequence[Finding]:
        findings: list[Finding] = []
        if not self.attempt or counters.kind != self.DEVICES:
            return findings
        # What is over comes last: a link that came back has flapped, which goes on with the episode.
        problems = sorted(self._rules.see(counters, trains=self._step >= 0), key=lambda one: one.slots == 0)
        for problem in problems:
            host, device = counters.devices[problem.number]
            scope = self._scope_at(host, device)
            if scope is None:
                continue
            key = f"{problem.number} {problem.what}"
            if problem.slots == 0:
                findings += self._over(scope, {key}, self.WELL)
                continue
            summary = self._sentence(scope, problem, host, device)
            named = {self.NAMED: device} if device else {}
            evidence = {**named, "host": host, "rule": problem.what, **(problem.evidence or {})}
            # A slot is told of some seconds after its end, and what a count counts lies before its reading.
            began_s = min(SLOT_S * (counters.slot - problem.slots + problem.lasts), self.now_s)
            findings += self._tell(scope, key, problem.severity, summary, evidence, began_s)
        for troubles in self._troubles.values():
            for key in troubles.keys() & self._rules.standing:
                troubles[key]["told_s"] = self.now_s
        return findings

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:
        if presence is not None and presence.told("state") <= {"left"}:
            # The incidents end with the job. Until the next attempt begins, nothing is judged.
            self.episodes.forget()
            self._troubles, self.attempt = {}, ""
            return ()
        before_s = self.now_s - SILENT_S
        why = f"Its agent has told nothing more of it for {SILENT_S:.0f} s."
        findings: list[Finding] = []
        for text, troubles in list(self._troubles.items()):
            silent = [key for key, trouble in troubles.items() if trouble["told_s"] <= before_s]
            findings += self._over(IncidentScope.parse(text), silent, why)
        return findings

    def _over(self, scope: IncidentScope, keys: Collection[str], why: str) -> list[Finding]:
        """Some of what is wrong is over: the episode goes on with what else is wrong, or ends."""
        troubles = self._troubles.get(str(scope), {})
        before = _first(troubles)
        over = troubles.keys() & keys
        if not over:
            return []
        for key in over:
            del troubles[key]
        if troubles:
            return self._show(scope, before)
        del self._troubles[str(scope)]
        return self.episodes.close(scope, self._step if self._step >= 0 else None, self.now_s, why)

    def _tell(
        self,
        scope: IncidentScope,
        key: str,
        severity: Severity,
        summary: str,
        evidence: Mapping[str, Any],
        began_s: float,
    ) -> list[Finding]:
        """Tell of a device: as a new episode, as an update where it is graver than what was told, or as evidence."""
        told = {"severity": str(severity), "summary": summary, "evidence": dict(evidence), "told_s": self.now_s}
        troubles = self._troubles.get(str(scope), {})
        if scope in self.episodes and troubles:
            if key in troubles or len(troubles) < DEVICES_MAX:
                before = _first(troubles)
                if key in troubles:  # it stays as grave as it was
                    told["severity"] = min(troubles[key]["severity"], told["severity"], key=_gravity)
                troubles[key] = told
                return self._show(scope, before)
            return []
        findings = self.episodes.open(
            scope,
            attempt=self.attempt,
            ranks=() if scope.host is not None else (scope.number,),
            onset_step=next((step for time_s, step in reversed(self._passed) if time_s <= began_s), None),
            onset_time_s=began_s,
            score=(self.now_s - began_s) / MINUTE_S,
            confidence=1.0,
            cause=self.CAUSE,
            severity=severity,
            detected_step=self._step if self._step >= 0 else None,
            detected_time_s=self.now_s,
            summary=summary,
            evidence=evidence,
        )
        if findings:
            self._troubles[str(scope)] = {key: told}
        return findings

    def _show(self, scope: IncidentScope, before: str) -> list[Finding]:
        """Tell what is worst now, and what is wrong besides: at once where it is something else than before or graver,
        else, as counts rise, from time to time.
        """
        troubles = self._troubles[str(scope)]
        first = _first(troubles)
        worst = troubles[first]
        besides = [trouble["summary"] for key, trouble in troubles.items() if key != first][:BESIDES_MAX]
        told = self.episodes.told(scope)
        summary = " Besides: ".join([worst["summary"], *besides[:1]])
        severity = Severity(min(told["severity"], worst["severity"], key=_gravity))
        # What was evidence of another device or rule is so no more.
        evidence = dict.fromkeys(told["evidence"]) | worst["evidence"] | ({"besides": besides} if besides else {})
        same = first == before and told["severity"] == severity
        same &= len(besides) == len(told["evidence"].get("besides") or ())
        due_s = told["detected_time_s"] + max(REFRESH_S, REFRESH_SHARE * (self.now_s - told["onset_time_s"]))
        if same and (self.now_s < due_s or summary == told["summary"]):
            self.episodes.note(scope, evidence)
            return []
        now = {"severity": severity, "summary": summary, "evidence": evidence, "detected_time_s": self.now_s}
        return self.episodes.update(scope, **now)


def _first(troubles: Mapping[str, Mapping[str, Any]]) -> str:
    """The key of the worst one, of equal ones of that which was told first."""
    return min(troubles, key=lambda key: _gravity(troubles[key]["severity"]), default="")


def _gravity(severity: str) -> int:
    """0: the gravest."""
    return list(Severity).index(Severity(severity))
