"""Train a small GPT on the text of Python's own language reference, watched by rankwatch.

    torchrun --nproc-per-node=4 --max-restarts=3 examples/train_gpt.py --steps 500

Plain PyTorch: DistributedDataParallel over NCCL where every rank has a GPU of its own, else over gloo. The lines that
rankwatch needs are marked with `# rankwatch`. Everything is decided by the seed: the batch of a step depends on
(seed, rank, step) alone, so a run that goes on from a checkpoint sees what the first one would have seen.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import rankwatch

VOCABULARY = 256
"""The text is read as bytes."""


@dataclass(frozen=True)
class Options:
    """What can be chosen on the command line; each field is an option."""

    steps: int = 500
    seed: int = 0
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64
    batch: int = 8
    """Sequences for each rank and step."""
    learning_rate: float = 1e-3
    clip: float = 1.0
    save_every: int = 100
    directory: str = "checkpoints"
    job: str = "gpt-small"


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each with a residual."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.heads = options.heads
        self.before_attention = nn.LayerNorm(options.width)
        self.project = nn.Linear(options.width, 3 * options.width)
        self.attended = nn.Linear(options.width, options.width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(options.width),
            nn.Linear(options.width, 4 * options.width),
            nn.GELU(),
            nn.Linear(4 * options.width, options.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Transform activations of shape (batch, position, width)."""
        heads = self.project(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attention = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(attention.transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class GPT(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, options.width)
        self.position = nn.Parameter(0.02 * torch.randn(options.context, options.width))
        self.blocks = nn.Sequential(*(Block(options) for _ in range(options.layers)))
        self.head = nn.Sequential(nn.LayerNorm(options.width), nn.Linear(options.width, VOCABULARY))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of shape (batch, position, vocabulary) for tokens of shape (batch, position)."""
        return self.head(self.blocks(self.token(tokens) + self.position[: tokens.shape[1]]))


class Corpus:
    """The text that every Python installation has, about half a megabyte."""

    def __init__(self, options: Options, rank: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
        self.options = options
        self.rank = rank

    def batch(self, step: int) -> Tensor:
        """Tokens of shape (batch, context + 1) for this rank's step."""
        choice = torch.Generator().manual_seed((self.options.seed << 48) + (self.rank << 32) + step)
        starts = torch.randint(len(self.tokens) - self.options.context - 1, (self.options.batch, 1), generator=choice)
        return self.tokens[starts + torch.arange(self.options.context + 1)]


class Checkpoints:
    """Model and optimizer on disk, written by rank 0 and read by every rank."""

    def __init__(self, directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        self.directory = directory
        self.model = model
        self.optimizer = optimizer
        self.rank = rank

    def save(self, step: int) -> str:
        """Save the state before `step`; return where it is."""
        path = self.directory / f"step-{step:08d}.pt"
        if self.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": step}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)  # a reader sees the whole file or none
        return str(path)

    def load(self, location: str) -> int:
        """Load what `save` wrote; return the step to go on from."""
        state = torch.load(location, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])


def train(options: Options, rank: int, device: torch.device) -> None:
    """Train until the last step, or until told to stop."""
    torch.manual_seed(options.seed)
    model = GPT(options).to(device)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    corpus = Corpus(options, rank)
    checkpoints = Checkpoints(Path(options.directory), model, optimizer, rank)

    watch = rankwatch.start(job=options.job)  # rankwatch
    watch.torch(replica, optimizer)  # rankwatch: gradient norms, NaN by parameter, fingerprints, waits
    watch.on_checkpoint(checkpoints.save)  # rankwatch
    watch.on_rollback(lambda checkpoint: checkpoints.load(checkpoint.location))  # rankwatch

    # After a relaunch: ranks may have heard different advice, so the first one decides.
    advice: list[Any] = [watch.resume and watch.resume.location]
    dist.broadcast_object_list(advice, src=0)
    first = checkpoints.load(advice[0]) if advice[0] else 0

    def make_batches(drawn: int) -> Iterator[Tensor]:
        return map(corpus.batch, itertools.count(first + drawn))

    # rankwatch: what a rollback restores, and where the data goes on from after it
    watch.state(model=model, optimizer=optimizer, data=make_batches, keep=3, every=50)

    for step in watch.steps(options.steps, start=first):  # rankwatch: pauses and rollbacks happen here
        with watch.phase("data_wait"):
            tokens = next(watch.batches).to(device, non_blocking=True)
        optimizer.zero_grad()
        logits = replica(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        watch.log(loss=loss, grad_norm=norm, tokens=tokens.numel())  # rankwatch: tensors are never waited for
        if (step + 1) % options.save_every == 0:
            begun = time.monotonic()
            with watch.phase("checkpoint_save"):
                location = checkpoints.save(step + 1)
            watch.checkpoint_saved(step + 1, location, seconds=time.monotonic() - begun)
        if rank == 0 and step % 10 == 0:
            print(f"step {step:6d}  loss {loss.item():.4f}", flush=True)


def options_from(arguments: list[str] | None = None) -> Options:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = Options()
    for name, default in vars(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    return Options(**vars(parser.parse_args(arguments)))


def main() -> None:
    options = options_from()
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        train(options, dist.get_rank(), device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
