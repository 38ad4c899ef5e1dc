"""The demo's script: the faults, the incidents they must open, and the limits that decide whether it passed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rankwatch_service.demo.rank_files import FaultKind, Injected
from rankwatch_service.demo.service import Received

WARM_UP_STEPS = 120
"""Clean steps before the first fault, for baselines and a good checkpoint."""
ARM_AHEAD_STEPS = 15
"""Steps between arming a fault and its step: over a second, far longer than a rank takes to read the file."""
SETTLE_STEPS = 25
"""Clean steps after which a scene counts as recovered; enough to prove the next checkpoint good."""

FINGERPRINT_STEPS = 10
"""Steps between two fingerprints of the weights."""
STRAGGLER_STEPS_MAX = 30
HANG_FLOOR_S = 5.0
HANG_STEPS = 4.5
HANG_NOTICE_S = 3.0
"""A standstill is seen in progress blocks and ticks, which come once a second each; then the webhook is sent."""
NOTICE_S_MAX = 1.5
"""Limit from the deciding sample on a rank to the receipt of the webhook."""
EXIT_NOTICE_S_MAX = 1.0 + NOTICE_S_MAX
"""The end of a process is noticed within a second; the rest takes as long as for a sample."""
APPLY_S_MAX = 0.4
"""Limit for a command, in addition to two steps."""
TOLERANCE = 5.0
"""The demo fails only at this many times a limit in seconds, since the cores are shared with other programs."""


@dataclass(frozen=True, slots=True)
class Scene:
    """One fault and its expected consequences."""

    fault: FaultKind
    rank: int
    title: str
    kind: str
    """The kind of the expected incident."""
    action: str
    """How training recovers: pause (requested by the demo as the on-call engineer), rollback or relaunch (by policy),
    restart (by the launcher alone)."""


SCENES = (
    Scene(FaultKind.SLOW, 2, "a rank twice as slow", "straggler", "pause"),
    Scene(FaultKind.NAN, 1, "NaN in a local gradient", "nonfinite", "rollback"),
    Scene(FaultKind.BIT_FLIP, 3, "a flipped bit in a replica", "corruption", "rollback"),
    Scene(FaultKind.HANG, 0, "a rank in an endless loop", "hang", "relaunch"),
    Scene(FaultKind.KILL, 2, "a rank killed by SIGKILL", "rank_lost", "restart"),
)
BY_POLICY = tuple(scene for scene in SCENES if scene.action in ("rollback", "relaunch"))
"""Scenes that a policy rule has to recover, without a person."""


@dataclass(frozen=True, slots=True)
class SceneCheck:
    """One condition of success, with the measured value."""

    what: str
    right: bool
    measured: str = ""


@dataclass
class SceneResult:
    """What has happened in a scene so far."""

    scene: Scene
    state: str = "waiting"
    """waiting, armed, injected, opened, acting, recovering, recovered, or a text that says what did not happen in time.
    """
    injected: Injected | None = None
    incident: Mapping[str, Any] = field(default_factory=dict)
    found_steps: int | None = None
    found_s: float | None = None
    """From the fault to the receipt of the webhook."""
    noticed_s: float | None = None
    """From the deciding sample (the fault, if no sample follows) to the receipt of the webhook."""
    step_time_s: float = 0.0
    """The usual step time before the fault."""
    command: Mapping[str, Any] = field(default_factory=dict)
    applied_step: int | None = None
    """The step at which all ranks applied the command or were ended."""
    resumed_step: int | None = None
    """The step from which training continued."""
    applied_s: float | None = None
    """From the request until all ranks applied it."""
    recovered_s: float | None = None
    """From the fault until the incident is resolved and training continues."""


def checks(outcome: SceneResult) -> list[SceneCheck]:
    """The checks of one scene."""
    scene, incident = outcome.scene, outcome.incident
    if not incident or outcome.injected is None:
        return [SceneCheck(f"{scene.title}: found", False, outcome.state)]
    named = list(incident["ranks"])
    results = [SceneCheck(f"{scene.title}: rank {scene.rank} named", named == [scene.rank], f"named {named}")]
    results += _found_in_time(outcome, outcome.injected)
    if scene.fault is FaultKind.HANG:
        stack = "loop_forever" in str(incident["evidence"])
        results.append(SceneCheck(f"{scene.title}: its Python stack is in the evidence", stack))
    if outcome.noticed_s is not None:
        limit_s = EXIT_NOTICE_S_MAX if scene.fault is FaultKind.KILL else NOTICE_S_MAX
        results.append(_in_time(f"{scene.title}: the webhook came", outcome.noticed_s, limit_s))
    if outcome.applied_s is not None:
        what = f"{scene.title}: {scene.action} applied on all ranks"
        results.append(_in_time(what, outcome.applied_s, apply_limit_s(outcome.step_time_s)))
    recovered = outcome.recovered_s is not None and incident["state"] == "resolved"
    results.append(SceneCheck(f"{scene.title}: recovered", recovered, outcome.state))
    return results


def _in_time(what: str, seconds: float, limit_s: float) -> SceneCheck:
    """The check of a time: `limit_s` is what it takes on idle cores."""
    failing_s = TOLERANCE * limit_s
    measured = f"{seconds:.2f} s; {limit_s:.2f} s on idle cores, {failing_s:.2f} s at most"
    return SceneCheck(what, seconds <= failing_s, measured)


def apply_limit_s(step_time_s: float) -> float:
    """The limit for a command: two steps and `APPLY_S_MAX`."""
    return 2 * step_time_s + APPLY_S_MAX


def hang_limit_s(step_time_s: float) -> float:
    """The limit for the webhook of a hang: the time until it is critical, and `HANG_NOTICE_S`."""
    return max(HANG_STEPS * step_time_s, HANG_FLOOR_S) + HANG_NOTICE_S


def _found_in_time(outcome: SceneResult, injected: Injected) -> list[SceneCheck]:
    scene, steps, seconds = outcome.scene, outcome.found_steps, outcome.found_s
    if scene.fault is FaultKind.HANG and seconds is not None:
        return [_in_time(f"{scene.title}: found", seconds, hang_limit_s(outcome.step_time_s))]
    steps_max = {FaultKind.SLOW: STRAGGLER_STEPS_MAX, FaultKind.NAN: 0, FaultKind.BIT_FLIP: FINGERPRINT_STEPS}.get(
        scene.fault
    )
    if steps_max is None:
        return []
    right = steps is not None and 0 <= steps <= steps_max
    reported = "in its step" if steps_max == 0 else f"within {steps_max} steps"
    return [SceneCheck(f"{scene.title}: found {reported}", right, f"{steps} steps after step {injected.step}")]


def unexpected(incidents: Sequence[Mapping[str, Any]], outcomes: Sequence[SceneResult]) -> list[SceneCheck]:
    """Only the expected incidents may open, each once."""
    expected = {outcome.incident["id"] for outcome in outcomes if outcome.incident}
    others = [incident for incident in incidents if incident["id"] not in expected]
    reported = "; ".join(f"{incident['kind']} {incident['scope']}: {incident['summary']}" for incident in others)
    return [SceneCheck("nothing else opened", not others, reported)]


def webhooks(received: Sequence[Received], outcomes: Sequence[SceneResult]) -> list[SceneCheck]:
    """Every webhook must be signed, and each incident must be opened and resolved by exactly one webhook."""
    forged = [webhook for webhook in received if not webhook.verified]
    results = [
        SceneCheck(
            "all webhooks have a valid signature", not forged, f"{len(received)} received, {len(forged)} not valid"
        )
    ]
    reported = [(webhook.incident, webhook.type, webhook.transition) for webhook in received]
    doubled = len(reported) - len(set(reported))
    results.append(SceneCheck("no webhook was received twice", doubled == 0, f"{doubled} doubled"))
    for kind in ("incident.opened", "incident.resolved"):
        have = sorted(incident for incident, what, _ in reported if what == kind)
        want = sorted(outcome.incident["id"] for outcome in outcomes if outcome.incident)
        results.append(
            SceneCheck(f"one {kind} webhook for each incident", have == want, f"{len(have)} for {len(want)}")
        )
    return results


def mixed_weights(mixed: Sequence[tuple[str, int]], outcomes: Sequence[SceneResult]) -> list[SceneCheck]:
    """Replicas may differ only from the flipped bit to the end of its attempt."""
    flips = [outcome.injected for outcome in outcomes if outcome.scene.fault is FaultKind.BIT_FLIP]
    excused = [
        (attempt, step)
        for attempt, step in mixed
        if any(flip is not None and flip.attempt == attempt and step >= flip.step for flip in flips)
    ]
    others = [place for place in mixed if place not in excused]
    reported = ", ".join(f"step {step} of {attempt}" for attempt, step in others[:5])
    what = "replicas were equal at every step" + (", but for the flipped bit" if flips else "")
    return [SceneCheck(what, not others, reported)]
