"""One rank of the demo's job, written as a user writes a training script, with the faults and the journal added.

It trains with plain DDP over gloo, gives rankwatch its model and optimizer, saves to disk now and then, and goes on
from the checkpoint that rankwatch advises when its launcher starts it again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import rankwatch
from rankwatch_service.demo.job.faulty_rank import FaultyRank
from rankwatch_service.demo.job.model import GPT, batches, corpus, loss_of, weights_sum
from rankwatch_service.demo.job.process_group import joined_group
from rankwatch_service.demo.journal import Journal

LEARNING_RATE = 1e-3
GRADIENT_NORM_MAX = 1.0
FINGERPRINT_STEPS = 10
"""Steps between two fingerprints of the weights."""
MEMORY_STEPS = 20
"""Steps between two checkpoints in memory."""
MEMORY_KEPT = 6
"""Checkpoints kept in memory, 8 MB each: 120 steps, more than the detection of any fault of the demo takes."""
DISK_STEPS = 40
"""Steps between two checkpoints on disk."""


@dataclass(frozen=True)
class RankOptions:
    """The options that the launcher gives to every rank."""

    job: str
    seed: int
    max_steps: int
    directory: Path


def main() -> None:
    """Train until `max_steps` or a stop command."""
    parser = argparse.ArgumentParser(description="one rank of the demo's training job")
    parser.add_argument("--job", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    options = RankOptions(**vars(parser.parse_args()))
    with joined_group(options.directory) as (rank, _):
        train(options, rank, os.environ["RANKWATCH_LAUNCH"])


def train(options: RankOptions, rank: int, launch: str) -> None:
    """Build the model, hand it to rankwatch, and train."""
    torch.manual_seed(options.seed)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    replica = DistributedDataParallel(model)
    text = corpus()

    def load(location: str) -> int:
        state = torch.load(location, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])

    def save(step: int) -> str:
        path = options.directory / "checkpoints" / f"{launch}-{step:06d}.pt"
        path.parent.mkdir(exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        # Renamed when complete, so that a reader never sees a part of the file.
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
        return str(path)

    watch = rankwatch.start(job=options.job, relaunches=True)
    # Ranks may read different advice while it is being written, so rank 0 decides.
    advice = [watch.resume.location if watch.resume else ""]
    dist.broadcast_object_list(advice, src=0)
    first_step = load(advice[0]) if advice[0] else 0

    def make_batches(position: int) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(text, options.seed, rank, first_step + position)

    watch.torch(replica, optimizer, fingerprint_every=FINGERPRINT_STEPS)
    watch.state(model=model, optimizer=optimizer, data=make_batches, every=MEMORY_STEPS, keep=MEMORY_KEPT)

    faulty = FaultyRank(options.directory / "faults", rank)
    model.norm.register_forward_pre_hook(lambda *_: faulty.in_forward())
    journal = Journal(options.directory / "journal", launch, rank)
    for step in watch.steps(options.max_steps, start=first_step):
        faulty.begin_step(watch.attempt, step, model)
        with watch.phase("data_wait"):
            inputs, targets = next(watch.batches)
        loss = loss_of(replica(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        grad_norm = clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()
        watch.log(loss=loss, grad_norm=grad_norm, tokens=inputs.numel())
        journal.write(watch.attempt, step, weights_sum(model))
        if rank == 0 and (step + 1) % DISK_STEPS == 0:
            watch.checkpoint_saved(step + 1, save(step + 1), shards=1)


if __name__ == "__main__":
    main()
