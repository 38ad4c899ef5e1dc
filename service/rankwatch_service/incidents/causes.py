"""What may have caused what: parts of incidents, and conditions of hardware as suspected causes of a hang. Pure.

Whether one part may have caused another: kinds, places, attempts, times and amounts must all fit.

Nothing here depends on which of the two was found first.

Conditions of hardware as suspected causes of a hang.

A job that stands still is what people must act on, so a condition such as a port that goes down never titles a hang: it
stays an incident of its own, and the evidence of the hang names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

from rankwatch_detectors.base import Change, Finding, Kind
from rankwatch_detectors.scope import WHOLE_JOB, ScopeLevel
from rankwatch_service.incidents.kinds import CAUSE_ORDER, KINDS, kinds_where
from rankwatch_service.incidents.model import Incident, Part, Placement, TransitionKind, Update
from rankwatch_service.names import short

SLACK_S: Final = 2.0
"""Times closer than this count as equal: telemetry and ticks are each about a second apart."""

SLACK_STEPS: Final = 1
"""Steps closer than this count as equal: some detectors report the finished step, others the one begun."""

EXPLAINED_MAX: Final = 3.0
"""A slow rank explains a slowdown of up to this many times what the rank adds: both are estimates from about ten noisy
rows, and a growing fault is reported in stages. A larger slowdown must have another cause."""

SHUTDOWN_S: Final = 120.0
"""A process that ends this long after it was missed was ending all the time: Python's shutdown uploads and joins."""

SAVE_ENDS_WITHIN_S: Final = 60.0
"""A failed save ends a job at once or not at all: what ends it later has another cause."""


_ENDS: Final = kinds_where(lambda traits: traits.ends_job)
_LOCAL: Final = frozenset({Kind.STRAGGLER, Kind.DEVICE_FAULT, Kind.DEVICE_DEGRADED, Kind.HOST_DEGRADED})
_SHARED: Final = frozenset({Kind.SLOWDOWN, Kind.LOSS_SPIKE, Kind.LOSS_DIVERGENCE, Kind.GRAD_NORM})


class Reach(Enum):
    """Which ranks a cause can affect."""

    JOB = "job"
    """All ranks of the job: they wait for each other and share gradients."""
    HOST = "host"
    """Ranks of the same hosts."""


def may_cause(cause: Part, effect: Part, placement: Placement) -> bool:
    """Whether `cause` may have caused `effect`, so that both are one incident."""
    return not only_suspected(cause, effect) and _fits(cause, effect, placement)


def may_be_suspected(cause: Part, effect: Part, placement: Placement) -> bool:
    """Whether `cause` is a suspected cause of `effect`, which is an incident of its own."""
    return cause.is_open and only_suspected(cause, effect) and _fits(cause, effect, placement)


def only_suspected(cause: Part, effect: Part) -> bool:
    """Whether the one can be no more than a suspected cause of the other, by their kinds."""
    return KINDS[cause.kind].is_condition and effect.kind is Kind.HANG


def _fits(cause: Part, effect: Part, placement: Placement) -> bool:
    return (
        effect.kind in KINDS[cause.kind].may_cause
        and _stand_alike(cause, effect)
        and _within_attempts(cause, effect)
        and _within_reach(cause, effect, placement)
        and _had_begun(cause, effect)
        and _suffices(cause, effect)
    )


def came_first(cause: Part, effect: Part) -> bool:
    """Whether `cause`, which may have caused `effect`, came before it rather than after."""
    if cause.kind is Kind.RESTART_LOOP or effect.kind in KINDS[cause.kind].becomes:
        # A restart loop is known only at its third launch, after its cause. A jump does not cause what it becomes.
        return False
    if cause.kind not in KINDS[effect.kind].may_cause:
        return True
    if {cause.kind, effect.kind} == {Kind.RANK_LOST, Kind.HANG} and cause.ranks[:1] == effect.ranks[:1]:
        lost, hung = (cause, effect) if cause.kind is Kind.RANK_LOST else (effect, cause)
        if lost.onset_time_s - hung.onset_time_s <= SHUTDOWN_S:
            return lost is cause  # how a rank ended says more than that the others wait for it
    if cause.kind is effect.kind and WHOLE_JOB in (cause.scope, effect.scope):
        # Of two parts of one kind, the one that names a place says more and is the cause; but the silence of all
        # hosts is graver than that of one.
        return (cause.scope == WHOLE_JOB) is (cause.kind is Kind.TELEMETRY_LOST)
    if cause.kind is effect.kind and (_includes(cause, effect) or _includes(effect, cause)):
        return _includes(cause, effect)
    steps = _steps(cause.onset_step, effect.onset_step) if cause.attempt == effect.attempt else None
    if steps is not None and abs(steps) > SLACK_STEPS:
        return steps > 0
    if abs(cause.onset_time_s - effect.onset_time_s) > SLACK_S:
        return cause.onset_time_s < effect.onset_time_s
    return CAUSE_ORDER.index(cause.kind) < CAUSE_ORDER.index(effect.kind)


def precedence(finding: Finding) -> tuple[bool, float, int, str]:
    """The order in which findings of one observation are taken: by onset, causes before effects, ends last."""
    ends = finding.change is Change.CLOSE
    return (ends, finding.onset_time_s, CAUSE_ORDER.index(finding.kind), str(finding.scope))


def heads(part: Part, incident: Incident, placement: Placement) -> bool:
    """Whether the incident is a consequence of this part, or turned into it."""
    became = part.kind in KINDS[incident.kind].becomes and incident.attempt == part.attempt
    return became or (may_cause(part, incident.first, placement) and came_first(part, incident.first))


def reach(cause: Kind, effect: Kind) -> Reach:
    """How far `cause` reaches when it causes `effect`.

    A slow rank slows the whole job, but it causes another slow rank, or a lost one, only on its own host. Two hosts
    that corrupt data or fall silent have separate causes, and NaN ends only the rank that computed it.
    """
    if effect in _SHARED:
        return Reach.JOB
    if effect in _LOCAL:
        return Reach.HOST
    alone = cause is effect and cause in {Kind.CORRUPTION, Kind.TELEMETRY_LOST, Kind.NETWORK_DEGRADED}
    ends = (cause, effect) == (Kind.NONFINITE, Kind.RANK_LOST)
    return Reach.HOST if cause in _LOCAL or alone or ends else Reach.JOB


def hosts_of(part: Part, placement: Placement) -> list[str]:
    """The hosts of a part; empty if it names none."""
    if part.hosts:
        return list(part.hosts)
    if part.scope.host is not None:
        return [part.scope.host]
    return placement.hosts_of(part.ranks)


def _stand_alike(cause: Part, effect: Part) -> bool:
    """A standing part does not cause what begins later, but standing parts that have a place may belong together."""
    return cause.standing is effect.standing and (not cause.standing or (_has_place(cause) and _has_place(effect)))


def _within_attempts(cause: Part, effect: Part) -> bool:
    if cause.attempt == effect.attempt or KINDS[cause.kind].is_lasting or effect.kind is Kind.RESTART_LOOP:
        return True
    # A job that ends again before it passes the step at which it ended the last time has the same cause.
    return cause.ended_with_attempt and {cause.kind, effect.kind} <= _ENDS


def _within_reach(cause: Part, effect: Part, placement: Placement) -> bool:
    if (cause.kind, effect.kind) == (Kind.TELEMETRY_LOST, Kind.HANG) and effect.ranks and _has_place(cause):
        # The ranks of a silent host may be gone; a rank that is known to stand on another host is not one of them.
        return not set(hosts_of(effect, placement)).isdisjoint(hosts_of(cause, placement))
    again = cause.attempt != effect.attempt and {cause.kind, effect.kind} <= _ENDS - {Kind.RESTART_LOOP}
    if reach(cause.kind, effect.kind) is Reach.JOB and not again:
        return True
    if (again or cause.kind is effect.kind) and not (_has_place(cause) and _has_place(effect)):
        return True
    here, there = set(hosts_of(cause, placement)), set(hosts_of(effect, placement))
    return bool(here & there) or bool(set(cause.ranks) & set(effect.ranks))


def _has_place(part: Part) -> bool:
    return bool(part.ranks or part.hosts) or part.scope.host is not None


def _had_begun(cause: Part, effect: Part) -> bool:
    """Whether the cause began before the effect was detected, by steps or by times: either may be unknown."""
    steps = _steps(cause.onset_step, effect.detected_step) if cause.attempt == effect.attempt else None
    in_steps = steps is not None and steps >= -SLACK_STEPS
    return in_steps or cause.onset_time_s <= effect.detected_time_s + SLACK_S


def _suffices(cause: Part, effect: Part) -> bool:
    """Whether a cause explains the effect: it adds enough to each step, or has ended the job soon enough."""
    if cause.kind is Kind.CHECKPOINT_FAILED and effect.kind in _ENDS:
        return effect.onset_time_s - cause.onset_time_s <= SAVE_ENDS_WITHIN_S
    if (cause.kind, effect.kind) == (Kind.DEVICE_DEGRADED, Kind.RANK_LOST):
        return cause.is_open and cause.has_memory_errors and set(effect.ranks) & set(cause.ranks) == set(cause.ranks)
    if effect.kind is not Kind.SLOWDOWN or cause.adds_s is None or effect.adds_s is None:
        return True
    return effect.adds_s <= EXPLAINED_MAX * cause.adds_s


def _includes(whole: Part, part: Part) -> bool:
    """Whether a part is about a host or a switch as a whole, and the other about some of its ranks."""
    return whole.scope.level in (ScopeLevel.SWITCH, ScopeLevel.HOST) and set(part.ranks) < set(whole.ranks)


def _steps(first: int | None, then: int | None) -> int | None:
    return None if first is None or then is None else then - first


SUSPECTED: Final = "suspected_causes"
"""Field of the evidence of a hang: incident, kind and summary of each."""

NOT_THE_NETWORK: Final = "not_the_network"
"""Field of the evidence of a hang: why no condition of the network is its cause."""


def suspect(incidents: Sequence[Incident], placement: Placement) -> list[Update]:
    """Set the suspected causes of the open hangs, and report each that is new to its hang. Notifies nobody."""
    updates = []
    for hang in (incident for incident in incidents if incident.kind is Kind.HANG and incident.first.is_open):
        known = {cause["incident"] for cause in hang.evidence.get(SUSPECTED, ())}
        for other in incidents:
            part = next((part for part in other.parts if may_be_suspected(part, hang.first, placement)), None)
            if part is None or short(other.id) in known or _ruled_out(part.kind, hang.evidence):
                continue
            cause = {"kind": str(part.kind), "incident": short(other.id), "summary": part.summary}
            hang.evidence = {**hang.evidence, SUSPECTED: [*hang.evidence.get(SUSPECTED, ()), cause]}
            updates.append(Update(hang, TransitionKind.EVIDENCE, f"suspected cause: {part.summary}"))
    return updates


def without_ruled_out(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """The evidence of a hang without the suspected causes that the rest of it rules out."""
    causes = [cause for cause in evidence.get(SUSPECTED, ()) if not _ruled_out(cause["kind"], evidence)]
    rest = {name: value for name, value in evidence.items() if name != SUSPECTED}
    return {**rest, SUSPECTED: causes} if causes else rest


def _ruled_out(kind: str, evidence: Iterable[str]) -> bool:
    return kind == Kind.NETWORK_DEGRADED and NOT_THE_NETWORK in evidence
