"""What the detectors of hardware that is degraded share: an episode for each rank's device or each host, in which rules
of counters, and events of agents, show what is wrong.

`DevicePlaces` says which rank computes on a device, `HeldRules` how long a condition must hold before it is reported,
and before it is over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np

from rankwatch_detectors.base import (
    GRAVITY,
    AttemptStart,
    Bools,
    DeviceCounters,
    Finding,
    Floats,
    Frame,
    Kind,
    Occurrence,
    Presence,
    Severity,
    Topology,
)
from rankwatch_detectors.dispatch import ATTEMPT_ENDED, DispatchingDetector
from rankwatch_detectors.scope import IncidentScope
from rankwatch_detectors.state import Stateful

ON_CPU: Final = "cpu"


class DevicePlaces(Stateful):
    """The hosts and devices of a job's ranks, as far as they are known. Memory: linear in ranks."""

    STATE: ClassVar[str] = "_hosts _devices"

    def __init__(self) -> None:
        self._hosts: list[str] = []
        self._devices: list[str] = []
        """UUID of each rank's device; `ON_CPU` if it computes on none, "" if that is not known."""

    def learn(self, topology: Topology) -> None:
        """Store the topology of an attempt."""
        types = topology.device_type or ("",) * topology.world_size
        self._hosts = list(topology.host)
        self._devices = [
            uuid or (ON_CPU if kind == ON_CPU else "") for uuid, kind in zip(topology.device_uuid, types, strict=True)
        ]

    def has(self, host: str) -> bool:
        """Whether a rank is on this host."""
        return host in self._hosts

    def has_devices(self, host: str) -> bool:
        """Whether a rank on this host may compute on a device."""
        return any(at == host and device != ON_CPU for at, device in zip(self._hosts, self._devices, strict=True))

    def scope_of(self, occurrence: Occurrence) -> IncidentScope | None:
        """As `scope_at`, of the device that an event is about."""
        return self.scope_at(occurrence.host, str(occurrence.fields.get("device_uuid", "")))

    def scope_at(self, host: str, device_uuid: str) -> IncidentScope | None:
        """The rank on a device, or its host where that is not known; None if the job does not use the device."""
        here = [rank for rank, its_host in enumerate(self._hosts) if its_host == host]
        if not here:
            return None
        uuid = _bare(device_uuid)
        mine = [rank for rank in here if uuid and _bare(self._devices[rank]) == uuid]
        if mine:
            return IncidentScope.of_rank(mine[0])
        # An instance of a divided GPU (MIG) has a UUID of its own, so that its rank cannot be distinguished from the
        # GPU's.
        known = all(self._devices[rank] and "MIG" not in self._devices[rank] for rank in here)
        return None if known and uuid else IncidentScope.of_host(host)


def _bare(uuid: str) -> str:
    """A UUID without what comes before it: NVML writes "GPU-", torch does not."""
    return uuid.lower().removeprefix("gpu-")


MINUTE_S: Final = 60.0
SLOT_S: Final = 5.0
"""Length of a slot of counters."""
GAP_SLOTS: Final = 12
"""Slots in which a device was not read, after which what is bad has begun anew: nobody knows what was between."""


@dataclass(frozen=True, slots=True)
class DeviceProblem:
    """Something that is wrong with a device, in the newest slot."""

    number: int
    """Number of the device."""
    what: str
    """The rule that it breaks."""
    slots: int
    """Since how many slots it has been so; 0: it is over."""
    severity: Severity = Severity.INFO
    evidence: Mapping[str, Any] | None = None
    lasts: int = 1
    """1: it began with the first of these slots; 0: before it, as what a count counts."""


class HeldRules(Stateful, ABC):
    """Judges a job's devices of one kind slot by slot. Memory: linear in devices."""

    STATE: ClassVar[str] = "_slot _trains _held _since _normal _open _last _hit _risen"

    def __init__(self) -> None:
        self._slot = -1
        self._trains = False
        """Whether this launch has made a step."""
        self.standing: set[str] = set()
        """Of the newest slot: counts that were read, are not over, and have nothing new ("NUMBER RULE")."""
        self.begin_launch()

    def begin_launch(self) -> None:
        """Forget what was wrong, and the counts: nobody has read them meanwhile."""
        self._held: dict[str, Any] = {}
        """Readings in a row in which it was bad, by rule and device."""
        self._since: dict[str, Any] = {}
        """The slot of the first of them, by rule and device; some counters are not read in every slot."""
        self._normal: dict[str, Any] = {}
        self._open: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        """The newest value of a count, by counter and device; -1: none."""
        self._hit: dict[str, Any] = {}
        """The slot in which a count last rose, or it was bad, by rule and device."""
        self._risen: dict[str, Any] = {}
        """How many new ones its counts had since they were last still for long, by rule and device."""

    def see(self, counters: DeviceCounters, *, trains: bool = True) -> Iterator[DeviceProblem]:
        """Process the next slot; one that is older than the newest is not judged.

        Args:
            counters: the slot.
            trains: whether this launch has made a step.

        Returns:
            What is wrong with which device: in each slot as long as it lasts, and once when it is over.
        """
        if counters.slot > self._slot:
            self._slot, self._trains = counters.slot, trains
            self.standing = set()
            yield from self._rules(counters)

    @abstractmethod
    def _rules(self, counters: DeviceCounters) -> Iterator[DeviceProblem]:
        """Judge a slot, rule by rule."""

    def _rising(
        self,
        what: str,
        names: Sequence[str],
        warning: int,
        counters: DeviceCounters,
        *,
        quiet_slots: int,
        reported: int = 1,
        each: bool = False,
    ) -> Iterator[DeviceProblem]:
        """Counts of errors: it is over when they have stood still for a while.

        Args:
            what: the rule.
            names: the counts that are its errors.
            warning: readings with new ones, after which they are a warning.
            counters: the slot.
            quiet_slots: slots without new ones after which it is over.
            reported: readings with new ones, from which on each is reported.
            each: `warning` and `reported` are about the new ones themselves, not about readings.
        """
        size = len(counters.devices)
        rise, read = np.zeros(size), np.zeros(size, dtype=bool)
        evidence = dict[str, Floats]()
        for name in names:
            evidence[name], here = column(counters, name, size)
            last = self._last[name] = grown(self._last.get(name), size, -1.0)
            rise += np.where(here & (last >= 0), np.maximum(evidence[name] - last, 0), 0)
            last[here] = evidence[name][here]
            read |= here
        held = self._held[what] = grown(self._held.get(what), size)
        hit = self._hit[what] = grown(self._hit.get(what), size)
        quiet = read & (held > 0) & (counters.slot - hit >= quiet_slots)
        risen = self._risen[what] = grown(self._risen.get(what), size)
        held[quiet] = risen[quiet] = 0
        risen += rise
        over = quiet & (rise == 0)
        held += rise if each else rise > 0
        hit[rise > 0] = counters.slot
        self.standing |= {
            f"{number} {what}" for number in np.flatnonzero(read & (rise == 0) & (held >= reported)).tolist()
        }
        for number in np.flatnonzero(over).tolist():
            yield DeviceProblem(number, what, 0)
        for number in np.flatnonzero((rise > 0) & (held >= reported)).tolist():
            severity = Severity.WARNING if held[number] >= warning else Severity.INFO
            figures = {name: float(f"{value[number]:.6g}") for name, value in evidence.items()}
            yield DeviceProblem(number, what, 1, severity, {**figures, "new_errors": float(risen[number])}, 0)

    def _evaluate(
        self, what: str, bad: Bools, good: Bools, hold: int, figures: Mapping[str, Floats], warning: float = 0
    ) -> Iterator[DeviceProblem]:
        """Devices that are neither bad nor good keep their state: they were not read, or cannot be judged."""
        held = self._held[what] = grown(self._held.get(what), len(bad))
        normal = self._normal[what] = grown(self._normal.get(what), len(bad))
        is_open = self._open[what] = grown(self._open.get(what), len(bad))
        since = self._since[what] = grown(self._since.get(what), len(bad))
        hit = self._hit[what] = grown(self._hit.get(what), len(bad))
        held[bad & (self._slot - hit > GAP_SLOTS)] = 0
        hit[bad] = self._slot
        since[bad & (held == 0)] = self._slot
        held[bad] += 1
        normal[bad] = 0
        normal[good] += 1
        held[good & (is_open == 0)] = 0
        over = good & (is_open > 0) & (normal >= hold)
        held[over] = is_open[over] = 0
        is_open[bad & (held >= hold)] = 1
        for number in np.flatnonzero(over).tolist():
            yield DeviceProblem(number, what, 0)
        for number in np.flatnonzero(bad & (is_open > 0)).tolist():
            slots = self._slot - int(since[number]) + 1
            severity = Severity.WARNING if slots >= warning else Severity.INFO
            evidence = {name: float(f"{value[number]:.6g}") for name, value in figures.items()}
            yield DeviceProblem(number, what, slots, severity, evidence)


def column(counters: DeviceCounters, name: str, size: int) -> tuple[Floats, Bools]:
    """A counter of all devices, and for which of them its value is finite."""
    if name not in counters.values:
        return np.zeros(size), np.zeros(size, dtype=bool)
    reported = counters.present[name] & np.isfinite(counters.values[name])
    return np.where(reported, counters.values[name], 0.0), reported


def grown(array: Any, size: int, fill: float = 0.0) -> Floats:
    """The array with room for so many devices."""
    grown = np.full(size, fill)
    if array is not None:
        grown[: len(array)] = array
    return grown


PASSED_MAX: Final = 128
"""Steps whose time is remembered, one for each slot: ten minutes, as far as agents look back."""
SILENT_S: Final = 180.0
"""A problem that its agent has not reported for so long is over."""
DEVICES_MAX: Final = 64
"""Problems of one host that are kept apart where it is not known which ranks they concern."""
BESIDES_MAX: Final = 4
"""Most sentences in the evidence about problems besides the worst; the summary has the first."""
REFRESH_S: Final = 60.0
REFRESH_SHARE: Final = 0.1
"""Where only figures changed, they are reported again after a minute, or a tenth of how long it has lasted if that is
more: 60 times in a day."""


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
    STATE: ClassVar[str] = "_places _step _passed _troubles _rules"

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
        """By text of the scope of each open episode, and by rule and device or event: what was last reported of it
        (`severity`, `summary`, `evidence`), and when (`sent_s`)."""
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
            # A slot is reported some seconds after its end, and what a count counts lies before its reading.
            began_s = min(SLOT_S * (counters.slot - problem.slots + problem.lasts), self.now_s)
            findings += self._report(scope, key, problem.severity, summary, evidence, began_s)
        for troubles in self._troubles.values():
            for key in troubles.keys() & self._rules.standing:
                troubles[key]["sent_s"] = self.now_s
        return findings

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:
        if presence is not None and presence.reported("state") <= {"left"}:
            # The incidents end with the job. Until the next attempt begins, nothing is judged.
            self.episodes.forget()
            self._troubles, self.attempt = {}, ""
            return ()
        before_s = self.now_s - SILENT_S
        why = f"No report about it for {SILENT_S:.0f} s."
        findings: list[Finding] = []
        for text, troubles in list(self._troubles.items()):
            silent = [key for key, trouble in troubles.items() if trouble["sent_s"] <= before_s]
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

    def _report(
        self,
        scope: IncidentScope,
        key: str,
        severity: Severity,
        summary: str,
        evidence: Mapping[str, Any],
        began_s: float,
    ) -> list[Finding]:
        """Report a problem of a device: as a new episode, as an update where it is graver than before, or as
        evidence.
        """
        reported = {"severity": str(severity), "summary": summary, "evidence": dict(evidence), "sent_s": self.now_s}
        troubles = self._troubles.get(str(scope), {})
        if scope in self.episodes and troubles:
            if key in troubles or len(troubles) < DEVICES_MAX:
                before = _first(troubles)
                if key in troubles:  # it stays as grave as it was
                    reported["severity"] = max(troubles[key]["severity"], reported["severity"], key=GRAVITY.index)
                troubles[key] = reported
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
            self._troubles[str(scope)] = {key: reported}
        return findings

    def _show(self, scope: IncidentScope, before: str) -> list[Finding]:
        """Report the worst problem now, and the others with it: at once where it is another one or graver,
        else, as counts rise, from time to time.
        """
        troubles = self._troubles[str(scope)]
        first = _first(troubles)
        worst = troubles[first]
        besides = [trouble["summary"] for key, trouble in troubles.items() if key != first][:BESIDES_MAX]
        reported = self.episodes.reported(scope)
        summary = " Besides: ".join([worst["summary"], *besides[:1]])
        severity = Severity(max(reported["severity"], worst["severity"], key=GRAVITY.index))
        # What was evidence of another device or rule is so no more.
        evidence = dict.fromkeys(reported["evidence"]) | worst["evidence"] | ({"besides": besides} if besides else {})
        same = first == before and reported["severity"] == severity
        same &= len(besides) == len(reported["evidence"].get("besides") or ())
        due_s = reported["detected_time_s"] + max(REFRESH_S, REFRESH_SHARE * (self.now_s - reported["onset_time_s"]))
        if same and (self.now_s < due_s or summary == reported["summary"]):
            self.episodes.note(scope, evidence)
            return []
        now = {"severity": severity, "summary": summary, "evidence": evidence, "detected_time_s": self.now_s}
        return self.episodes.update(scope, **now)


def _first(troubles: Mapping[str, Mapping[str, Any]]) -> str:
    """The key of the worst problem; of equal ones, of the one that was reported first."""
    return max(troubles, key=lambda key: GRAVITY.index(troubles[key]["severity"]), default="")
