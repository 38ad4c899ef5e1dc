"""Ranks that train on simulated accelerators, with the probe and a virtual clock: their times are the same every time.

For `on_ranks`: a rank builds its model, trains, and returns what its probe measured.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rankwatch.torch_probe import TorchProbe, gradients
from tests.support.accelerator.simulated import HostTensor, SimulatedDevice, VirtualClock
from tests.support.accelerator.torch_work import DeviceWork, store_of_ranks
from tests.support.ranks.sink import FakeSink

WIDTH = 8
LAYER_S = 0.004
"""Device time of a layer's forward."""
TRANSFER_S = 0.002
"""Device time of a collective."""
LAUNCH_S = 0.00004
"""Host time of one launch: a layer's forward has 4 launches, so hosts need 4 % of the time of their devices."""
HOST_S = 0.002
"""Host time of a step beside launches."""


@dataclass(frozen=True)
class Part:
    """What one rank does otherwise, from a step on."""

    rank: int = -1
    step: int = 0
    device: float = 1.0
    """Its device's work takes so many times as long."""
    launch: float = 1.0
    """Its launches take so many times as long."""
    host_s: float = 0.0
    """Its host is busy for longer in each step."""


NOTHING = Part()


class Machine:
    """One rank's host and device."""

    def __init__(self, rank: int, world_size: int, part: Part = NOTHING, noise: float = 0.01) -> None:
        self.rank = rank
        self.step = 0
        self._part = part
        self._random = random.Random(rank)
        self._noise = noise
        self.clock = VirtualClock()
        meeting = store_of_ranks(rank, world_size) if world_size > 1 else None
        self.device = SimulatedDevice(
            f"GPU-{rank}", self.clock, meeting, slowness=self._slowness, launch_s=self._launch_s
        )
        self.sink = FakeSink()

    @property
    def _differs(self) -> bool:
        return self.rank == self._part.rank and self.step >= self._part.step

    def _slowness(self) -> float:
        return (self._part.device if self._differs else 1.0) * math.exp(self._noise * self._random.gauss(0, 1))

    def _launch_s(self) -> float:
        return LAUNCH_S * (self._part.launch if self._differs else 1.0)

    def host_work(self) -> None:
        """What the host does in a step beside launches."""
        self.clock.work(HOST_S + (self._part.host_s if self._differs else 0.0))


def layers(device: SimulatedDevice, count: int = 3) -> nn.Sequential:
    """Some layers that work on the device."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), DeviceWork(device, LAYER_S)) for _ in range(count)))


def train(
    machine: Machine,
    model: nn.Module,
    steps: int,
    *,
    watched: bool = True,
    passes: int = 1,
    before: Callable[[nn.Module, int], contextlib.AbstractContextManager[None]] | None = None,
    step: Callable[[], None] | None = None,
    synchronizes: bool = True,
    during: contextlib.AbstractContextManager[Any] | None = None,
) -> list[dict[str, float]]:
    """Train; returns the values of each step by name, those of the last steps too.

    A step has `passes` micro-batches, each within the context that `before` gives for the model and its number; `step`
    computes the gradients instead of them. The script waits for its device at the end of each step if it
    `synchronizes`, as one that prints its loss does. `during`: the context of all steps, without the probe's start.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = TorchProbe(machine.sink, model, optimizer, device=machine.device) if watched else None
    device = machine.device
    with during or contextlib.nullcontext():
        for index in range(steps):
            machine.step = index
            if probe is not None:
                probe.step_begin(index, 0)
            machine.host_work()
            optimizer.zero_grad()
            if step is not None:
                step()
            for number in range(passes if step is None else 0):
                with before(model, number) if before else contextlib.nullcontext():
                    loss_of(model(torch.ones(2, WIDTH))).backward()
            optimizer.step()
            device.launch(LAYER_S / 2)
            if synchronizes:
                device.synchronize()
            if probe is not None:
                probe.step_end(index, 0)
    device.synchronize()
    if probe is not None:
        probe.step_begin(steps, 0)
        probe.step_end(steps, 0)
        probe.close()
    found: dict[int, dict[str, float]] = {}
    for index, _, values, _ in machine.sink.late_values:
        found.setdefault(index, {}).update(values)
    return [found.get(index, {}) for index in range(steps)] if watched else []


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


HOST_READS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")
"""What makes a host wait for a tensor on its device."""


@contextlib.contextmanager
def counted_reads(counts: Counter[str]) -> Iterator[None]:
    """Count the reads of tensors that would wait for a device. These are on the CPU, where norms are settled."""
    before = {name: getattr(torch.Tensor, name) for name in HOST_READS}

    def counting(name: str) -> Any:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(self, HostTensor):
                counts[name] += 1
            return before[name](self, *args, **kwargs)

        return read

    settled = gradients._settled
    gradients._settled = lambda _, norm: norm
    for name in HOST_READS:
        setattr(torch.Tensor, name, counting(name))
    try:
        yield
    finally:
        gradients._settled = settled
        for name, method in before.items():
            setattr(torch.Tensor, name, method)


class Checkpointed(nn.Module):
    """Computes its layers again in the backward."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = checkpoint(layer, values, use_reentrant=False)
        return values
