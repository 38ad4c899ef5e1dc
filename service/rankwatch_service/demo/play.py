"""Plays one scene: arms its fault, waits for the incident, lets training be brought back, and notes what happened."""

from __future__ import annotations

from typing import Any

from rankwatch_service.demo.job.faults import Armed, Fault, Injected
from rankwatch_service.demo.script import (
    ARM_AHEAD_STEPS,
    FINGERPRINT_STEPS,
    SETTLE_STEPS,
    Outcome,
)
from rankwatch_service.demo.stage import NotInTimeError, Stage

STEP_LIMIT_S = 60.0
"""Patience for training to get somewhere; it makes some ten steps a second."""
FOUND_LIMIT_S = 30.0
"""Patience for an incident to open, a command to be applied, an incident to resolve. The figures are judged later."""
REPAIR_S = 1.0
"""How long the engineer on call needs to take the load off the slow rank's machine, while the job is paused."""


def play(outcome: Outcome, stage: Stage) -> None:
    """Play one scene to its end. What is not seen in time ends it, and stands in `outcome.state`."""
    try:
        _play(outcome, stage)
    except NotInTimeError as error:
        outcome.state = str(error)
        stage.view.event(f"{outcome.scene.title}: {error}")
    finally:
        stage.faults.arm([])


def _play(outcome: Outcome, stage: Stage) -> None:
    scene = outcome.scene
    known = {incident["id"] for incident in stage.incidents}
    armed = Armed(scene.fault, scene.rank, stage.witness.attempt, _due_step(scene.fault, stage.witness.step))
    outcome.step_time_s = stage.witness.step_time_s()
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
    stage.view.event(f"recovered: {scene.title}, training is at step {stage.witness.step} of {stage.witness.attempt}")


def _due_step(fault: Fault, step: int) -> int:
    due = step + ARM_AHEAD_STEPS
    # A bit that flips in a fingerprint's own step is found at once; between two it has to wait.
    return due - due % FINGERPRINT_STEPS + FINGERPRINT_STEPS // 2 if fault is Fault.BIT_FLIP else due


def _new_incident(stage: Stage, kind: str, known: set[str]) -> dict[str, Any] | None:
    """The incident of this kind that was not there before the fault."""
    new = (incident for incident in stage.incidents if incident["id"] not in known)
    return next((incident for incident in new if incident["kind"] == kind), None)


def _note_finding(outcome: Outcome, injected: Injected, stage: Stage) -> None:
    incident = outcome.incident
    webhook = stage.wait_for(
        "webhook",
        FOUND_LIMIT_S,
        lambda: next(
            (w for w in stage.receiver.received if (w.incident, w.type) == (incident["id"], "incident.opened")), None
        ),
    )
    outcome.found_s = (webhook.unix_ns - injected.unix_ns) / 1e9
    if outcome.scene.fault is Fault.HANG:
        return
    decided_unix_ns = injected.unix_ns
    if outcome.scene.fault is not Fault.KILL:
        step = incident["detected_step"]
        outcome.found_steps = step - injected.step
        decided_unix_ns = stage.witness.ended_unix_ns(injected.attempt, step) or injected.unix_ns
    outcome.noticed_s = (webhook.unix_ns - decided_unix_ns) / 1e9


def _pause_and_repair(outcome: Outcome, stage: Stage) -> None:
    requested = stage.command("pause", f"on call: {outcome.scene.title}")
    outcome.command = stage.applied(requested["id"], FOUND_LIMIT_S)
    _note_applied(outcome)
    stage.view.event(f"paused at step {outcome.applied_step} on all ranks; the load is taken off")
    held_at = stage.witness.step
    outcome.resumed_step = outcome.applied_step
    stage.faults.arm([])
    stage.wait_for_time(REPAIR_S)
    if stage.witness.step != held_at:
        raise NotInTimeError(f"standstill: step {held_at} became {stage.witness.step} in a pause")
    stage.applied(stage.command("resume", "on call: the load is off")["id"], FOUND_LIMIT_S)


def _await_rollback(outcome: Outcome, stage: Stage) -> None:
    outcome.command = stage.wait_for("rollback by policy", FOUND_LIMIT_S, lambda: _command_for(outcome, stage))
    outcome.command = stage.applied(outcome.command["id"], FOUND_LIMIT_S)
    _note_applied(outcome)
    attempt = outcome.command["attempt"]
    stage.wait_for("step after the rollback", STEP_LIMIT_S, lambda: stage.witness.attempt != attempt)
    outcome.resumed_step = stage.witness.first_step(stage.witness.attempt)
    stage.view.event(f"rolled back at step {outcome.applied_step} on all ranks, to step {outcome.resumed_step}")


def _await_launch(outcome: Outcome, injected: Injected, stage: Stage) -> None:
    launch = injected.attempt.rpartition(".")[0]
    stage.wait_for(
        "new launch",
        STEP_LIMIT_S,
        lambda: stage.witness.attempt.rpartition(".")[0] != launch and stage.witness.step >= 0,
    )
    outcome.command = _command_for(outcome, stage) or {}
    outcome.applied_step = injected.step
    outcome.resumed_step = stage.witness.first_step(stage.witness.attempt)
    stage.view.event(f"launched again, from step {outcome.resumed_step}")


def _await_recovery(outcome: Outcome, injected: Injected, stage: Stage) -> None:
    incident_id = outcome.incident["id"]

    def resolved() -> dict[str, Any] | None:
        found = next((incident for incident in stage.incidents if incident["id"] == incident_id), None)
        return found if found and found["state"] == "resolved" else None

    outcome.incident = stage.wait_for("end of the incident", STEP_LIMIT_S, resolved)
    stage.wait_for_step(stage.witness.step + SETTLE_STEPS, STEP_LIMIT_S)
    outcome.recovered_s = (outcome.incident["resolved_unix_ns"] - injected.unix_ns) / 1e9
    outcome.incident = stage.service.get(f"/api/v1/incidents/{incident_id}")


def _command_for(outcome: Outcome, stage: Stage) -> dict[str, Any] | None:
    """The command that policy gave for this incident."""
    commands = stage.service.items("/api/v1/commands", job=stage.job)
    return next((command for command in commands if command["incident_id"] == outcome.incident["id"]), None)


def _note_applied(outcome: Outcome) -> None:
    command = outcome.command
    outcome.applied_step = command["applied_step"]
    outcome.applied_s = (command["applied_unix_ns"] - command["requested_unix_ns"]) / 1e9
