"""A loop as Megatron-LM has it: tensor times data parallel, its groups, a distributed optimizer, its timers.

Gradients are added up in one flat buffer, each rank of a data-parallel group updates its part of the parameters, and
`iteration` is the script's own.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import rankwatch

TRAIN_ITERS, MICRO_BATCHES, SAVE_INTERVAL = int(os.environ.get("STEPS", "120")), 2, 40
TENSOR_PARALLEL, WIDTH, CLASSES, BATCH = 2, 128, 10, 32
SAVE = Path("out").absolute()


class ParallelState:
    """Ranks of one tensor-parallel group are neighbours, as in Megatron's order tp-dp."""

    def __init__(self, size):
        world, rank = dist.get_world_size(), dist.get_rank()
        for first in range(0, world, size):
            group = dist.new_group(ranks := list(range(first, first + size)))
            if rank in ranks:
                self.tensor, self.tensor_rank = group, rank - first
        for first in range(size):
            group = dist.new_group(ranks := list(range(first, world, size)))
            if rank in ranks:
                self.data, self.data_rank, self.data_size = group, ranks.index(rank), len(ranks)


class Timers:
    def __init__(self):
        self.elapsed = {}

    def __call__(self, name, call, *arguments):
        begun = time.perf_counter()
        result = call(*arguments)
        self.elapsed[name] = self.elapsed.get(name, 0.0) + time.perf_counter() - begun
        return result

    def log(self, iteration):
        if dist.get_rank() == 0:
            times = " | ".join(f"{name}: {1e3 * seconds:.1f}" for name, seconds in self.elapsed.items())
            print(f"iteration {iteration}/{TRAIN_ITERS} | time (ms) | {times}", flush=True)
        self.elapsed.clear()


class CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.contiguous()
        with watch.phase("collective"):
            dist.all_reduce(gradient, group=parallel.tensor)
        return gradient


class ReduceFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        value = value.contiguous()
        with watch.phase("collective"):
            dist.all_reduce(value, group=parallel.tensor)
        return value

    @staticmethod
    def backward(context, gradient):
        return gradient


class ParallelMLP(nn.Module):
    """A column-parallel and a row-parallel linear layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.dense_h_to_4h = nn.Linear(WIDTH, 4 * WIDTH // TENSOR_PARALLEL)
        self.dense_4h_to_h = nn.Linear(4 * WIDTH // TENSOR_PARALLEL, WIDTH, bias=False)

    def forward(self, value):
        inner = nn.functional.gelu(self.dense_h_to_4h(CopyToTensorParallel.apply(self.norm(value))))
        return value + ReduceFromTensorParallel.apply(self.dense_4h_to_h(inner))


class DistributedOptimizer:
    """Flat buffers of parameters and gradients, of which each data-parallel rank updates its part."""

    def __init__(self, model):
        parameters = list(model.parameters())
        total = sum(parameter.numel() for parameter in parameters)
        total += -total % parallel.data_size
        self.weights, self.gradients = torch.zeros(total), torch.zeros(total)
        at = 0
        for parameter in parameters:
            part = slice(at, at := at + parameter.numel())
            self.weights[part] = parameter.detach().flatten()
            parameter.data = self.weights[part].view_as(parameter)
            parameter.main_grad = self.gradients[part].view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self._accumulate)
        self.shard = nn.Parameter(self._own(self.weights))
        self.optimizer = torch.optim.AdamW([self.shard], lr=1e-3)

    def _own(self, buffer):
        size = buffer.numel() // parallel.data_size
        return buffer[parallel.data_rank * size :][:size]

    @staticmethod
    def _accumulate(parameter):
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    def step(self):
        with watch.phase("collective"):
            dist.all_reduce(self.gradients, group=parallel.data)
        self.gradients /= parallel.data_size
        self.shard.grad = self._own(self.gradients)
        norm = self.shard.grad.square().sum()
        with watch.phase("collective"):
            dist.all_reduce(norm)  # parameters that tensor parallel does not split count once for each of its ranks
        norm.sqrt_()
        self.shard.grad *= (1.0 / (norm + 1e-6)).clamp(max=1.0)
        self.optimizer.step()
        with watch.phase("collective"):
            dist.all_gather(list(self.weights.chunk(parallel.data_size)), self.shard.detach(), group=parallel.data)
        self.gradients.zero_()
        return norm


def batch(iteration, micro):
    generator = torch.Generator().manual_seed((iteration * MICRO_BATCHES + micro) * 8 + parallel.data_rank)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randint(0, CLASSES, (BATCH,), generator=generator)


def forward_backward_no_pipelining(iteration):
    total = 0.0
    for micro in range(MICRO_BATCHES):
        inputs, labels = batch(iteration, micro)
        loss = nn.functional.cross_entropy(model(inputs), labels) / MICRO_BATCHES
        loss.backward()
        total += loss.item()
    return total


def save_checkpoint(iteration):
    folder = SAVE / f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    part = {"shard": optimizer.shard.detach(), "optimizer": optimizer.optimizer.state_dict(), "iteration": iteration}
    torch.save(part, folder / f"rank_{dist.get_rank():03d}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (SAVE / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return str(folder)


def load_checkpoint(checkpoint):
    part = torch.load(Path(checkpoint.location) / f"rank_{dist.get_rank():03d}.pt", weights_only=True)
    optimizer.shard.data.copy_(part["shard"])
    optimizer.optimizer.load_state_dict(part["optimizer"])
    optimizer.gradients.zero_()
    dist.all_gather(list(optimizer.weights.chunk(parallel.data_size)), optimizer.shard.detach(), group=parallel.data)
    print(f"goes on from {checkpoint.location}", flush=True)
    return part["iteration"]


dist.init_process_group("gloo")
parallel = ParallelState(TENSOR_PARALLEL)
torch.manual_seed(0)
model = nn.Sequential(ParallelMLP(), ParallelMLP(), nn.Linear(WIDTH, CLASSES))
optimizer = DistributedOptimizer(model)
timers = Timers()

watch = rankwatch.start(topology={"tp": parallel.tensor_rank, "dp": parallel.data_rank})
watch.torch(model, optimizer, grad_norm=False)
watch.on_checkpoint(save_checkpoint)
watch.on_rollback(load_checkpoint)

iteration = 0
if watch.resume:
    iteration = load_checkpoint(watch.resume)
while iteration < TRAIN_ITERS and not watch.should_stop:
    with watch.step(iteration) as iteration:
        loss = timers("forward-backward", forward_backward_no_pipelining, iteration)
        norm = timers("optimizer", optimizer.step)
        watch.log(loss=loss, grad_norm=norm)
    iteration += 1
    if iteration % SAVE_INTERVAL == 0:
        with watch.pause("checkpoint_save"):
            folder = timers("save-checkpoint", save_checkpoint, iteration)
        watch.checkpoint_saved(iteration, folder)
        timers.log(iteration)
dist.destroy_process_group()
