"""The parts of a running demo (ranks, journals, service, receiver, display), and the loop that polls them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rankwatch_service.demo.job.faults import FaultFile
from rankwatch_service.demo.job.launcher import Launcher
from rankwatch_service.demo.journal import JournalReader
from rankwatch_service.demo.services.receiver import WebhookReceiver
from rankwatch_service.demo.services.service import ServiceProcess
from rankwatch_service.demo.throttled import ThrottledJob
from rankwatch_service.demo.view import DemoView

POLL_S = 0.02
REFRESH_S = 0.25
"""Interval between two requests for the state of the job."""

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
            if self.beside.done:
                self.beside.stop()  # the cores are for the first job now
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
        """Ask the service to command the job, as an engineer would."""
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
