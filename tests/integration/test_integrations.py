"""Real jobs with the frameworks themselves, given real orders: pause, checkpoint, rollback, stop.

What they say of faults is in tests/adoption, with the same scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.adoption.cases import CASES, NEW_STORE, Case
from tests.adoption.world import Job, World, opened_world
from tests.support.trials.selection import long_trial

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.ci, pytest.mark.timeout(400)]

BY_RELAUNCH = ("hf_trainer", "lightning_trainer", "fabric_loop", "accelerate_loop", "deepspeed_loop")
"""Scripts of tests/adoption with one line of an integration; they save every 40 steps, into `out`."""
WITHIN_THE_PROCESSES = ("megatron_loop", "torchtitan_loop")
"""Those with hooks of their own, which can go back without a relaunch."""
SAVE_ON_ORDER = (*BY_RELAUNCH[:2], *BY_RELAUNCH[3:], *WITHIN_THE_PROCESSES)
"""All but Fabric's."""
LIKE_OTHERS = ("fabric_loop", "accelerate_loop")
"""The other five stand for them here; `make long` gives them orders too."""
STEPS = "1000000"
"""More than a job makes until it is stopped."""
GO_ON_STEPS = 5
WITHIN_S = 120.0
ORDERED_MAX = 3


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with opened_world(tmp_path_factory.mktemp("integrations")) as world:
        yield world


class Trained:
    """A job under a service, as an engineer sees it."""

    def __init__(self, world: World, job: Job) -> None:
        self.service = world.service
        self.job = job
        self.path = f"/api/v1/jobs/{job.name}"

    @property
    def step(self) -> int:
        return self.service.find(self.path).get("step") or 0

    @property
    def attempt(self) -> str:
        return self.service.find(self.path).get("attempt") or ""

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        return self.service.items(f"{self.path}/checkpoints")

    def until(self, what: str, true: Callable[[], Any]) -> None:
        self.job.until(what, lambda: true() or self._still_runs(what), WITHIN_S)

    def goes_on(self) -> None:
        since = self.step
        self.until("further steps", lambda: self.step >= since + GO_ON_STEPS)

    def order(self, action: str, **params: str) -> dict[str, Any]:
        """Order something, and wait until all ranks have done it; returns the command.

        It is ordered again where it failed: an order is given up when an agent is silent for 2 s, as all are on a
        machine that stands still for as long.
        """
        for _ in range(ORDERED_MAX):
            state = self._ordered(action, params)
            if state["state"] != "failed":
                break
        assert state["state"] == "applied", f"{state}\n{self.job.output}"
        return state

    def _ordered(self, action: str, params: dict[str, str]) -> dict[str, Any]:
        wanted = {"action": action, "reason": "a test", "params": params}
        command = self.service.write("POST", f"{self.path}/commands", wanted)["id"]
        final = ("applied", "refused", "expired", "failed", "cancelled")
        state: dict[str, Any] = {}

        def is_final() -> bool:
            state.update(self.service.get(f"/api/v1/commands/{command}"))
            return state["state"] in final

        self.job.until(f"the end of {action}", is_final, WITHIN_S)
        return state

    def _still_runs(self, what: str) -> bool:
        assert not self.job.ended, f"the job has ended before {what}\n{self.job.output}"
        return False


def script(name: str) -> Case:
    """A script that trains on until it is stopped, and is started again once."""
    case = next(case for case in CASES if case.name == name)
    return replace(case, launcher=("--max-restarts=1",), environment={"STEPS": STEPS, **NEW_STORE})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=long_trial if name in LIKE_OTHERS else ())
        for name in (*BY_RELAUNCH, *WITHIN_THE_PROCESSES)
    ],
)
def test_a_job_pauses_saves_goes_back_to_what_it_saved_and_stops(world: World, name: str) -> None:
    with world.job(script(name), None) as job:
        trained = Trained(world, job)
        trained.until("steps", lambda: trained.step >= GO_ON_STEPS)

        trained.order("pause")
        held = trained.step
        trained.order("resume")
        trained.until("training after the pause", lambda: trained.step >= held + GO_ON_STEPS)

        trained.until("a good checkpoint", lambda: any(one["verdict"] == "good" for one in trained.checkpoints))
        good = [one for one in trained.checkpoints if one["verdict"] == "good"]
        assert all(Path(one["location"]).exists() for one in good)
        if name in SAVE_ON_ORDER:
            step = trained.order("checkpoint")["applied_step"]
            trained.until("the ordered checkpoint", lambda: step in [one["step"] for one in trained.checkpoints])

        first = trained.attempt
        trained.order("rollback", mode="relaunch" if name in BY_RELAUNCH else "full")
        trained.until("the rollback", lambda: trained.attempt not in ("", first))
        trained.goes_on()
        assert name not in SAVE_ON_ORDER or f"goes on from {job.folder}/out/" in job.output
        assert trained.step >= min(one["step"] for one in good), "it began anew"

        trained.order("stop")
        assert job.process.wait(WITHIN_S) == 0, job.output
        assert [
            one for one in trained.service.items("/api/v1/incidents", job=job.name) if one["severity"] != "info"
        ] == []
