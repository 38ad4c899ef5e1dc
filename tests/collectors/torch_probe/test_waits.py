"""Which rank keeps the others waiting: four real ranks, on however few cores there are."""

import statistics
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch
from rankwatch.reader import RingReader, StepEntry
from tests.support.ranks.gloo import on_ranks

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.ci, pytest.mark.timeout(240)]

RANKS, SLOW, STEPS, SETTLED = 4, 2, 14, 4
COMPUTE_S = 0.02


def burn(cpu_s: float) -> None:
    """Compute for so long, whoever else wants the core."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


def train(rank: int, directory: str) -> None:
    watch = rankwatch.start(
        job="j",
        launch="l",
        rank=rank,
        world_size=RANKS,
        agent=False,
        stack_signal=None,
        env={"RANKWATCH_DIR": directory},
    )
    model = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch.torch(model, optimizer)
    for _ in watch.steps(STEPS):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 16)).square().sum()
        burn(COMPUTE_S * (2 if rank == SLOW else 1))
        loss.backward()
        optimizer.step()
        watch.log(loss=loss)
    assert watch.errors == 0
    watch.close()


@pytest.fixture(scope="module")
def entries(tmp_path_factory) -> list[list[StepEntry]]:
    """The settled steps of each rank, as its recorder has them."""
    directory = tmp_path_factory.mktemp("rings")
    on_ranks(RANKS, train, str(directory))
    by_rank = {}
    for path in Path(directory).glob("*.ring"):
        reader = RingReader(str(path))
        steps = [entry for entry in reader.poll().entries if isinstance(entry, StepEntry)]
        by_rank[reader.header.identity["rank"]] = steps[SETTLED:]
        assert reader.progress().collective_seq == STEPS
        reader.close()
    return [by_rank[rank] for rank in range(RANKS)]


def median(entries: list[StepEntry], field: str) -> float:
    return statistics.median(getattr(entry, field) for entry in entries)


def test_the_slow_rank_is_the_busiest_by_its_cpu_time(entries):
    busy = [median(steps, "busy_cpu_s") for steps in entries]
    others = [seconds for rank, seconds in enumerate(busy) if rank != SLOW]
    assert busy[SLOW] > 1.5 * max(others)


def test_the_slow_rank_waits_least_and_the_others_wait_for_it(entries):
    wait = [median(steps, "wait_s") for steps in entries]
    assert min(range(RANKS), key=wait.__getitem__) == SLOW
    assert statistics.median(wait) > COMPUTE_S / 2


def test_step_times_do_not_tell_which_rank_is_slow(entries):
    times = [median(steps, "step_time_s") for steps in entries]
    assert max(times) < 1.2 * min(times)


def test_phases_and_gradient_values_stand_in_the_step_s_own_entry(entries):
    for steps in entries:
        for entry in steps:
            assert {"forward", "backward", "collective", "optimizer"} <= set(entry.phases)
            assert {"loss", "grad_norm", "local_grad_norm", "nonfinite"} <= set(entry.values)
            assert ("fingerprint" in entry.values) == (entry.step % 10 == 0)
    assert len({steps[10 - SETTLED].values["fingerprint"] for steps in entries}) == 1
