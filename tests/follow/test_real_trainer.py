"""What the Trainer of the installed transformers prints and saves is read as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankwatch.follow.rows import End, LoggedStep
from rankwatch.follow.sources import FollowedLog

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.ci]

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
