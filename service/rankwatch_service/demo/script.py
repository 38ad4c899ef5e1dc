"""The demo's script: which fault comes when, what has to open, and the figures that decide if all went well. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankwatch_service.demo.job.faults import Fault, Injected
from rankwatch_service.demo.services.receiver import Received

WARM_UP_STEPS = 120
"""Clean steps before the first fault: what a detector learns from, and a good checkpoint."""
ARM_AHEAD_STEPS = 15
"""A fault is armed this many steps ahead: over a second, far longer than a rank takes to look at the file."""
SETTLE_STEPS = 25
"""Clean steps after which a scene counts as recovered: more than proves the next checkpoint good."""

FINGERPRINT_STEPS = 10
"""Steps between two fingerprints of the weights."""
STRAGGLER_STEPS_MAX = 30
HANG_FLOOR_S = 5.0
HANG_STEPS = 4.5
HANG_NOTICE_S = 3.0
"""A standstill is known from progress blocks and ticks, which each come once a second, and takes a webhook more."""
NOTICE_S_MAX = 1.5
"""Longest time from the sample that decides, written on a rank, to the webhook in the receiver's hands."""
EXIT_NOTICE_S_MAX = 1.0 + NOTICE_S_MAX
"""A process that ended is noticed within a second; then as every sample."""
APPLY_S_MAX = 0.4
"""A command is applied within two steps and this."""
APPLY_TOLERANCE = 5.0
"""Only a command that takes this many times its figure fails the demo: the cores are shared with whatever else runs."""


@dataclass(frozen=True, slots=True)
class Scene:
    """One fault with what has to follow."""

    fault: Fault
    rank: int
    title: str
    kind: str
    """Kind of the incident that has to open."""
    action: str
    """What brings training back: pause (asked by the demo as the engineer on call), rollback or relaunch (by policy),
    restart (by the launcher alone)."""


SCENES = (
    Scene(Fault.SLOW, 2, "a rank twice as slow", "straggler", "pause"),
    Scene(Fault.NAN, 1, "NaN in a local gradient", "nonfinite", "rollback"),
    Scene(Fault.BIT_FLIP, 3, "a flipped bit in a replica", "corruption", "rollback"),
    Scene(Fault.HANG, 0, "a rank in an endless loop", "hang", "relaunch"),
    Scene(Fault.KILL, 2, "a rank killed by SIGKILL", "rank_lost", "restart"),
)
BY_POLICY = tuple(scene for scene in SCENES if scene.action in ("rollback", "relaunch"))
"""Those that a policy rule has to answer, without a person."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to be true, with what was measured."""

    what: str
    right: bool
    measured: str = ""


@dataclass
class Outcome:
    """What happened in a scene, as far as it has come. Times are seconds."""

    scene: Scene
    state: str = "waiting"
    """waiting, armed, injected, opened, acting, recovering, recovered, or what was waited for in vain."""
    injected: Injected | None = None
    incident: Mapping[str, Any] = field(default_factory=dict)
    found_steps: int | None = None
    found_s: float | None = None
    """From the fault's beginning to the webhook in the receiver's hands."""
    noticed_s: float | None = None
    """From the sample that decided (or the fault itself, where no sample follows) to the webhook."""
    step_time_s: float = 0.0
    """The job's usual step time when the fault came."""
    command: Mapping[str, Any] = field(default_factory=dict)
    applied_step: int | None = None
    """The step at which all ranks obeyed, or stood when they were ended."""
    resumed_step: int | None = None
    """The step from which training went on."""
    applied_s: float | None = None
    """From the request to all ranks having obeyed."""
    recovered_s: float | None = None
    """From the fault's beginning to resolved and training."""


def checks(outcome: Outcome) -> list[Check]:
    """Judge one scene."""
    scene, incident = outcome.scene, outcome.incident
    if not incident or outcome.injected is None:
        return [Check(f"{scene.title}: found", False, outcome.state)]
    named = list(incident["ranks"])
    results = [Check(f"{scene.title}: rank {scene.rank} named", named == [scene.rank], f"named {named}")]
    results += _found_in_time(outcome, outcome.injected)
    if scene.fault is Fault.HANG:
        stack = "loop_forever" in str(incident["evidence"])
        results.append(Check(f"{scene.title}: its Python stack is in the evidence", stack))
    if outcome.noticed_s is not None:
        limit_s = EXIT_NOTICE_S_MAX if scene.fault is Fault.KILL else NOTICE_S_MAX
        what = f"{scene.title}: webhook within {limit_s:g} s"
        results.append(Check(what, outcome.noticed_s <= limit_s, f"{outcome.noticed_s:.2f} s"))
    if outcome.applied_s is not None:
        limit_s = apply_limit_s(outcome.step_time_s)
        what = f"{scene.title}: {scene.action} applied on all ranks"
        measured = f"{outcome.applied_s:.2f} s, figure {limit_s:.2f} s"
        results.append(Check(what, outcome.applied_s <= APPLY_TOLERANCE * limit_s, measured))
    recovered = outcome.recovered_s is not None and incident["state"] == "resolved"
    results.append(Check(f"{scene.title}: recovered", recovered, outcome.state))
    return results


def apply_limit_s(step_time_s: float) -> float:
    """The figure for a command: two steps and `APPLY_S_MAX`."""
    return 2 * step_time_s + APPLY_S_MAX


def hang_limit_s(step_time_s: float) -> float:
    """The figure for the webhook of a hang: when it becomes critical, and `HANG_NOTICE_S`."""
    return max(HANG_STEPS * step_time_s, HANG_FLOOR_S) + HANG_NOTICE_S


def _found_in_time(outcome: Outcome, injected: Injected) -> list[Check]:
    scene, steps, seconds = outcome.scene, outcome.found_steps, outcome.found_s
    if scene.fault is Fault.HANG and seconds is not None:
        limit_s = hang_limit_s(outcome.step_time_s)
        return [Check(f"{scene.title}: found within {limit_s:g} s", seconds <= limit_s, f"{seconds:.2f} s")]
    steps_max = {Fault.SLOW: STRAGGLER_STEPS_MAX, Fault.NAN: 0, Fault.BIT_FLIP: FINGERPRINT_STEPS}.get(scene.fault)
    if steps_max is None:
        return []
    right = steps is not None and 0 <= steps <= steps_max
    told = "in its step" if steps_max == 0 else f"within {steps_max} steps"
    return [Check(f"{scene.title}: found {told}", right, f"{steps} steps after step {injected.step}")]


def unexpected(incidents: Sequence[Mapping[str, Any]], outcomes: Sequence[Outcome]) -> list[Check]:
    """Nothing may open but the scenes' own incidents, each once."""
    expected = {outcome.incident["id"] for outcome in outcomes if outcome.incident}
    others = [incident for incident in incidents if incident["id"] not in expected]
    told = "; ".join(f"{incident['kind']} {incident['scope']}: {incident['summary']}" for incident in others)
    return [Check("nothing else opened", not others, told)]


def webhooks(received: Sequence[Received], outcomes: Sequence[Outcome]) -> list[Check]:
    """Every webhook must be genuine, and each incident's opening and end must have come exactly once."""
    forged = [webhook for webhook in received if not webhook.verified]
    results = [
        Check("all webhooks have a valid signature", not forged, f"{len(received)} received, {len(forged)} not valid")
    ]
    told = [(webhook.incident, webhook.type, webhook.transition) for webhook in received]
    doubled = len(told) - len(set(told))
    results.append(Check("no webhook came twice", doubled == 0, f"{doubled} doubled"))
    for kind in ("incident.opened", "incident.resolved"):
        have = sorted(incident for incident, what, _ in told if what == kind)
        want = sorted(outcome.incident["id"] for outcome in outcomes if outcome.incident)
        results.append(Check(f"one {kind} webhook for each incident", have == want, f"{len(have)} for {len(want)}"))
    return results


def mixed_weights(mixed: Sequence[tuple[str, int]], outcomes: Sequence[Outcome]) -> list[Check]:
    """Replicas may differ only between the flipped bit and the end of its attempt."""
    flips = [outcome.injected for outcome in outcomes if outcome.scene.fault is Fault.BIT_FLIP]
    excused = [
        (attempt, step)
        for attempt, step in mixed
        if any(flip is not None and flip.attempt == attempt and step >= flip.step for flip in flips)
    ]
    others = [place for place in mixed if place not in excused]
    told = ", ".join(f"step {step} of {attempt}" for attempt, step in others[:5])
    what = "replicas were equal at every step" + (", but for the flipped bit" if flips else "")
    return [Check(what, not others, told)]
