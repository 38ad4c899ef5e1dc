"""What `watch.torch(...)` adds to a training step, part by part.

    python benchmarks/torch_probe.py [--rounds 40]
    python benchmarks/torch_probe.py --device cuda --bf16 --layers 12 --width 1024 --context 256 [--rounds 12]
    python benchmarks/torch_probe.py --before CHECKOUT [--rounds 40]

One model trains; in each round every variant of the probe, and no probe at all, gets one block of steps, in random
order. "added" is the lower quartile of its blocks less that of the bare blocks: what else runs on the machine only ever
adds. "in our hooks" is the median time that the training thread spends in the probe's own code, and its share of the
same steps: it sees no effect on what follows (caches), but is steady on a busy machine, where a difference of two large
numbers is not. On a CPU times are CPU time of the training thread. On CUDA they are wall time between two
synchronisations around the block, and within the steps torch raises at any synchronisation.

With --before, another checkout's `watch.torch` is measured alternately with this one's, each in a process of its own,
on models of 100 tensors whose steps take about 10 and 100 ms. A block has steps without and with the probe, one after
the other; what is printed is the median over all blocks of the part that the probe adds. "in our hooks" is the mean
CPU time within whatever torch or the loop calls of the probe, without the slowest tenth of a block's steps, over a
bare step: it can be told apart from the noise of a busy machine.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwatch.meter import StepMeter
from rankwatch.recorder import Recorder
from rankwatch.torch_probe import TorchProbe
from rankwatch.torch_probe.gradients import BackwardMarks
from rankwatch.torch_probe.phases import Mark
from tests.support.trials.checkouts import SIDES, alternately, serve

LAYERS, WIDTH, VOCABULARY = 6, 384, 256
HEAD_WIDTH, HEADS_MIN = 64, 4
SHORT, LONG = (8, 32, 2, 32, 20), (8, 128, 4, 96, 10)
"""Layers, width, sequences and tokens of a model of 100 tensors, and steps of a block."""
SETTLING_STEPS = 8
"""Steps of a new probe that are not measured: it makes its names and buffers, and chooses how often to measure."""
LOGGED = "all, the loop's total norm"
"""The loop logs what its clipping returned."""
NOTHING: dict[str, Any] = {"grad_norm": False, "local_gradients": False, "phases": False, "fingerprint_every": 0}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "no probe": None,
    "no probe, again": None,
    "total norm of our own": NOTHING | {"grad_norm": True},
    "local gradients": NOTHING | {"local_gradients": True},
    "phases and waits": NOTHING | {"phases": True},
    "fingerprint, each step": NOTHING | {"fingerprint_every": 1},
    "all, own total norm": {},
    LOGGED: {},
}


class MeasuredModel(nn.Module):
    """A transformer; by default of about 10 million parameters."""

    def __init__(self, context: int, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, max(width // HEAD_WIDTH, HEADS_MIN), 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next token at each place."""
        hidden = self.embedding(tokens) + self.position
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        return self.head(hidden)


class TrainingJob:
    """The training that is watched."""

    def __init__(
        self,
        device: torch.device,
        context: int,
        batch: int,
        ddp: bool,
        layers: int = LAYERS,
        width: int = WIDTH,
        bf16: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.bf16 = bf16
        self.model: nn.Module = MeasuredModel(context, layers, width).to(device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        if ddp:
            self.model = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(VOCABULARY, (batch, context + 1), device=device)

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Train one step; nothing in it waits for the device."""
        self.optimizer.zero_grad()
        with torch.autocast(self.tokens.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.model(self.tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss, norm


class OwnTime:
    """Adds up the time within what torch and the loop call of the probe."""

    ns = 0

    def watch(self, clock: Callable[[], int], owner: type, *names: str) -> None:
        """Time these methods of a class; none of them calls another one."""
        for name in names:
            setattr(owner, name, self._timed(clock, getattr(owner, name)))

    def _timed(self, clock: Callable[[], int], method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begun = clock()
            try:
                return method(*args)
            finally:
                self.ns += clock() - begun

        return timed


OWN = OwnTime()


def time_hooks() -> None:
    """Time what torch and the loop call of the probe."""
    OWN.watch(time.thread_time_ns, TorchProbe, "step_begin", "step_end", "log", "_before_update", "_after_update")
    OWN.watch(time.thread_time_ns, BackwardMarks, "_end_of_computing", "_end_of_reduction")
    OWN.watch(time.thread_time_ns, Mark, "__call__")
    # Called for each parameter: the clock of CPU time would take longer than what it measures.
    OWN.watch(time.perf_counter_ns, BackwardMarks, "_accumulated")


class MeasuredSteps:
    """A few steps of the job under one variant of the probe."""

    def __init__(self, job: TrainingJob, meter: StepMeter, device: torch.device, steps: int) -> None:
        self.job = job
        self.meter = meter
        self.device = device
        self.steps = steps
        self.step = 0

    def seconds(self, variant: str) -> tuple[float, float]:
        """Seconds for one step and, of them, in the probe; means over the block."""
        arguments = VARIANTS[variant]
        probe = None if arguments is None else TorchProbe(self.meter, self.job.model, self.job.optimizer, **arguments)
        logs_norm = variant == LOGGED
        clock: Callable[[], int] = time.thread_time_ns if self.device.type == "cpu" else time.perf_counter_ns
        with no_synchronization(self.device):
            self._step(probe, logs_norm)  # a probe's first step makes its names and buffers
        gc.collect()  # what making the probe left behind is not its cost in a step
        self._synchronize()
        OWN.ns = 0
        begin = clock()
        with no_synchronization(self.device):
            for _ in range(self.steps):
                self._step(probe, logs_norm)
        self._synchronize()
        taken = (clock() - begin) * 1e-9 / self.steps
        if probe is None:
            return taken, 0.0
        probe.close()
        return taken, OWN.ns * 1e-9 / self.steps

    def pair(self, logs_norm: bool) -> list[float]:
        """Seconds of a step without a probe and with one: CPU, wall and in the probe; without the slowest tenth."""
        found = []
        for probe in (None, TorchProbe(self.meter, self.job.model, self.job.optimizer)):
            for _ in range(SETTLING_STEPS):
                self._step(probe, logs_norm)
            gc.collect()
            taken = []
            for _ in range(self.steps):
                OWN.ns, begun_cpu, begun = 0, time.thread_time(), time.perf_counter()
                self._step(probe, logs_norm)
                taken.append((time.thread_time() - begun_cpu, time.perf_counter() - begun, OWN.ns * 1e-9))
            kept = len(taken) - len(taken) // 10
            found += [statistics.mean(sorted(one)[:kept]) for one in zip(*taken, strict=True)]
            if probe is not None:
                probe.close()
        return found

    def _step(self, probe: TorchProbe | None, logs_norm: bool) -> None:
        self.step += 1
        if probe is None:
            self.job.step()
            return
        self.meter.begin(self.step, time.monotonic_ns(), self.meter.cpu())
        probe.step_begin(self.step, 0)
        loss, norm = self.job.step()
        probe.log("loss", loss)
        if logs_norm:
            probe.log("grad_norm", norm)
        probe.step_end(self.step, 0)
        self.meter.end(time.monotonic_ns(), self.meter.cpu())

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def no_synchronization(device: torch.device) -> Iterator[None]:
    """Within, whatever waits for the device raises."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def measured(block: MeasuredSteps, rounds: int, rng: random.Random) -> dict[str, list[tuple[float, float]]]:
    """What `Block.seconds` says, by variant and round."""
    for _ in range(3):
        block.job.step()  # what torch itself sets up in its first steps may wait for the device
    for name in VARIANTS:
        block.seconds(name)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name in rng.sample(list(VARIANTS), len(VARIANTS)):
            taken[name].append(block.seconds(name))
    return taken


def serve_blocks(directory: str, shape: tuple[int, ...]) -> None:
    """Measure a block whenever it is asked for: `MeasuredSteps.pair` of a loop that logs its norm, or does not."""
    layers, width, batch, context, steps = shape
    time_hooks()
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(directory, "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    identity = {"job": "benchmark", "launch": "l", "rank": 0}
    recorder = Recorder.create(identity, [directory], monotonic_ns=time.monotonic_ns(), unix_ns=0)
    device = torch.device("cpu")
    job = TrainingJob(device, context, batch, True, layers, width)
    for _ in range(10):
        job.step()
    serve(MeasuredSteps(job, StepMeter(recorder), device, steps).pair)
    dist.destroy_process_group()


def compare(before: str, rounds: int) -> None:
    """Print what the probe of another checkout adds to a step, and what this one adds."""
    row = "| {:<5} | {:<13} | {:<6} | {:>8} | {:>12} | {:>9} | {:>9} | {:>9} |"
    print(row.format("step", "the loop", "probe", "bare ms", "in our hooks", "of a step", "added CPU", "added wall"))
    print(row.format(*("-" * width for width in (5, 13, 6, 8, 12, 9, 9, 9))))
    for step, shape in (("short", SHORT), ("long", LONG)):
        found = alternately(before, rounds, [False, True], __file__, *map(str, shape))
        for loop, sides in zip(("logs no norm", "logs its norm"), found, strict=True):
            for side, blocks in zip(SIDES, sides, strict=True):
                bare_cpu, bare, _, with_cpu, with_wall, own = zip(*blocks, strict=True)
                print(
                    row.format(
                        step,
                        loop,
                        side,
                        f"{statistics.median(bare_cpu) * 1e3:.1f}",
                        f"{statistics.median(own) * 1e3:.2f} ms",
                        f"{median_ratio(own, bare_cpu):.2%}",
                        f"{median_ratio(with_cpu, bare_cpu) - 1:.1%}",
                        f"{median_ratio(with_wall, bare) - 1:.1%}",
                    ),
                    flush=True,
                )


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios of pairs."""
    return statistics.median(one / other for one, other in zip(over, under, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ddp", action=argparse.BooleanOptionalAction, default=True, help="wrap by DDP, world size 1")
    parser.add_argument("--batch", type=int, help="sequences in a step; default 4 on a CPU, 32 on CUDA")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--bf16", action="store_true", help="compute by torch.autocast in bfloat16")
    parser.add_argument(
        "--before", metavar="CHECKOUT", help="measure another checkout's probe alternately with this one's"
    )
    parser.add_argument("--blocks", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.blocks:
        serve_blocks(options.blocks[0], tuple(map(int, options.blocks[1:])))
        return
    if options.before:
        compare(options.before, options.rounds)
        return
    time_hooks()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        if options.ddp:
            store = dist.FileStore(os.path.join(directory, "store"), 1)
            dist.init_process_group("gloo" if device.type == "cpu" else "nccl", store=store, rank=0, world_size=1)
        identity = {"job": "benchmark", "launch": "l", "rank": 0}
        recorder = Recorder.create(identity, [directory], monotonic_ns=time.monotonic_ns(), unix_ns=0)
        batch = options.batch or (4 if device.type == "cpu" else 32)
        shape = (options.layers, options.width, options.bf16)
        job = TrainingJob(device, options.context, batch, options.ddp, *shape)
        block = MeasuredSteps(job, StepMeter(recorder), device, 1 if device.type == "cpu" else 20)
        taken = measured(block, options.rounds, random.Random(0))
        report(job, taken, recorder, device, options)
        recorder.close()
        if options.ddp:
            dist.destroy_process_group()


def report(
    job: TrainingJob,
    taken: dict[str, list[tuple[float, float]]],
    recorder: Recorder,
    device: torch.device,
    options: argparse.Namespace,
) -> None:
    typical = {name: statistics.quantiles([whole for whole, _ in pairs], n=4)[0] for name, pairs in taken.items()}
    bare = typical["no probe"]
    clock = "CPU time of the training thread" if device.type == "cpu" else torch.cuda.get_device_name()
    tensors = len(list(job.model.parameters()))
    print(f"{job.parameters / 1e6:.1f}M parameters in {tensors} tensors, {'DDP' if options.ddp else 'plain'}, {clock}")
    print(f"{job.tokens.shape[0]} sequences of {options.context} tokens, torch {torch.__version__}")
    print(f"step without a probe {bare * 1e3:.1f} ms, {options.rounds} rounds\n")
    print(f"| {'part':<26} | added ms | of a step | in our hooks ms | of a step |")
    print(f"| {'-' * 26} | -------: | --------: | --------------: | --------: |")
    for name, pairs in taken.items():
        if name != "no probe":
            added = typical[name] - bare
            own = statistics.median(own for _, own in pairs)
            share = statistics.median(own / whole for whole, own in pairs)
            cells = f"{added * 1e3:8.2f} | {added / bare:9.2%} | {own * 1e3:15.2f} | {share:9.2%}"
            print(f"| {name:<26} | {cells} |")
    if recorder.dropped:
        print(f"\ndropped: {recorder.dropped}")


if __name__ == "__main__":
    main()
