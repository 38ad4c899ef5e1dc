"""Whether one trouble may have brought another: kinds, places, attempts, times and amounts must all fit. Pure.

Nothing here depends on which of the two was found first.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from rankwatch_detectors.base import Kind
from rankwatch_detectors.scope import WHOLE_JOB
from rankwatch_service.incidents.kinds import CAUSE_ORDER, KINDS, kinds_where
from rankwatch_service.incidents.model import Part
from rankwatch_service.incidents.placement import Placement

SLACK_S: Final = 2.0
"""Times within this are the same moment: telemetry is about a second apart, and so are the ticks that judge it."""

SLACK_STEPS: Final = 1
"""Steps within this are the same one: some witnesses count the step that was finished, others the one begun."""

EXPLAINED_MAX: Final = 3.0
"""A slow rank explains a job that is slower by up to so many times what the rank was said to add: both are estimates
from some ten noisy rows, and a fault that grows is told in stages. More must have another reason."""


_ENDS: Final = kinds_where(lambda traits: traits.ends_job)
_LOCAL: Final = frozenset({Kind.STRAGGLER, Kind.DEVICE_FAULT, Kind.DEVICE_DEGRADED})
_SHARED: Final = frozenset({Kind.SLOWDOWN, Kind.LOSS_SPIKE, Kind.LOSS_DIVERGENCE, Kind.GRAD_NORM})


class Reach(Enum):
    """Whom a cause can reach."""

    JOB = "job"
    """Every rank of the job: they wait for each other and share their gradients."""
    HOST = "host"
    """Ranks of the same hosts."""


def may_bring(cause: Part, effect: Part, placement: Placement) -> bool:
    """Whether `cause` may have brought `effect`."""
    return (
        effect.kind in KINDS[cause.kind].may_cause
        and _stand_alike(cause, effect)
        and _within_attempts(cause, effect)
        and _within_reach(cause, effect, placement)
        and _had_begun(cause, effect)
        and _suffices(cause, effect)
    )


def came_first(cause: Part, effect: Part) -> bool:
    """Of two troubles, the first of which may have brought the second: whether it was not the other way round."""
    if cause.kind is Kind.RESTART_LOOP or effect.kind in KINDS[cause.kind].becomes:
        # A loop is known by its third turn, and what began it was there before; a jump has become what followed it.
        return False
    if cause.kind not in KINDS[effect.kind].may_cause:
        return True
    if cause.kind is effect.kind and WHOLE_JOB in (cause.scope, effect.scope):
        # Of two that say the same, the one that names a place says more; but that all hosts are silent is the graver.
        return (cause.scope == WHOLE_JOB) is (cause.kind is Kind.TELEMETRY_LOST)
    steps = _steps(cause.onset_step, effect.onset_step) if cause.attempt == effect.attempt else None
    if steps is not None and abs(steps) > SLACK_STEPS:
        return steps > 0
    if abs(cause.onset_time_s - effect.onset_time_s) > SLACK_S:
        return cause.onset_time_s < effect.onset_time_s
    return CAUSE_ORDER.index(cause.kind) < CAUSE_ORDER.index(effect.kind)


def reach(cause: Kind, effect: Kind) -> Reach:
    """How far `cause` reaches when it brings `effect`.

    A slow rank slows the whole job, but another slow rank, or a dead one, is its doing only on its own host; two hosts
    that corrupt data, or fall silent, do so for reasons of their own, and NaN ends the rank that computed it.
    """
    if effect in _SHARED:
        return Reach.JOB
    if effect in _LOCAL:
        return Reach.HOST
    alone = cause is effect and cause in {Kind.CORRUPTION, Kind.TELEMETRY_LOST, Kind.NETWORK_DEGRADED}
    ends = (cause, effect) == (Kind.NONFINITE, Kind.RANK_LOST)
    return Reach.HOST if cause in _LOCAL or alone or ends else Reach.JOB


def hosts_of(part: Part, placement: Placement) -> list[str]:
    """Where a trouble is; empty where it names nobody."""
    if part.hosts:
        return list(part.hosts)
    if part.scope.host is not None:
        return [part.scope.host]
    return placement.hosts_of(part.ranks)


def _stand_alike(cause: Part, effect: Part) -> bool:
    """What holds from the first steps brings nothing that begins later; ranks of one host may be slow together."""
    return cause.standing is effect.standing and (not cause.standing or (_has_place(cause) and _has_place(effect)))


def _within_attempts(cause: Part, effect: Part) -> bool:
    if cause.attempt == effect.attempt or KINDS[cause.kind].is_lasting or effect.kind is Kind.RESTART_LOOP:
        return True
    # A job that ends again before it got past where it ended the last time was not mended.
    return cause.ended_with_attempt and {cause.kind, effect.kind} <= _ENDS


def _within_reach(cause: Part, effect: Part, placement: Placement) -> bool:
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
    """An effect cannot be seen before its cause began. It is enough if steps or times say so: either may be unknown."""
    steps = _steps(cause.onset_step, effect.detected_step) if cause.attempt == effect.attempt else None
    in_steps = steps is not None and steps >= -SLACK_STEPS
    return in_steps or cause.onset_time_s <= effect.detected_time_s + SLACK_S


def _suffices(cause: Part, effect: Part) -> bool:
    """Whether a cause that says how much it adds to each step adds enough."""
    if effect.kind is not Kind.SLOWDOWN or cause.adds_s is None or effect.adds_s is None:
        return True
    return effect.adds_s <= EXPLAINED_MAX * cause.adds_s


def _steps(first: int | None, then: int | None) -> int | None:
    return None if first is None or then is None else then - first
