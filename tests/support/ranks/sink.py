"""A sink that keeps the values of a probe by name, and a model that such a probe watches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rankwatch import wire
from rankwatch.torch_probe import TorchProbe
from rankwatch_detectors.base import Finding, Frame
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.job.assembler import Assembler
from tests.support.values.batches import batch, bundle, table


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


Steps = Sequence[tuple[Mapping[str, float], Mapping[str, int]]]
"""Values and integers of each step of one rank."""


def introduced(rank: int, world_size: int, declared: Mapping[str, Any]) -> wire.RankInfo:
    """The rank as its agent introduces it."""
    slices = declared.get("slices")
    return wire.RankInfo(
        rank,
        world_size,
        host="node-1",
        parameters=tuple(declared.get("parameters", ())),
        slices=None if slices is None else tuple(wire.Slice(*one) for one in slices),
        **{"dp": rank} | {axis: declared[axis] for axis in ("dp", "tp", "pp", "cp", "ep") if axis in declared},
    )


def reported(
    declared: Sequence[Mapping[str, Any]], recorded: Sequence[Steps], missing: Sequence[tuple[int, int]] = ()
) -> tuple[list[Frame], list[Finding]]:
    """The frames of the ranks' steps, and what the detectors find in them.

    Args:
        declared: identity fields of each rank.
        recorded: steps of each rank.
        missing: pairs of rank and step that never arrive.
    """
    size, assembler, judges = len(declared), Assembler(), detectors()
    frames: list[Frame] = []
    findings: list[Finding] = []
    infos = tuple(introduced(rank, size, declared[rank]) for rank in range(size))
    sent = [batch(0, ranks=infos)]
    for step in range(len(recorded[0])):
        here = [rank for rank in range(size) if (rank, step) not in missing]
        names = {name: None for rank in here for name in recorded[rank][step][0]}
        exact = {name: None for rank in here for name in recorded[rank][step][1]}
        columns = {name: [recorded[rank][step][0].get(name) for rank in here] for name in names}
        whole = {name: [recorded[rank][step][1].get(name) for rank in here] for name in exact}
        sent.append(batch(step + 1, steps=table([step] * len(here), here, whole, **columns)))
    for number, one in enumerate(sent):
        for observation in [*assembler.add(bundle(one), float(number))]:
            frames += [observation] if isinstance(observation, Frame) else []
            findings += [finding for evaluate in judges for finding in evaluate.observe(observation)]
    for observation in [*assembler.tick(1_000.0, 0.0)]:
        frames += [observation] if isinstance(observation, Frame) else []
    return frames, findings


def reported_of(ranks: Sequence[Mapping[str, Any]], case: str, **how: Any) -> tuple[list[Frame], list[Finding]]:
    """The same, of what each rank has answered of this case."""
    return reported([one[case]["declared"] for one in ranks], [one[case]["steps"] for one in ranks], **how)
