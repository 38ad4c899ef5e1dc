"""An incident while its job runs: its parts, its transitions, its frozen version, and its snapshot. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import Any, Final, Protocol

from rankwatch_detectors.base import GRAVITY, Finding, Kind, Severity
from rankwatch_detectors.progress.hang import NOBODY
from rankwatch_detectors.scope import IncidentScope
from rankwatch_service.incidents.kinds import ENDED_BY_ITSELF, KINDS
from rankwatch_service.numbers import plain


class Placement(Protocol):
    """Switches, hosts and devices of the ranks of the running attempt. Unknown ranks are left out."""

    @property
    def world_size(self) -> int:
        """Ranks of the attempt."""
        ...

    def hosts_of(self, ranks: Iterable[int]) -> list[str]:
        """Hosts of these ranks, each once, in their order."""
        ...

    def devices_of(self, ranks: Iterable[int]) -> list[str]:
        """Device UUIDs of these ranks, each once, in their order."""
        ...

    def host_id_of(self, rank: int) -> str:
        """The id of the host of this rank (`signed.host_of`); empty if its agent has not enrolled."""
        ...

    def pids_of(self, ranks: Iterable[int]) -> dict[str, list[int]]:
        """Process ids of these ranks by host, as the processes see them, in the order of the ranks."""
        ...

    def ranks_of(self, host: str) -> list[int]:
        """Ranks that run on a host, ascending."""
        ...

    def switch_of(self, hosts: Iterable[str]) -> str:
        """The switch of these hosts; empty unless all have the same and it is known."""
        ...

    def ranks_below(self, switch: str) -> list[int]:
        """Ranks on the hosts of a switch, ascending."""
        ...


@dataclass(frozen=True, slots=True)
class Consequence:
    """One consequence of the first mover, in short."""

    kind: Kind
    scope: IncidentScope
    ranks: tuple[int, ...]
    summary: str
    step: int | None
    """Its onset."""

    def fields(self) -> dict[str, Any]:
        """As JSON, for the list `consequences` and the fields of a transition."""
        return {
            "kind": str(self.kind),
            "scope": str(self.scope),
            "ranks": list(self.ranks),
            "summary": self.summary,
            "step": self.step,
        }


@dataclass(frozen=True, slots=True)
class IncidentVersion:
    """One incident after transition number `transitions`. Its mappings hold plain JSON types, without NaN."""

    id: str
    job: str
    attempt: str
    kind: Kind
    scope: IncidentScope
    episode: int
    severity: Severity
    state: str
    """open, acknowledged or resolved."""
    ranks: tuple[int, ...]
    """Culprits, first mover first; empty if it is about the whole job."""
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    onset_step: int | None
    detected_step: int | None
    resolved_step: int | None
    onset_unix_ns: int
    detected_unix_ns: int
    updated_unix_ns: int
    resolved_unix_ns: int | None
    score: float
    confidence: float
    cause: str
    summary: str
    evidence: Mapping[str, Any]
    consequences: tuple[Consequence, ...]
    changes_before: tuple[Mapping[str, Any], ...]
    """What changed shortly before the onset: {what, step, unix_ns}."""
    impact_gpu_hours_per_hour: float
    suggestion: Mapping[str, Any]
    checkpoint: str | None
    transitions: int
    acknowledged_by: str | None

    @property
    def kinds(self) -> frozenset[Kind]:
        """Its own kind and those of its consequences."""
        return frozenset({self.kind, *(consequence.kind for consequence in self.consequences)})


class TransitionKind(StrEnum):
    """What a transition is. Receivers are notified of opened, updated and resolved."""

    OPENED = "opened"
    UPDATED = "updated"
    EVIDENCE = "evidence"
    ACKNOWLEDGED = "acknowledged"
    UNACKNOWLEDGED = "unacknowledged"
    COMMENTED = "commented"
    RESOLVED = "resolved"


MATTERS: Final = (TransitionKind.OPENED, TransitionKind.UPDATED, TransitionKind.EVIDENCE)
"""Transitions after which cost, suggestion and the policy's action are decided again."""


@dataclass(slots=True)
class Update:
    """A change of an incident before it has a number and becomes a transition."""

    incident: Incident
    what: TransitionKind
    text: str
    actor: str = "stream"
    fields: dict[str, Any] = field(default_factory=dict)


def reported_once(updates: list[Update]) -> list[Update]:
    """Of several updates of one incident at once, only the first notifies: it shows the incident after all of them."""
    seen: set[str] = set()
    for update in updates:
        if update.what is TransitionKind.UPDATED and update.incident.id in seen:
            update.what = TransitionKind.EVIDENCE
        if update.what in (TransitionKind.OPENED, TransitionKind.UPDATED):
            seen.add(update.incident.id)
    return updates


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of one incident, with the incident as it is after it."""

    number: int
    what: TransitionKind
    actor: str
    text: str
    fields: Mapping[str, Any]
    time_s: float
    incident: IncidentVersion

    @property
    def at_unix_ns(self) -> int:
        """When it happened."""
        return unix_ns(self.time_s)


STACKS: Final = "stacks"
"""Action of the commands that request stacks, which touch the loop of no rank; and the field of the evidence."""

SENTENCE: Final = "ranks_stand"
"""Field of the evidence that says in a sentence where the ranks stand; the groups are in the field `stacks`."""

LISTED_MAX: Final = 64
"""Parts kept of an incident: for 512 waiting ranks, a count is clearer than a list."""


MEMORY_ERRORS: Final = "ecc"
"""The rule (field of the evidence) for counters of uncorrectable memory errors."""


@dataclass(slots=True)
class Part:
    """One finding's episode within an incident."""

    kind: Kind
    scope: IncidentScope
    episode: int
    attempt: str
    ranks: tuple[int, ...]
    onset_step: int | None
    onset_time_s: float
    summary: str
    severity: Severity = Severity.WARNING
    confidence: float = 1.0
    detected_step: int | None = None
    detected_time_s: float = math.inf
    adds_s: float | None = None
    """Seconds that it adds to each step; None: unknown."""
    standing: bool = False
    """Whether it has held since the first steps and is part of the baseline: what begins later is not its
    consequence."""
    is_open: bool = True
    ended_with_attempt: bool = False
    """Its attempt is over: it is closed once a later attempt shows that it does not come back."""
    ended_s: float | None = None
    """When it ended by itself, that is, when its detector no longer saw it."""
    ended_step: int | None = None
    flaps: int = 0
    """How often it has come back."""
    hosts: tuple[str, ...] = ()
    """The hosts, if the finding is about hosts rather than ranks; as many as the evidence lists."""
    cost_gpu_hours_per_hour: float | None = None
    """What it costs, as its detector estimates; None: unknown."""
    has_memory_errors: bool = False
    """Whether counters of its device showed uncorrectable memory errors, which may kill a rank."""

    @property
    def corrupts_weights(self) -> bool:
        """Whether training is wasted while it lasts. A finding of severity info does not prove that."""
        return self.is_open and KINDS[self.kind].corrupts_weights and self.severity is not Severity.INFO

    def consequence(self) -> Consequence:
        """The part as an incident lists its consequences."""
        return Consequence(self.kind, self.scope, self.ranks, self.summary, self.onset_step)


@dataclass(slots=True)
class Incident:
    """What a person works on. `parts[0]` is the first mover; the others are its consequences."""

    id: str
    job: str
    parts: list[Part]
    severity: Severity
    ranks: tuple[int, ...]
    scope: IncidentScope
    opened_time_s: float
    score: float
    confidence: float
    cause: str
    summary: str
    evidence: dict[str, Any]
    updated_time_s: float
    state: str = "open"
    resolved_step: int | None = None
    resolved_time_s: float | None = None
    hosts: list[str] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)
    changes_before: list[dict[str, Any]] = field(default_factory=list)
    impact_gpu_hours_per_hour: float = 0.0
    suggestion: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    transitions: int = 0
    acknowledged_by: str | None = None
    actions: list[str] = field(default_factory=list)
    """Keys of the commands that it has led to (`action_key`): each is requested once."""
    parts_total: int = 1
    """Parts ever joined; `parts` holds at most LISTED_MAX of them."""
    found_severity: Severity | None = None
    """The gravest of its findings; None: not known, and `severity` is it."""
    unfelt: bool = False
    """Whether only devices have faults that do not affect training: the severity is one grade below that of
    findings."""
    steps: int = 0
    """Steps that training has made since it opened; of incidents of devices alone."""

    @property
    def first(self) -> Part:
        """The first mover."""
        return self.parts[0]

    @property
    def kind(self) -> Kind:
        """The first mover's kind."""
        return self.first.kind

    @property
    def detected_step(self) -> int | None:
        """The newest step when its first mover was found, which may be later than when it opened."""
        return self.first.detected_step

    @property
    def detected_time_s(self) -> float:
        """When its first mover was found."""
        return self.first.detected_time_s

    @property
    def attempt(self) -> str:
        """The attempt in which it began."""
        return self.first.attempt

    @property
    def gravest(self) -> Part:
        """The open part with the highest severity, the earliest of several: the policy looks at this one."""
        going_on = [part for part in self.parts if part.is_open] or self.parts
        return max(going_on, key=lambda part: GRAVITY.index(part.severity))

    def grade(self, part: Part) -> Severity:
        """The severity of a part, which is one grade lower if training does not feel it."""
        return lowered(part.severity) if self.unfelt else part.severity

    @property
    def cost_gpu_hours_per_hour(self) -> float | None:
        """What it costs, as detectors estimate, such as that of a slow rank whose device is the cause."""
        reported = [part.cost_gpu_hours_per_hour for part in self.parts if part.is_open]
        return max((cost for cost in (*reported, _cost(self.evidence)) if cost is not None), default=None)

    @property
    def goes_on(self) -> bool:
        """Whether any part is open in the running attempt."""
        return any(part.is_open and not part.ended_with_attempt for part in self.parts)

    @property
    def is_over(self) -> bool:
        """Whether it has ended by itself, and is not resolved yet, as it may come back."""
        return self.state != "resolved" and not any(part.is_open for part in self.parts)

    @property
    def bout(self) -> str:
        """The last attempt that it ended; if it has ended none, the attempt in which it began."""
        return next((part.attempt for part in reversed(self.parts) if KINDS[part.kind].ends_job), self.attempt)

    def action_key(self, action: str) -> str:
        """Identifies a command that is requested once: the action, and the attempt if it ended more than one."""
        return action if self.bout == self.attempt else f"{action} {self.bout}"

    def command_id(self, action: str) -> str:
        """Id of the command for this action now; the same in every replay."""
        return f"cmd_{derived(self.id, self.action_key(action))}"

    def add(self, part: Part) -> None:
        """Add a part; if there are too many, it replaces the last one."""
        self.parts_total += 1
        if len(self.parts) >= LISTED_MAX:
            # The last one, since the first is the first mover.
            del self.parts[-1]
        self.parts.append(part)

    def _evidence(self) -> dict[str, Any]:
        rest = {name: value for name, value in self.evidence.items() if name != ENDED_BY_ITSELF}
        return rest | {ENDED_BY_ITSELF: True} if self.is_over else rest

    def _summary(self) -> str:
        """The summary; of a hang that names nobody and whose ranks stand at several places, with these places."""
        apart = len(self.evidence.get(STACKS) or ()) > 1
        stand = str(self.evidence.get(SENTENCE, "")).removesuffix(".")
        return self.summary.replace(NOBODY, f"; {stand}") if apart and stand else self.summary

    def version(self) -> IncidentVersion:
        """A frozen copy of the incident as it is now."""
        return IncidentVersion(
            id=self.id,
            job=self.job,
            attempt=self.attempt,
            kind=self.kind,
            scope=self.scope,
            episode=self.first.episode,
            severity=self.severity,
            state=self.state,
            ranks=self.ranks,
            hosts=tuple(self.hosts),
            devices=tuple(self.devices),
            onset_step=self.first.onset_step,
            detected_step=self.detected_step,
            resolved_step=self.resolved_step,
            onset_unix_ns=unix_ns(self.first.onset_time_s),
            detected_unix_ns=unix_ns(self.detected_time_s),
            updated_unix_ns=unix_ns(self.updated_time_s),
            resolved_unix_ns=None if self.resolved_time_s is None else unix_ns(self.resolved_time_s),
            score=self.score,
            confidence=self.confidence,
            cause=self.cause,
            summary=self._summary(),
            evidence=plain(self._evidence()),
            consequences=tuple(part.consequence() for part in self.parts[1:]),
            changes_before=tuple(plain(self.changes_before)),
            impact_gpu_hours_per_hour=self.impact_gpu_hours_per_hour,
            suggestion=plain(self.suggestion),
            checkpoint=self.checkpoint,
            transitions=self.transitions,
            acknowledged_by=self.acknowledged_by,
        )


def lowered(severity: Severity) -> Severity:
    """One grade lower."""
    return GRAVITY[max(GRAVITY.index(severity) - 1, 0)]


def incident_id(job: str, attempt: str, kind: str, scope: IncidentScope, episode: int) -> str:
    """The id of the incident that this finding opens; the same in every replay."""
    return f"inc_{derived(job, attempt, kind, scope, episode)}"


def derived(*parts: object) -> str:
    """24 hex digits of a hash over the parts; where one part ends and the next begins makes a difference."""
    return sha256("\x00".join(str(part) for part in parts).encode()).hexdigest()[:24]


def adopt_times(part: Part, finding: Finding) -> None:
    """Adopt onset and detection of a finding that names another rank as first mover than before."""
    part.onset_step, part.onset_time_s = finding.onset_step, finding.onset_time_s
    part.detected_step, part.detected_time_s = finding.detected_step, finding.detected_time_s


def part_of(finding: Finding, episode: int) -> Part:
    """A finding as part of an incident."""
    return Part(
        kind=finding.kind,
        scope=finding.scope,
        episode=episode,
        attempt=finding.attempt,
        ranks=tuple(finding.ranks),
        onset_step=finding.onset_step,
        onset_time_s=finding.onset_time_s,
        summary=finding.summary,
        severity=finding.severity,
        confidence=number(finding.confidence, 0.0),
        detected_step=finding.detected_step,
        detected_time_s=finding.detected_time_s,
        adds_s=adds_s(finding),
        standing=finding.evidence.get("standing") is True,
        hosts=named_hosts(finding),
        cost_gpu_hours_per_hour=_cost(finding.evidence),
        has_memory_errors=finding.evidence.get("rule") == MEMORY_ERRORS,
    )


def named_hosts(finding: Finding) -> tuple[str, ...]:
    """The hosts that a finding lists."""
    hosts = finding.evidence.get("hosts")
    return tuple(hosts) if isinstance(hosts, list) else ()


def adds_s(finding: Finding) -> float | None:
    """Seconds that slow ranks or a slow job add to each step, as their detectors estimate; None if they do not."""
    usual_s = finding.evidence.get("peers_busy_s", finding.evidence.get("usual_s"))
    ratio = finding.evidence.get("ratio")
    if not isinstance(usual_s, int | float) or not isinstance(ratio, int | float):
        return None
    added_s = usual_s * (ratio - 1)
    return added_s if math.isfinite(added_s) else None


def apply_figures(part: Part, finding: Finding) -> None:
    """Apply a finding on an open part."""
    part.summary = finding.summary
    part.severity, part.confidence = finding.severity, number(finding.confidence, 0.0)
    part.adds_s, part.cost_gpu_hours_per_hour = adds_s(finding), _cost(finding.evidence)
    part.has_memory_errors |= finding.evidence.get("rule") == MEMORY_ERRORS
    part.ended_with_attempt = False


def _cost(evidence: Mapping[str, Any]) -> float | None:
    """What a finding costs, as its detector estimates; None if it does not."""
    cost = evidence.get("cost_gpu_hours_per_hour")
    return max(float(cost), 0.0) if isinstance(cost, int | float) and math.isfinite(cost) else None


def number(value: float, instead: float) -> float:
    """The value, or `instead` if it is NaN."""
    return instead if math.isnan(value) else value


def unix_ns(time_s: float) -> int:
    """Stream time in seconds as integer nanoseconds, to the microsecond that a float holds."""
    return round(time_s * 1e6) * 1_000


def incident_state(incident: Incident) -> dict[str, Any]:
    """The incident for a snapshot, as JSON types."""
    return {item.name: getattr(incident, item.name) for item in dataclasses.fields(incident)} | {
        "parts": [dataclasses.asdict(part) | {"scope": str(part.scope)} for part in incident.parts],
        "scope": str(incident.scope),
    }


def incident_restored(state: Mapping[str, Any]) -> Incident:
    """The incident of which `incident_state` returned this."""
    parts = [_part_restored(saved) for saved in state["parts"]]
    severity, ranks = Severity(state["severity"]), tuple(state["ranks"])
    found = state["found_severity"]
    types = {"parts": parts, "severity": severity, "ranks": ranks, "scope": IncidentScope.parse(state["scope"])}
    types["found_severity"] = None if found is None else Severity(found)
    return Incident(**{**state, **types})


def _part_restored(saved: Mapping[str, Any]) -> Part:
    types = {"kind": Kind(saved["kind"]), "severity": Severity(saved["severity"])}
    places = {"ranks": tuple(saved["ranks"]), "hosts": tuple(saved["hosts"])}
    return Part(**{**saved, **types, **places, "scope": IncidentScope.parse(saved["scope"])})


def hangs(incidents: Iterable[Incident], attempt: str | None) -> bool:
    """Whether a hang of this attempt is open in any of the incidents."""
    parts = (part for incident in incidents for part in incident.parts)
    return any(part.kind is Kind.HANG and part.is_open and part.attempt == attempt for part in parts)
