"""ZeRO in real training by DeepSpeed on 4 gloo ranks: what each rank records, and what the service makes of it."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankwatch.integrations.deepspeed import EngineLoop
from rankwatch.meter import EXACT_METRICS
from rankwatch_detectors.base import Kind
from tests.support.ranks.gloo import on_ranks
from tests.support.ranks.recorders import Rank
from tests.support.ranks.sink import reported_of

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.ci, pytest.mark.timeout(300)]

RANKS = 4
STEPS, MICRO_BATCHES = 4, 2
BAD_STEP, BAD_RANK = 2, 1
STAGES = (1, 2, 3)
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 0.01,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 1_000_000,
}


def initialized(rank: int, **how: Any) -> Any:
    """An engine as `deepspeed.initialize` makes it, by gloo and without compiled operators."""
    import deepspeed

    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(RANKS))
    deepspeed.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 12), nn.LayerNorm(12), nn.Linear(12, 3))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG | how)
    return engine


def train(rank: int, fault: str, **how: Any) -> dict[str, Any]:
    engine = initialized(rank, **how)
    with tempfile.TemporaryDirectory() as folder:
        own = Rank(Path(folder), rank)
        EngineLoop(engine, own.watch)
        norms = []
        for step in range(STEPS):
            for micro in range(MICRO_BATCHES):
                x = torch.randn(8, 12, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
                y = engine(x)
                if (fault, rank, step, micro) == ("nan", BAD_RANK, BAD_STEP, 0):
                    y.register_hook(lambda gradient: gradient * math.nan)
                engine.backward(y.square().mean())
                engine.step()
            norms.append(float(engine.get_global_grad_norm()))
        recorded = [entry.values for entry in own.entries if hasattr(entry, "busy_s")]
        assert own.watch.errors == 0, own.watch.last_error
        assert own.recorder.dropped == {}
        return {
            "norms": norms,
            "declared": own.recorder._identity,
            "steps": [
                (
                    {name: value for name, value in values.items() if name not in EXACT_METRICS},
                    {name: value for name, value in values.items() if name in EXACT_METRICS},
                )
                for values in recorded
            ],
        }


def everything(rank: int) -> dict[str, Any]:
    zero = {stage: {"zero_optimization": {"stage": stage}} for stage in STAGES}
    results = {f"{stage}": train(rank, "", **how) for stage, how in zero.items()}
    return results | {f"{stage} nan": train(rank, "nan", **how) for stage, how in zero.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(RANKS, everything)


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_of_the_whole_from_the_ranks_parts_is_the_engines(ranks, stage):
    frames, findings = reported_of(ranks, f"{stage}")
    assert len(frames) == STEPS
    for frame, expected in zip(frames, ranks[0][f"{stage}"]["norms"], strict=True):
        assert frame.values["grad_norm"] == pytest.approx([expected] * RANKS, rel=1e-5)
    own = [one[f"{stage}"]["steps"][0][0]["grad_norm.0"] for one in ranks]
    assert len(set(own)) == RANKS  # and no rank has sent that of the whole
    assert findings == []


@pytest.mark.parametrize("stage", STAGES)
def test_without_the_part_of_a_rank_no_norm_is_measured(ranks, stage):
    frames, _ = reported_of(ranks, f"{stage}", missing=[(3, 1)])
    assert {frame.step: "grad_norm" in frame.values for frame in frames} == {0: True, 1: False, 2: True, 3: True}


@pytest.mark.parametrize("stage", STAGES)
def test_a_nan_in_any_micro_batch_names_the_rank_and_the_parameter_in_its_step(ranks, stage):
    frames, findings = reported_of(ranks, f"{stage} nan")
    (finding,) = [finding for finding in findings if finding.kind is Kind.NONFINITE]
    assert (finding.onset_step, finding.ranks) == (BAD_STEP, (BAD_RANK,))
    assert finding.evidence["parameter"] in ("4.weight", "4.bias")
    assert math.isnan(frames[BAD_STEP].values["grad_norm"][0])
