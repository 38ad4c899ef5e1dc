"""Runs the demo: starts everything, plays the script, checks the results and cleans up."""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

from rankwatch_service.demo.job import processes
from rankwatch_service.demo.job.faults import FaultFile
from rankwatch_service.demo.job.launcher import JobFailedError, Launcher, own_environment
from rankwatch_service.demo.journal import JournalReader
from rankwatch_service.demo.play import FOUND_LIMIT_S, STEP_LIMIT_S, play
from rankwatch_service.demo.script import (
    BY_POLICY,
    SCENES,
    WARM_UP_STEPS,
    SceneCheck,
    SceneResult,
    checks,
    mixed_weights,
    unexpected,
    webhooks,
)
from rankwatch_service.demo.services.backing import Backing, BackingError, stand_on
from rankwatch_service.demo.services.receiver import WebhookReceiver
from rankwatch_service.demo.services.service import ServiceError, ServiceProcess
from rankwatch_service.demo.stage import NotInTimeError, Stage
from rankwatch_service.demo.throttled import TOLD_LIMIT_S, ThrottledJob
from rankwatch_service.demo.view import DemoView, table, verdict
from rankwatch_service.supervise import python_module

JOB = "gpt-demo"
WORLD_SIZE = 4
STEPS = 450
"""Steps of training, with repeated steps counted again: slightly more than the script takes."""
STEPS_MAX = 100_000
"""Training ends by a stop command; this limit is never reached."""
START_LIMIT_S = 120.0
"""Limit of the wait for the first step: four processes import torch on shared cores."""
TABLE_COLUMNS = 150
"""Width of the closing table where the output is a file or a pipe."""
AGENT_END_S = 10.0
"""Agents exit a few seconds after their ranks."""
KEEP_POLL_S = 0.25
"""How often ranks that have ended are looked for while the job is kept."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the recorder's usual place


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
    backing: Backing = field(default_factory=Backing)


def _console() -> Console:
    """The terminal; without one, a console wide enough for the table."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, TABLE_COLUMNS))


def run(options: DemoOptions, console: Console | None = None) -> int:
    """Run the demo.

    Returns:
        The exit status: 0 if every check passed, 1 if one failed, 2 if the broker or database cannot be used, 130
        after Ctrl-C, 143 after SIGTERM.
    """
    console = console or _console()
    outcomes = [SceneResult(scene) for scene in SCENES] if options.faults else []
    try:
        with _terminable(), opened_stage(options, DemoView(console, outcomes)) as stage:
            results = _perform(options, stage, outcomes)
            if options.keep:
                with suppress(KeyboardInterrupt):
                    _keep(stage, console)
    except BackingError as error:
        console.print(f"[bold red]{escape(str(error))}[/]")
        return 2
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
            f"{options.backing}\n"
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
        ours = {"RANKWATCH_DIR": recorder, "XDG_CONFIG_HOME": folder / "config", "TMPDIR": folder}
        environment = own_environment() | {name: str(path) for name, path in ours.items()}
        environment |= stack.enter_context(stand_on(options.backing, folder, os.environ))
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(24)).decode()
        service = ServiceProcess(folder / "service", options.port, environment)
        stack.callback(service.stop)
        service.start()
        if service.items("/api/v1/jobs"):
            raise BackingError("the database has jobs; the demo sets its own policy and needs an empty database")
        receiver = WebhookReceiver(secret)
        stack.callback(receiver.close)
        _configure(service, receiver, secret)
        arguments = (
            "--job",
            JOB,
            "--seed",
            str(options.seed),
            "--max-steps",
            str(STEPS_MAX),
            "--directory",
            str(folder),
        )
        command = python_module("rankwatch_service.demo.job.training", *arguments)
        launcher = Launcher(command, WORLD_SIZE, JOB, folder / "ranks", environment)
        stack.callback(launcher.stop)
        beside = ThrottledJob(folder, service, environment, view) if options.faults else None
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
            stage.wait_for("last webhook", FOUND_LIMIT_S, lambda: _all_told(stage, outcomes))
        if stage.beside is not None:
            stage.wait_for("end of the second job", TOLD_LIMIT_S, lambda: stage.beside is None or stage.beside.done)
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


def _all_told(stage: Stage, outcomes: list[SceneResult]) -> bool:
    told = {webhook.incident for webhook in stage.receiver.received if webhook.type == "incident.resolved"}
    return all(outcome.incident.get("id") in told for outcome in outcomes)


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
