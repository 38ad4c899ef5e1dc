"""One rank of the demo's job, written as a user writes a training script, with the faults and the journal added.

A small GPT over bytes learns the language reference that every Python installation includes. It trains with plain DDP
over gloo, gives rankwatch its model and optimizer, saves to disk now and then, and goes on from the checkpoint that
rankwatch advises when its launcher starts it again. Equal seeds give equal training: the batch of a step depends only
on (seed, rank, step), so an iterator can be rebuilt at any position.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import rankwatch
from rankwatch_service.clock import SystemClock
from rankwatch_service.demo.rank_files import Armed, FaultKind, Injected, Journal, mark_path
from rankwatch_service.supervise import die_with_parent

VOCABULARY = 256
CONTEXT = 64
WIDTH = 128
HEADS = 4
LAYERS = 3
BATCH = 8


class GPT(nn.Module):
    """Predicts the next byte at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.before = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        """Each position sees those before it."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, position, vocabulary) for tokens of shape (batch, position)."""
        x = self.blocks(self.token(tokens) + self.position, self.before, is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def corpus() -> Tensor:
    """The help texts of Python's own language reference (about 700 KB) as one row of bytes."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def batches(text: Tensor, seed: int, rank: int, start_step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (inputs, targets) for `start_step` and every later step; each rank gets different text."""
    step = start_step
    generator = torch.Generator()
    while True:
        generator.manual_seed((seed * 1_000_003 + rank) * 1_000_003 + step)
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
        rows = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
        yield rows[:, :-1], rows[:, 1:]
        step += 1


def weights_sum(model: nn.Module) -> int:
    """Sum the bits of all parameters as 32-bit words: equal on equal replicas."""
    return sum(int(parameter.detach().view(torch.int32).sum(dtype=torch.int64)) for parameter in model.parameters())


MANTISSA_BIT = 12
"""The bit that flips: in the middle of float32's mantissa, 0.05 % of the weight, which no loss curve shows."""


class FaultyRank:
    """One rank's own faults. The two calls cost a few microseconds while no fault is armed."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._armed_file = directory / "armed.json"
        self._rank = rank
        self._clock = SystemClock()
        self._stamp_ns = 0
        self._armed: list[Armed] = []
        self._now: Armed | None = None
        self._compute_began_s = time.thread_time()
        self._compute_s = 0.0
        self._burnt_s = 0.0

    def begin_step(self, attempt: str, step: int, model: nn.Module) -> None:
        """Find the fault armed for this step; inject it now if it needs the model (bit flip, NaN)."""
        now_s = time.thread_time()
        self._compute_s = now_s - self._compute_began_s - self._burnt_s
        self._compute_began_s, self._burnt_s = now_s, 0.0
        self._reload()
        self._now = next((fault for fault in self._armed if _is_due(fault, attempt, step)), None)
        if self._now is None:
            return
        self._note(self._now, attempt, step)
        if self._now.fault is FaultKind.BIT_FLIP:
            flip_bit(_middle(model))
        elif self._now.fault is FaultKind.NAN:
            poison_next_gradient(_middle(model))

    def in_forward(self) -> None:
        """Inject this step's fault if it is a slow step, a hang or a kill."""
        if self._now is None:
            return
        if self._now.fault is FaultKind.SLOW:
            began_s = time.thread_time()
            while time.thread_time() - began_s < self._compute_s:
                pass
            self._burnt_s = time.thread_time() - began_s
        elif self._now.fault is FaultKind.HANG:
            loop_forever()
        elif self._now.fault is FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)

    def _reload(self) -> None:
        try:
            stamp_ns = self._armed_file.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if stamp_ns == self._stamp_ns:
            return
        self._stamp_ns = stamp_ns
        listed = json.loads(self._armed_file.read_text())
        faults = [Armed(FaultKind(row["fault"]), row["rank"], row["attempt"], row["step"]) for row in listed]
        self._armed = [fault for fault in faults if fault.rank == self._rank]

    def _note(self, armed: Armed, attempt: str, step: int) -> None:
        path = mark_path(self._directory, armed)
        if path.exists():
            return
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(Injected(attempt, step, self._clock.unix_ns()))))
        fresh.replace(path)


def flip_bit(parameter: Tensor) -> None:
    """Flip one mantissa bit of the parameter's first element, as defective hardware would."""
    parameter.detach().view(torch.int32).view(-1)[0] ^= 1 << MANTISSA_BIT


def poison_next_gradient(parameter: Tensor) -> None:
    """Inject one NaN into this parameter's next gradient, before the reduction."""

    def poison(gradient: Tensor) -> Tensor:
        handle.remove()
        poisoned = gradient.clone()
        poisoned.view(-1)[0] = float("nan")
        return poisoned

    handle = parameter.register_hook(poison)  # type: ignore[no-untyped-call]


def _middle(model: nn.Module) -> nn.Parameter:
    parameters = list(model.parameters())
    return parameters[len(parameters) // 2]


def loop_forever() -> None:
    """Loop for ever."""
    while True:
        pass


def _is_due(armed: Armed, attempt: str, step: int) -> bool:
    if armed.attempt != attempt:
        return False
    return step >= armed.step if armed.fault is FaultKind.SLOW else step == armed.step


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
STEPS_MAX = 100_000
"""Training ends by a stop command; this limit is never reached."""
COLLECTIVE_LIMIT = timedelta(minutes=10)
"""torch's time-out for a hung rank: the usual value, far longer than the demo needs."""


@dataclass(frozen=True)
class RankOptions:
    """The options that the launcher gives to every rank."""

    job: str
    seed: int
    directory: Path


def main() -> None:
    """Train until a stop command."""
    parser = argparse.ArgumentParser(description="one rank of the demo's training job")
    parser.add_argument("--job", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    options = RankOptions(**vars(parser.parse_args()))
    rank, launch = int(os.environ["RANK"]), os.environ["RANKWATCH_LAUNCH"]
    die_with_parent(os.getppid())()
    torch.set_num_threads(1)
    # Ranks meet by a file, since another program could take a port in between.
    meet, world_size = f"file://{options.directory}/store-{launch}", int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world_size, timeout=COLLECTIVE_LIMIT)
    try:
        train(options, rank, launch)
    finally:
        dist.destroy_process_group()


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
    for step in watch.steps(STEPS_MAX, start=first_step):
        faulty.begin_step(watch.attempt, step, model)
        with watch.phase("data_wait"):
            inputs, targets = next(watch.batches)
        loss = functional.cross_entropy(replica(inputs).reshape(-1, VOCABULARY), targets.reshape(-1))
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
