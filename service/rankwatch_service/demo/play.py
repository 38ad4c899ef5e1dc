"""Plays one scene: arms its fault, waits for the incident and the recovery, and records what happened."""

from __future__ import annotations

from typing import Any

from rankwatch_service.demo.job.faults import Armed, FaultKind, Injected
from rankwatch_service.demo.script import (
    ARM_AHEAD_STEPS,
    FINGERPRINT_STEPS,
    SETTLE_STEPS,
    SceneResult,
)
from rankwatch_service.demo.stage import NotInTimeError, Stage

STEP_LIMIT_S = 60.0
"""Limit of waits for a step; training makes about ten steps a second."""
FOUND_LIMIT_S = 30.0
"""Limit of waits for an incident or a command. Whether it was fast enough is judged later."""
REPAIR_S = 1.0
"""How long the on-call engineer needs to remove the load from the slow rank's machine while the job is paused."""


def play(outcome: SceneResult, stage: Stage) -> None:
    """Play one scene. If something does not happen in time, the scene ends and `outcome.state` says what."""
    try:
        _play(outcome, stage)
    except NotInTimeError as error:
        outcome.state = str(error)
        stage.view.event(f"{outcome.scene.title}: {error}")
    finally:
        stage.faults.arm([])


def _play(outcome: SceneResult, stage: Stage) -> None:
    scene = outcome.scene
    known = {incident["id"] for incident in stage.incidents}
    armed = Armed(scene.fault, scene.rank, stage.journals.attempt, _due_step(scene.fault, stage.journals.step))
    outcome.step_time_s = stage.journals.step_time_s()
    stage.faults.arm([armed])
    outcome.state = "armed"
    injected = stage.wait_for("fault", STEP_LIMIT_S, lambda: stage.faults.injected(armed))
    outcome.injected, outcome.state = injected, "injected"
    stage.view.event(f"step {injected.step}: {scene.title} (rank {scene.rank})")

    outcome.incident = stage.wait_for(
        f"{scene.kind} incident", FOUND_LIMIT_S, lambda: _new_incident(stage, scene.kind, known)
    )
    outcome.state = "opened"
    _note_finding(outcome, injected, stage)
    stage.view.event(f"incident: {outcome.incident['summary']}")

    outcome.state = "acting"
    if scene.action == "pause":
        _pause_and_repair(outcome, stage)
    elif scene.action == "rollback":
        _await_rollback(outcome, stage)
    else:
        _await_launch(outcome, injected, stage)
    outcome.state = "recovering"
    _await_recovery(outcome, injected, stage)
    outcome.state = "recovered"
    stage.view.event(f"recovered: {scene.title}, training is at step {stage.journals.step} of {stage.journals.attempt}")


def _due_step(fault: FaultKind, step: int) -> int:
    due = step + ARM_AHEAD_STEPS
    # Halfway between two fingerprints, since a bit that flips in a step with one is found at once.
    return due - due % FINGERPRINT_STEPS + FINGERPRINT_STEPS // 2 if fault is FaultKind.BIT_FLIP else due


def _new_incident(stage: Stage, kind: str, known: set[str]) -> dict[str, Any] | None:
    """The incident of this kind that was not there before the fault."""
    new = (incident for incident in stage.incidents if incident["id"] not in known)
    return next((incident for incident in new if incident["kind"] == kind), None)


def _note_finding(outcome: SceneResult, injected: Injected, stage: Stage) -> None:
    incident = outcome.incident
    webhook = stage.wait_for(
        "webhook",
        FOUND_LIMIT_S,
        lambda: next(
            (w for w in stage.receiver.received if (w.incident, w.type) == (incident["id"], "incident.opened")), None
        ),
    )
    outcome.found_s = (webhook.unix_ns - injected.unix_ns) / 1e9
    if outcome.scene.fault is FaultKind.HANG:
        return
    decided_unix_ns = injected.unix_ns
    if outcome.scene.fault is not FaultKind.KILL:
        step = incident["detected_step"]
        outcome.found_steps = step - injected.step
        decided_unix_ns = stage.journals.ended_unix_ns(injected.attempt, step) or injected.unix_ns
    outcome.noticed_s = (webhook.unix_ns - decided_unix_ns) / 1e9


def _pause_and_repair(outcome: SceneResult, stage: Stage) -> None:
    requested = stage.command("pause", f"on call: {outcome.scene.title}")
    outcome.command = stage.applied(requested["id"], FOUND_LIMIT_S)
    _note_applied(outcome)
    stage.view.event(f"paused at step {outcome.applied_step} on all ranks; the load is removed")
    held_at = stage.journals.step
    outcome.resumed_step = outcome.applied_step
    stage.faults.arm([])
    stage.wait_for_time(REPAIR_S)
    if stage.journals.step != held_at:
        raise NotInTimeError(f"standstill: step {held_at} became {stage.journals.step} in a pause")
    stage.applied(stage.command("resume", "on call: the load is removed")["id"], FOUND_LIMIT_S)


def _await_rollback(outcome: SceneResult, stage: Stage) -> None:
    outcome.command = stage.wait_for("rollback by policy", FOUND_LIMIT_S, lambda: _command_for(outcome, stage))
    outcome.command = stage.applied(outcome.command["id"], FOUND_LIMIT_S)
    _note_applied(outcome)
    attempt = outcome.command["attempt"]
    stage.wait_for("step after the rollback", STEP_LIMIT_S, lambda: stage.journals.attempt != attempt)
    outcome.resumed_step = stage.journals.first_step(stage.journals.attempt)
    stage.view.event(f"rolled back at step {outcome.applied_step} on all ranks, to step {outcome.resumed_step}")


def _await_launch(outcome: SceneResult, injected: Injected, stage: Stage) -> None:
    launch = injected.attempt.rpartition(".")[0]
    stage.wait_for(
        "new launch",
        STEP_LIMIT_S,
        lambda: stage.journals.attempt.rpartition(".")[0] != launch and stage.journals.step >= 0,
    )
    outcome.command = _command_for(outcome, stage) or {}
    outcome.applied_step = injected.step
    outcome.resumed_step = stage.journals.first_step(stage.journals.attempt)
    stage.view.event(f"relaunched, from step {outcome.resumed_step}")


def _await_recovery(outcome: SceneResult, injected: Injected, stage: Stage) -> None:
    incident_id = outcome.incident["id"]

    def resolved() -> dict[str, Any] | None:
        found = next((incident for incident in stage.incidents if incident["id"] == incident_id), None)
        return found if found and found["state"] == "resolved" else None

    outcome.incident = stage.wait_for("end of the incident", STEP_LIMIT_S, resolved)
    stage.wait_for_step(stage.journals.step + SETTLE_STEPS, STEP_LIMIT_S)
    outcome.recovered_s = (outcome.incident["resolved_unix_ns"] - injected.unix_ns) / 1e9
    outcome.incident = stage.service.get(f"/api/v1/incidents/{incident_id}")


def _command_for(outcome: SceneResult, stage: Stage) -> dict[str, Any] | None:
    """The command that a policy rule requested for this incident."""
    commands = stage.service.items("/api/v1/commands", job=stage.job)
    return next((command for command in commands if command["incident_id"] == outcome.incident["id"]), None)


def _note_applied(outcome: SceneResult) -> None:
    command = outcome.command
    outcome.applied_step = command["applied_step"]
    outcome.applied_s = (command["applied_unix_ns"] - command["requested_unix_ns"]) / 1e9
