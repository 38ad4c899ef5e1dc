"""Commands to four training ranks while anything of rankwatch, or a rank, is killed at any moment of hold, do, go.

Whatever happens: ranks never stand at different steps or with different weights, and training goes on within the
lease. The witnesses are the ranks' own journals. `RANKWATCH_COMMAND_TRIALS` sets the number of trials and
`RANKWATCH_COMMAND_SEED` what they draw.
"""

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from rankwatch.spawn import ensure_agent
from rankwatch_service.demo.display import DemoView
from rankwatch_service.demo.processes import working_for
from rankwatch_service.demo.scenario import START_LIMIT_S, DemoOptions, Stage, opened_stage
from rankwatch_service.demo.service import ServiceError

pytestmark = [pytest.mark.integration, pytest.mark.ci, pytest.mark.torch]

TRIALS = int(os.environ.get("RANKWATCH_COMMAND_TRIALS", "4"))
SEED = int(os.environ.get("RANKWATCH_COMMAND_SEED", "1"))
ACTIONS = ("pause", "checkpoint", "rollback")
VICTIMS = ("api", "agent worker", "rank", "agent", "stream", "nobody")
"""In turn."""
KILL_WITHIN_S = 0.8
"""An order takes about half a second from request to go: kills fall before, into and after every phase."""
LEASE_S = {"pause": 60.0, "checkpoint": 120.0, "rollback": 120.0}
"""The longest that a rank may stand still when everything that could tell it to go on is gone."""
LAUNCH_S = 60.0
GO_ON_STEPS = 5
GOOD_LIMIT_S = 60.0
FINAL = ("applied", "refused", "expired", "failed", "cancelled")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    view = DemoView(Console(file=StringIO(), force_terminal=False), [])
    with opened_stage(DemoOptions(seed=SEED), view) as stage:
        stage.launcher.restarts_max = TRIALS
        stage.launcher.start()
        stage.wait_for_step(0, START_LIMIT_S)
        stage.wait_for("job in the service", START_LIMIT_S, lambda: stage.seen)
        yield stage


@pytest.mark.timeout(300)
@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_command_is_obeyed_by_all_ranks_at_one_step_or_by_none_whoever_is_killed(stage: Stage, trial: int) -> None:
    draw = random.Random(f"{SEED}/{trial}")
    action, victim, after_s = draw.choice(ACTIONS), VICTIMS[trial % len(VICTIMS)], draw.uniform(0.0, KILL_WITHIN_S)
    reported = f"trial {trial}: {action}, {victim} killed after {after_s:.3f} s"
    await_good_checkpoint(stage)
    command = stage.command(action, reported)
    stage.wait_for_time(after_s)
    kill(stage, victim, draw)

    limit_s = LEASE_S[action] + LAUNCH_S
    finished = stage.wait_for(f"end of {reported}", limit_s, lambda: final_state(stage, command["id"]))
    if action == "pause" and finished["state"] == "applied":
        resume(stage)
    print(f"{reported}: {finished['state']} {finished['result']}")
    goes_on_from = (stage.journals.attempt, stage.journals.step)
    stage.wait_for(f"training after {reported}, {finished['state']}", limit_s, lambda: has_gone_on(stage, goes_on_from))

    assert stage.journals.mixed() == [], reported
    assert stage.journals.ragged() == [], reported


def await_good_checkpoint(stage: Stage) -> None:
    """A rollback needs somewhere to go: wait for a checkpoint of this launch that proved good."""

    def good() -> bool:
        launch = stage.journals.attempt.rpartition(".")[0]
        entries = stage.service.items(f"/api/v1/jobs/{stage.job}/checkpoints")
        return any(entry["verdict"] == "good" and entry["attempt"].startswith(f"{launch}.") for entry in entries)

    stage.wait_for("good checkpoint", GOOD_LIMIT_S, good)


def final_state(stage: Stage, command_id: str) -> dict[str, Any] | None:
    command = stage.service.get(f"/api/v1/commands/{command_id}")
    return command if command["state"] in FINAL else None


def resume(stage: Stage) -> None:
    try:
        stage.command("resume", "enough")
    except ServiceError:
        # The paused attempt may be gone by now; that training goes on is what is asked next.
        return


def has_gone_on(stage: Stage, since: tuple[str, int]) -> bool:
    attempt, step = since
    return stage.journals.step >= (step + GO_ON_STEPS if stage.journals.attempt == attempt else 0)


def kill(stage: Stage, victim: str, draw: random.Random) -> None:
    """SIGKILL. What restarts itself is left to that; an agent that is wholly gone gets a successor."""
    if victim == "rank":
        stage.launcher.ranks[draw.randrange(stage.launcher.world_size)].send_signal(signal.SIGKILL)
    elif victim in ("api", "stream"):
        kill_all(working_for(stage.name, f"rankwatch_service\0{victim}"))
    elif victim == "agent worker":
        kill_all(working_for(stage.name, "\0--worker"))
    elif victim == "agent":
        kill_all(working_for(stage.name, "rankwatch.agent"))
        environment = stage.launcher.environment
        # The lock of a killed process is free only when the kernel has cleared all of it away.
        stage.wait_for("agent", 10.0, lambda: ensure_agent(environment["RANKWATCH_DIR"], stage.job, environment))


def kill_all(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
