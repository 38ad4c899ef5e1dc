"""The demo: starts everything, injects one fault after the other, checks the results and cleans up."""

from __future__ import annotations

import base64
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.markup import escape

from rankwatch import children
from rankwatch_service.demo import processes
from rankwatch_service.demo.display import DemoView, table, verdict
from rankwatch_service.demo.processes import JobFailedError, Launcher, own_environment
from rankwatch_service.demo.rank_files import Armed, FaultFile, FaultKind, Injected, JournalReader
from rankwatch_service.demo.script import (
    ARM_AHEAD_STEPS,
    BY_POLICY,
    FINGERPRINT_STEPS,
    SCENES,
    SETTLE_STEPS,
    WARM_UP_STEPS,
    SceneCheck,
    SceneResult,
    checks,
    mixed_weights,
    unexpected,
    webhooks,
)
from rankwatch_service.demo.service import ServiceError, ServiceProcess, WebhookReceiver
from rankwatch_service.demo.throttled import REPORTED_LIMIT_S, ThrottledJob

JOB = "gpt-demo"
WORLD_SIZE = 4
STEPS = 450
"""Steps of training, with repeated steps counted again: slightly more than the script takes."""
START_LIMIT_S = 120.0
"""Limit of the wait for the first step: four processes import torch on shared cores."""
TABLE_COLUMNS = 150
"""Width of the closing table where the output is a file or a pipe."""
AGENT_END_S = 10.0
"""Agents exit a few seconds after their ranks."""
KEEP_POLL_S = 0.25
"""How often ranks that have ended are looked for while the job is kept."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the recorder's usual place
POLL_S = 0.02
REFRESH_S = 0.25
"""Interval between two requests for the state of the job."""
STEP_LIMIT_S = 60.0
"""Limit of waits for a step; training makes about ten steps a second."""
FOUND_LIMIT_S = 30.0
"""Limit of waits for an incident or a command. Whether it was fast enough is judged later."""
REPAIR_S = 1.0
"""How long the on-call engineer needs to remove the load from the slow rank's machine while the job is paused."""

T = TypeVar("T")


class NotInTimeError(Exception):
    """Something did not happen in time; the message says what."""


@dataclass
class Stage:
    """Holds the parts of one demo; `wait_for` is the only place where time passes."""

    name: str
    """Unique name, which every process of this demo has in its environment or command line."""
    job: str
    launcher: Launcher
    journals: JournalReader
    service: ServiceProcess
    receiver: WebhookReceiver
    faults: FaultFile
    view: DemoView
    beside: ThrottledJob | None = None
    """The second job, which is polled too."""
    seen: Mapping[str, Any] = field(default_factory=dict)
    """The job as the service reports it; empty until it knows the job."""
    incidents: list[dict[str, Any]] = field(default_factory=list)
    _refreshed_s: float = 0.0

    def poll(self) -> None:
        """Poll the launcher, the journals and the service, and update the display.

        Raises:
            JobFailedError: the job died more often than its launcher allows.
        """
        if self.launcher.poll():
            self.view.event(f"launcher: a rank died, all ranks start again as {self.launcher.launch}")
        if self.beside is not None:
            self.beside.poll()
        self.journals.look()
        now_s = time.monotonic()
        if now_s - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = now_s
            self._refresh()
        self.view.progress(self.seen, self.journals.attempt, self.journals.step, self.journals.step_time_s())

    def wait_for(self, what: str, limit_s: float, condition: Callable[[], T | None]) -> T:
        """Poll until `condition` returns something true, and return it.

        Raises:
            NotInTimeError: `limit_s` passed.
        """
        deadline_s = time.monotonic() + limit_s
        while True:
            self.poll()
            if result := condition():
                return result
            if time.monotonic() > deadline_s:
                raise NotInTimeError(f"no {what} within {limit_s:g} s")
            time.sleep(POLL_S)

    def wait_for_step(self, step: int, limit_s: float) -> None:
        """Wait until all ranks have finished `step` of the newest attempt."""
        self.wait_for(f"step {step}", limit_s, lambda: self.journals.step >= step)

    def wait_for_time(self, seconds: float) -> None:
        """Keep polling for this time."""
        until_s = time.monotonic() + seconds
        self.wait_for("end of a wait", 2 * seconds, lambda: time.monotonic() >= until_s)

    def command(self, action: str, reason: str) -> dict[str, Any]:
        """Request a command of the job, as an engineer would."""
        return self.service.write("POST", f"/api/v1/jobs/{self.job}/commands", {"action": action, "reason": reason})

    def applied(self, command_id: str, limit_s: float) -> dict[str, Any]:
        """Wait until all ranks have applied a command.

        Raises:
            NotInTimeError: it was refused, it failed, or it was not answered in time.
        """

        def finished() -> dict[str, Any] | None:
            command = self.service.get(f"/api/v1/commands/{command_id}")
            return command if command["state"] in ("applied", "refused", "expired", "failed", "cancelled") else None

        command = self.wait_for("answer to a command", limit_s, finished)
        if command["state"] != "applied":
            raise NotInTimeError(f"{command['action']} was {command['state']}: {command['result']}")
        return command

    def _refresh(self) -> None:
        self.incidents = self.service.items("/api/v1/incidents", job=self.job)
        self.seen = self.service.find(f"/api/v1/jobs/{self.job}")


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


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of `rankwatch demo`."""

    faults: bool = True
    keep: bool = False
    """Keep the service and a job without faults running at the end, until Ctrl-C."""
    port: int = 0
    """0: any free port."""
    steps: int = STEPS
    seed: int = 1


def _console() -> Console:
    """The terminal; without one, a console wide enough for the table."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, TABLE_COLUMNS))


def run(options: DemoOptions, console: Console | None = None) -> int:
    """Run the demo.

    Returns:
        The exit status: 0 if every check passed, 1 if one failed, 130 after Ctrl-C, 143 after SIGTERM.
    """
    console = console or _console()
    outcomes = [SceneResult(scene) for scene in SCENES] if options.faults else []
    try:
        with _terminable(), opened_stage(options, DemoView(console, outcomes)) as stage:
            results = _perform(options, stage, outcomes)
            if options.keep:
                with suppress(KeyboardInterrupt):
                    _keep(stage, console)
    except _TerminatedError:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0 if all(check.right for check in results) else 1


def _perform(options: DemoOptions, stage: Stage, outcomes: list[SceneResult]) -> list[SceneCheck]:
    """Play the script, check it and print the results."""
    with stage.view as view:
        view.headline(
            f"rankwatch demo: {WORLD_SIZE} ranks train a small GPT on Python's own documentation\n"
            f"dashboard: {stage.service.login_url}"
        )
        results = _train(options, stage, outcomes)
        ended = processes.await_none(stage.name, AGENT_END_S, "rankwatch.agent")
        results.append(SceneCheck("the agent ended after its job", ended))
    if outcomes:
        view.console.print(table(outcomes))
    verdict(view.console, results)
    return results


def _keep(stage: Stage, console: Console) -> NoReturn:
    """Train on without faults, as a job to pause and roll back by hand, until Ctrl-C or SIGTERM."""
    link = stage.service.login_link()
    if stage.launcher.finished:
        stage.launcher.start()
    console.print(f"{JOB} trains on until Ctrl-C. To log in, once and within 10 minutes: {link}", soft_wrap=True)
    while True:
        try:
            stage.launcher.poll()
        except JobFailedError as error:
            console.print(f"[bold red]{escape(str(error))}[/]")
            signal.pause()
        time.sleep(KEEP_POLL_S)


@contextmanager
def opened_stage(options: DemoOptions, view: DemoView) -> Iterator[Stage]:
    """Set up everything but the ranks; everything is removed at the end."""
    with _folders() as (folder, recorder), ExitStack() as stack:
        # Other files, such as torch's compiler cache, are removed with this folder.
        ours = {"RANKWATCH_DIR": recorder, "RANKWATCH_SPOOL": folder / "spool"}
        ours |= {"XDG_CONFIG_HOME": folder / "config", "TMPDIR": folder}
        environment = own_environment() | {name: str(path) for name, path in ours.items()}
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(24)).decode()
        service = ServiceProcess(folder / "service", options.port, environment)
        stack.callback(service.stop)
        service.start()
        receiver = WebhookReceiver(secret)
        stack.callback(receiver.close)
        _configure(service, receiver, secret)
        arguments = ("--job", JOB, "--seed", str(options.seed), "--directory", str(folder))
        command = children.python_module("rankwatch_service.demo.training", *arguments)
        launcher = Launcher(command, WORLD_SIZE, JOB, folder / "ranks", environment)
        stack.callback(launcher.stop)
        beside = ThrottledJob(service, view) if options.faults else None
        if beside is not None:
            stack.callback(beside.stop)
        journals = JournalReader(folder / "journal", WORLD_SIZE)
        faults = FaultFile(folder / "faults")
        yield Stage(folder.name, JOB, launcher, journals, service, receiver, faults, view, beside)


def _configure(service: ServiceProcess, receiver: WebhookReceiver, secret: str) -> None:
    """Configure the receiver and the policy."""
    service.write("POST", "/api/v1/receivers", {"name": "demo", "url": receiver.url, "secret": secret, "jobs": [JOB]})
    rules = [{"id": scene.kind, "kind": scene.kind, "mode": "act", "action": scene.action} for scene in BY_POLICY]
    # The script needs three actions in two minutes, far more than a real job should allow.
    limits = {"actions_per_hour": 10, "cool_down_s": 5.0}
    service.write("PUT", "/api/v1/policy", {"rules": rules, "limits": limits})


def _train(options: DemoOptions, stage: Stage, outcomes: list[SceneResult]) -> list[SceneCheck]:
    """Play all scenes, then stop training."""
    results: list[SceneCheck] = []
    try:
        stage.launcher.start()
        if stage.beside is not None:
            stage.beside.start()
        stage.wait_for_step(0, START_LIMIT_S)
        stage.wait_for_step(WARM_UP_STEPS, STEP_LIMIT_S)
        for outcome in outcomes:
            play(outcome, stage)
        left = options.steps - stage.journals.steps_trained
        stage.wait_for("end of training", STEP_LIMIT_S + max(left, 0), lambda: _has_trained(stage, options.steps))
        stop = stage.applied(stage.command("stop", "the demo is over")["id"], FOUND_LIMIT_S)
        stage.view.event(f"stopped at step {stop['applied_step']} on all ranks")
        stage.wait_for("end of all ranks", FOUND_LIMIT_S, lambda: stage.launcher.finished)
        if outcomes:
            stage.wait_for("last webhook", FOUND_LIMIT_S, lambda: _all_reported(stage, outcomes))
        if stage.beside is not None:
            stage.wait_for("end of the second job", REPORTED_LIMIT_S, lambda: stage.beside is None or stage.beside.done)
            results += stage.beside.results
        stage.wait_for_time(2.0)
    except (NotInTimeError, JobFailedError, ServiceError) as error:
        results.append(SceneCheck("the job trains to its end", False, str(error)))
    for outcome in outcomes:
        results += checks(outcome)
    results += unexpected(stage.incidents, outcomes)
    results += webhooks(stage.receiver.received, outcomes)
    results += mixed_weights(stage.journals.mixed(), outcomes)
    return results


def _has_trained(stage: Stage, steps: int) -> bool:
    return stage.journals.steps_trained >= steps


def _all_reported(stage: Stage, outcomes: list[SceneResult]) -> bool:
    reported = {webhook.incident for webhook in stage.receiver.received if webhook.type == "incident.resolved"}
    return all(outcome.incident.get("id") in reported for outcome in outcomes)


@contextmanager
def _folders() -> Iterator[tuple[Path, Path]]:
    """Make a folder for the demo and one for the recorders; at the end, stop their processes and remove both."""
    folder = Path(tempfile.mkdtemp(prefix="rankwatch-demo-"))
    recorder = (SHARED_MEMORY if SHARED_MEMORY.is_dir() else folder) / folder.name
    recorder.mkdir(mode=0o700)
    try:
        yield folder, recorder
    finally:
        # A second Ctrl-C must not interrupt the clean-up, which takes seconds at most.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        processes.end_all(folder.name)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(recorder, ignore_errors=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _TerminatedError(BaseException):
    """SIGTERM was received. A BaseException, so that no handler of errors catches it."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM unwind the stack as Ctrl-C does."""

    def terminate(_number: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
