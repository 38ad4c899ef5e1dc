"""The demo's second part, beside the first: four ranks on simulated accelerators, one of which becomes too hot.

Its driver says that heat slows it down, its rank keeps the others waiting, and both are one incident with that cause.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rankwatch_service.demo.accelerator import DRIVER
from rankwatch_service.demo.job.launcher import Launcher
from rankwatch_service.demo.script import SceneCheck
from rankwatch_service.demo.services.service import ServiceProcess
from rankwatch_service.demo.view import DemoView
from rankwatch_service.supervise import python_module

JOB: Final = "gpu-demo"
RANK: Final = 2
"""The rank whose device becomes hot."""
WORLD_SIZE: Final = 4
WARM_UP_STEPS: Final = 60
"""Steps before, from which it is learned what is usual: a third of a minute."""
SLOWNESS: Final = 1.25
HOT: Final[Mapping[str, Any]] = {
    "slowness": {str(RANK): SLOWNESS},
    "celsius": {str(RANK): 91},
    "megahertz": {str(RANK): int(1980 / SLOWNESS)},
    "clock_reasons": {str(RANK): 0x40},
}
LOOK_S: Final = 0.5
TOLD_LIMIT_S: Final = 160.0
"""Limit from the heat to the incident with its cause: throttling is reported after a whole minute of it."""


class ThrottledJob:
    """The second job. Call `poll` often."""

    def __init__(self, folder: Path, service: ServiceProcess, environment: Mapping[str, str], view: DemoView) -> None:
        """Nothing is started yet; everything is kept under `folder`."""
        self._service = service
        self._view = view
        self._state = folder / "devices.json"
        recorder = Path(environment["RANKWATCH_DIR"]) / JOB
        recorder.mkdir(mode=0o700)
        path = os.pathsep.join(filter(None, (str(DRIVER), environment.get("PYTHONPATH"))))
        ours = {"RANKWATCH_DIR": str(recorder), "PYTHONPATH": path, "SIMULATED_NVML": str(self._state)}
        own = folder / JOB
        own.mkdir()
        command = python_module("rankwatch_service.demo.job.accelerated_rank", "--job", JOB, "--directory", str(own))
        self._launcher = Launcher(command, WORLD_SIZE, JOB, own / "ranks", {**environment, **ours}, restarts_max=0)
        self._looked_s = 0.0
        self._hot_step: int | None = None
        self._hot_s = 0.0
        self._straggler: dict[str, Any] | None = None
        self._incident: dict[str, Any] | None = None
        self.results: list[SceneCheck] = []
        """The checks of this part, once it is over."""

    def start(self) -> None:
        """Launch the ranks."""
        self._set({})
        self._launcher.start()

    def stop(self) -> None:
        """End the ranks."""
        self._launcher.stop()

    @property
    def done(self) -> bool:
        """Whether all that is waited for has happened, or will not happen any more."""
        return bool(self.results)

    def poll(self) -> None:
        """Let the device become hot when what is usual is known, and look for what is told of it.

        Raises:
            JobFailedError: a rank died.
        """
        self._launcher.poll()
        now_s = time.monotonic()
        if now_s < self._looked_s + LOOK_S or self.done:
            return
        self._looked_s = now_s
        step = self._service.find(f"/api/v1/jobs/{JOB}").get("step") or 0
        if self._hot_step is None:
            if step >= WARM_UP_STEPS:
                self._set(HOT)
                self._hot_step, self._hot_s = step, now_s
                self._view.event(f"{JOB}, step {step}: GPU {RANK} is too hot and lowers its clock (rank {RANK})")
            return
        found = self._service.items("/api/v1/incidents", job=JOB)
        self._look(found)
        if self._incident is not None or now_s > self._hot_s + TOLD_LIMIT_S:
            self.results = self._checks(found)

    def _look(self, incidents: list[dict[str, Any]]) -> None:
        slow = next((one for one in incidents if one["kind"] == "straggler"), None)
        if slow is not None and self._straggler is None:
            self._straggler = slow
            self._view.event(f"{JOB}, incident: {slow['summary']}")
        degraded = next((one for one in incidents if one["kind"] == "device_degraded" and one["consequences"]), None)
        if degraded is not None:
            self._incident = degraded
            self._view.event(f"{JOB}, its cause: {degraded['summary']}")

    def _checks(self, found: list[dict[str, Any]]) -> list[SceneCheck]:
        title, slow, whole = "a throttled GPU", self._straggler or {}, self._incident or {}
        others = [one["summary"] for one in found if one["ranks"] != [RANK]]
        after = (slow.get("detected_step") or 0) - (self._hot_step or 0)
        consequences = [one["kind"] for one in whole.get("consequences", [])]
        standing = [one for one in found if one["state"] != "resolved"]
        return [
            SceneCheck(f"{title}: rank {RANK} named, with cause device", self._is_named(slow), f"after {after} steps"),
            SceneCheck(
                f"{title}: one incident, the straggler its consequence",
                consequences == ["straggler"] and len(standing) == 1,
                f"{len(standing)} open; consequences: {', '.join(consequences) or 'none'}",
            ),
            SceneCheck(f"{title}: nothing else opened", not others, "; ".join(others)),
        ]

    def _is_named(self, slow: Mapping[str, Any]) -> bool:
        return list(slow.get("ranks", [])) == [RANK] and slow.get("cause") == "device"

    def _set(self, state: Mapping[str, Any]) -> None:
        fresh = self._state.with_suffix(".new")
        fresh.write_text(json.dumps(state))
        fresh.replace(self._state)
