"""A sink that keeps the values of a probe by name, and a model that such a probe watches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from rankwatch.torch_probe import TorchProbe


class FakeSink:
    """Implements rankwatch.meter.Sink. `values` and `exact` are the current step's; `log` is the order of calls."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: dict[str, float] = {}
        self.exact: dict[str, int] = {}
        self.late_values: list[tuple[int, int, dict[str, float], dict[str, int]]] = []
        self.dropped: dict[str, int] = {}
        self.declared: dict[str, Any] = {}
        self.collectives = 0
        self.is_outside = False
        self.log: list[str] = []
        self.open: list[str] = []

    def metric(self, name: str, *, exact: bool = False) -> int:
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def put(self, index: int, value: float) -> None:
        assert isinstance(value, float)
        self.values[self.names[index]] = value

    def put_exact(self, name: str, number: int) -> None:
        assert isinstance(number, int)
        self.exact[name] = number

    def late(self, step: int, k: int, values: Mapping[int, float], exact: Mapping[str, int] | None = None) -> None:
        by_name = {self.names[index]: value for index, value in values.items()}
        self.late_values.append((step, k, by_name, dict(exact or {})))

    def busy_off(self, now_ns: int, *, waiting: bool = True) -> None:
        self.log.append("busy off")

    def busy_on(self, now_ns: int) -> None:
        self.log.append("busy on")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.open.append(name)
        self.log.append(f"+{name}")
        yield
        assert self.open.pop() == name
        self.log.append(f"-{name}")

    def outside(self) -> None:
        self.is_outside = True

    def inside(self) -> None:
        self.is_outside = False

    def collective(self) -> None:
        self.collectives += 1

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.log.append(f"note {kind}")

    def drop(self, reason: str, count: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def declare(self, fields: Mapping[str, Any]) -> bool:
        before, self.declared = self.declared, {**self.declared, **fields}
        return self.declared != before


@contextlib.contextmanager
def a_step(probe: TorchProbe, optimizer: torch.optim.Optimizer | None = None, number: int = 0) -> Iterator[None]:
    """One step of a loop, with the optimizer's at its end."""
    probe.step_begin(number, 0)
    yield
    if optimizer is not None:
        optimizer.step()
    probe.step_end(number, 0)


class Watched:
    """A model, its optimizer, and the probe that watches them."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, **arguments: Any
    ) -> None:
        self.sink = FakeSink()
        self.model = model
        self.optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
        self.probe = TorchProbe(self.sink, model, self.optimizer, **arguments)

    @contextlib.contextmanager
    def step(self, number: int = 0) -> Iterator[None]:
        """One step of the loop. The sink has the values of this step alone."""
        self.sink.values, self.sink.exact = {}, {}
        with a_step(self.probe, self.optimizer, number):
            yield
