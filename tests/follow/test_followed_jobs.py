"""Logs of four trainers, followed by real processes into a real service: what happens in them is found."""

from __future__ import annotations

import contextlib
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from rankwatch.follow.rows import End, LoggedStep
from rankwatch.follow.sources import FollowedLog
from rankwatch_service.demo.processes import own_environment
from rankwatch_service.demo.service import ServiceProcess
from tests.support.trainer_logs import FORMATS, LineOf

pytestmark = [pytest.mark.integration, pytest.mark.ci, pytest.mark.timeout(400)]

LINE_S = 0.1
LONG_BEFORE = 300
"""Lines that were written before the log is followed: a curve that is no longer young."""
SPIKE, NAN = 340, 370
ENDS = 400
"""The last line: from then on the log does not grow."""
FOUND_S = 150.0
"""On a busy machine too few readings come within ten seconds for a usual pace: then a hang is told after 60 s."""

CRITICAL_S = 59.0
"""From this age on a hang may be critical: `HangConfig.pause_s`, less one interval of blocks."""


def loss_at(step: int, random_number: random.Random) -> float:
    if step == NAN:
        return math.nan
    usual = 2.5 + 6 * math.exp(-step / 60) + random_number.gauss(0, 0.02)
    return usual * 4 if SPIKE <= step < SPIKE + 3 else usual


@dataclass(frozen=True)
class Followed:
    """What was found in a log, and what its follower said."""

    kinds: dict[str, dict]
    output: str
    code: int | None


class World:
    """A service, and followers beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        home = {"XDG_CONFIG_HOME": str(folder / "config"), "HOME": str(folder), "RANKWATCH_DIR": str(folder / "rings")}
        self._environment = own_environment() | home
        self.service = ServiceProcess(folder / "service", 0, self._environment)

    @contextlib.contextmanager
    def following(self, job: str, log: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", "rankwatch_service.cli", "follow", str(log), "--job", job, *more]
        with (self._folder / f"{job}.output").open("wb") as output:
            process = subprocess.Popen(command, env=self._environment, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(10)

    def output(self, job: str) -> str:
        return (self._folder / f"{job}.output").read_text()

    def kinds(self, job: str) -> dict[str, dict]:
        """The newest incident of each kind, those that are consequences of others too."""
        found = {}
        for incident in self.service.items("/api/v1/incidents", job=job, order="oldest"):
            found[incident["kind"]] = incident
        return found

    def _has_ended_in_a_hang(self, job: str) -> bool:
        """Whether the log is read to its end, where it hangs: a machine that stood still is a hang before it, too."""
        hang = self.kinds(job).get("hang", {"state": ""})
        return hang["state"] == "open" and self.service.find(f"/api/v1/jobs/{job}")["step"] == ENDS

    def followed(self, job: str, line_of: LineOf) -> Followed:
        """Follow a log of 300 lines that grows by a hundred, with a spike and a NaN, and then no more."""
        log, chance = self._folder / f"{job}.txt", random.Random(job)
        log.write_text("".join(line_of(step, loss_at(step, chance)) for step in range(1, LONG_BEFORE)))
        with self.following(job, log) as process, log.open("a") as growing:
            for step in range(LONG_BEFORE, ENDS + 1):
                text = line_of(step, loss_at(step, chance))
                growing.write(text[:20])
                growing.flush()
                time.sleep(LINE_S / 2)
                growing.write(text[20:])
                growing.flush()
                time.sleep(LINE_S / 2)
            deadline_s = time.monotonic() + FOUND_S
            while time.monotonic() < deadline_s and not self._has_ended_in_a_hang(job):
                time.sleep(0.2)
        return Followed(self.kinds(job), self.output(job), process.returncode)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("follow"))
    made.service.start()
    yield made
    made.service.stop()


@pytest.fixture(scope="module")
def followed(world: World) -> dict[str, Followed]:
    with ThreadPoolExecutor(len(FORMATS)) as pool:
        return dict(zip(FORMATS, pool.map(lambda name: world.followed(name, FORMATS[name]), FORMATS), strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_a_nan_a_spike_and_a_hang_are_found_in_a_log(followed: dict[str, Followed], name: str):
    found = followed[name]
    assert found.kinds.keys() == {"loss_spike", "nonfinite", "hang"}, (found.kinds, found.output)
    assert found.kinds["loss_spike"]["onset_step"] == SPIKE
    assert found.kinds["nonfinite"]["onset_step"] == NAN
    hang = found.kinds["hang"]
    # An evaluation looks the same. Where a busy machine makes no pace known, it is told a minute late, as critical.
    assert hang["severity"] == "info" or hang["evidence"]["age_s"] >= CRITICAL_S, hang
    assert f"as job '{name}'" in found.output
    assert found.code == 0
    states = [one for key, one in walk(found.kinds["hang"]["evidence"]) if key == "os_state"]
    assert set(states) <= {"?", ""}, "the state of the follower's process says nothing of the rank"


def walk(evidence: object) -> Iterator[tuple[str, object]]:
    """All keys of nested evidence, with their values."""
    if isinstance(evidence, dict):
        for key, value in evidence.items():
            yield key, value
            yield from walk(value)
    elif isinstance(evidence, list):
        for value in evidence:
            yield from walk(value)


SCRIPT = """
import time
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

data = [{"input_ids": torch.arange(16) % 7, "labels": torch.arange(16) % 7}] * 64
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2))
arguments = TrainingArguments(
    output_dir="out", use_cpu=True, max_steps=8, logging_steps=2, save_steps=4, report_to=[], disable_tqdm={quiet},
    per_device_train_batch_size=4,
)
class Slow(TrainerCallback):
    def on_step_begin(self, *_, **__):
        time.sleep(0.2)  # a progress bar shows at most ten steps a second

Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Slow()]).train()
"""


@pytest.mark.parametrize("quiet", [True, False])
def test_its_lines_and_its_state_have_the_same_steps(tmp_path: Path, quiet: bool):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    log = tmp_path / "train.log"
    with log.open("wb") as output:
        command = [sys.executable, "-c", SCRIPT.replace("{quiet}", str(quiet))]
        subprocess.run(command, cwd=tmp_path, env=environment, stdout=output, stderr=output, check=True, timeout=200)
    lines = list(FollowedLog(log, None).read())
    printed = [entry for entry in lines if isinstance(entry, LoggedStep)]
    # Without the progress bar its lines do not say their step.
    assert [step.step for step in printed] == ([1, 2, 3, 4] if quiet else [2, 4, 6, 8])
    assert lines[-1] == End()
    saved = [entry for entry in FollowedLog(tmp_path / "out", None).read() if isinstance(entry, LoggedStep)]
    assert [step.step for step in saved] == [2, 4, 6, 8]
    for one, other in zip(printed, saved, strict=True):
        assert one.values["loss"] == pytest.approx(other.values["loss"], rel=1e-3)
        assert one.values["grad_norm"] == pytest.approx(other.values["grad_norm"], rel=1e-3)
