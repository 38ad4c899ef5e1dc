"""Runs the demo from nothing to nothing: sets the stage, plays the script, judges it, and clears everything away."""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import signal
import tempfile
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
from rankwatch_service.demo.journal import Witness
from rankwatch_service.demo.play import FOUND_LIMIT_S, STEP_LIMIT_S, play
from rankwatch_service.demo.script import (
    BY_POLICY,
    SCENES,
    WARM_UP_STEPS,
    Check,
    Outcome,
    checks,
    mixed_weights,
    unexpected,
    webhooks,
)
from rankwatch_service.demo.services.backing import Backing, BackingError, stand_on
from rankwatch_service.demo.services.receiver import Receiver
from rankwatch_service.demo.services.service import Service, ServiceError
from rankwatch_service.demo.stage import NotInTimeError, Stage
from rankwatch_service.demo.view import View, table, verdict
from rankwatch_service.supervise import python_module

JOB = "gpt-demo"
WORLD_SIZE = 4
STEPS = 450
"""Steps of training, repeated ones counted again: a little more than the whole script takes."""
STEPS_MAX = 100_000
"""Training ends because it is told to stop; this is far beyond."""
START_LIMIT_S = 120.0
"""Patience for the first step: four processes import torch on shared cores."""
TABLE_COLUMNS = 150
"""Width of the closing table where the output is a file or a pipe."""
AGENT_END_S = 10.0
"""An agent ends by itself some seconds after its ranks."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the recorder's usual place


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    faults: bool = True
    keep: bool = False
    """Leave the service up at the end, until Ctrl-C."""
    port: int = 0
    """0: any free one."""
    steps: int = STEPS
    seed: int = 1
    backing: Backing = field(default_factory=Backing)


def _console() -> Console:
    """The terminal as it is; where there is none, lines wide enough for the table."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, TABLE_COLUMNS))


def run(options: Options, console: Console | None = None) -> int:
    """Run the demo.

    Returns:
        The exit status: 0 only if everything was found, told, mended and cleared away as it should be; 1 if not; 130
        after Ctrl-C, 143 after SIGTERM.
    """
    console = console or _console()
    outcomes = [Outcome(scene) for scene in SCENES] if options.faults else []
    try:
        with _terminable(), opened_stage(options, View(console, outcomes)) as stage:
            results = _perform(options, stage, outcomes)
            if options.keep:
                console.print(f"The service stays up until Ctrl-C: {stage.service.login_url}")
                with suppress(KeyboardInterrupt):
                    signal.pause()
    except BackingError as error:
        console.print(f"[bold red]{escape(str(error))}[/]")
        return 2
    except _TerminatedError:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0 if all(check.right for check in results) else 1


def _perform(options: Options, stage: Stage, outcomes: list[Outcome]) -> list[Check]:
    """Play, judge and tell."""
    with stage.view as view:
        view.headline(
            f"rankwatch demo: {WORLD_SIZE} ranks train a small GPT on Python's own documentation\n"
            f"{options.backing}\n"
            f"dashboard: {stage.service.login_url}"
        )
        results = _train(options, stage, outcomes)
        ended = processes.await_none(stage.name, AGENT_END_S, "rankwatch.agent")
        results.append(Check("the agent ended after its job", ended))
    if outcomes:
        view.console.print(table(outcomes))
    verdict(view.console, results)
    return results


@contextmanager
def opened_stage(options: Options, view: View) -> Iterator[Stage]:
    """Start a service and set up everything else, ranks not yet launched; at the end nothing of it is left."""
    with _folders() as (folder, recorder), ExitStack() as stack:
        # Whatever else leaves files, as torch's compiler cache does, leaves them here too.
        ours = {"RANKWATCH_DIR": recorder, "XDG_CONFIG_HOME": folder / "config", "TMPDIR": folder}
        environment = own_environment() | {name: str(path) for name, path in ours.items()}
        environment |= stack.enter_context(stand_on(options.backing, folder, os.environ))
        secret = "whsec_" + base64.b64encode(secrets.token_bytes(24)).decode()
        service = Service(folder / "service", options.port, environment)
        stack.callback(service.stop)
        service.start()
        if service.items("/api/v1/jobs"):
            raise BackingError("the database holds jobs already; the demo sets its own policy and wants an empty one")
        receiver = Receiver(secret)
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
        witness = Witness(folder / "journal", WORLD_SIZE)
        yield Stage(folder.name, JOB, launcher, witness, service, receiver, FaultFile(folder / "faults"), view)


def _configure(service: Service, receiver: Receiver, secret: str) -> None:
    """Tell the service whom to tell, and what it may do by itself."""
    service.write("POST", "/api/v1/receivers", {"name": "demo", "url": receiver.url, "secret": secret})
    rules = [{"id": scene.kind, "kind": scene.kind, "mode": "act", "action": scene.action} for scene in BY_POLICY]
    # Three actions in two minutes are what this script needs, and far more than a real job should allow.
    limits = {"actions_per_hour": 10, "cool_down_s": 5.0}
    service.write("PUT", "/api/v1/policy", {"rules": rules, "limits": limits})


def _train(options: Options, stage: Stage, outcomes: list[Outcome]) -> list[Check]:
    """Play all scenes and bring training to its end."""
    results: list[Check] = []
    try:
        stage.launcher.start()
        stage.wait_for_step(0, START_LIMIT_S)
        stage.wait_for_step(WARM_UP_STEPS, STEP_LIMIT_S)
        for outcome in outcomes:
            play(outcome, stage)
        left = options.steps - stage.witness.steps_trained
        stage.wait_for("end of training", STEP_LIMIT_S + max(left, 0), lambda: _has_trained(stage, options.steps))
        stop = stage.applied(stage.command("stop", "the demo is over")["id"], FOUND_LIMIT_S)
        stage.view.event(f"stopped at step {stop['applied_step']} on all ranks")
        stage.wait_for("end of all ranks", FOUND_LIMIT_S, lambda: stage.launcher.finished)
        if outcomes:
            stage.wait_for("last webhook", FOUND_LIMIT_S, lambda: _all_told(stage, outcomes))
        stage.wait_for_time(2.0)
    except (NotInTimeError, JobFailedError, ServiceError) as error:
        results.append(Check("the job trains to its end", False, str(error)))
    for outcome in outcomes:
        results += checks(outcome)
    results += unexpected(stage.incidents, outcomes)
    results += webhooks(stage.receiver.received, outcomes)
    results += mixed_weights(stage.witness.mixed(), outcomes)
    return results


def _has_trained(stage: Stage, steps: int) -> bool:
    return stage.witness.steps_trained >= steps


def _all_told(stage: Stage, outcomes: list[Outcome]) -> bool:
    told = {webhook.incident for webhook in stage.receiver.received if webhook.type == "incident.resolved"}
    return all(outcome.incident.get("id") in told for outcome in outcomes)


@contextmanager
def _folders() -> Iterator[tuple[Path, Path]]:
    """Make a folder for everything and one for the ranks' recorders; end who works there, and remove both."""
    folder = Path(tempfile.mkdtemp(prefix="rankwatch-demo-"))
    recorder = (SHARED_MEMORY if SHARED_MEMORY.is_dir() else folder) / folder.name
    recorder.mkdir(mode=0o700)
    try:
        yield folder, recorder
    finally:
        # A second Ctrl-C must not leave things behind; what follows takes seconds at most.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        processes.end_all(folder.name)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(recorder, ignore_errors=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _TerminatedError(BaseException):
    """SIGTERM came. Not an Exception, so that nothing on the way takes it for a failure of its own."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack as Ctrl-C does."""

    def terminate(_number: int, _frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _TerminatedError

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
