"""Marks the phases forward, backward, collective, optimizer and eval where the loop does not mark them itself.

On an accelerator each of them but eval also carries two moments, whose distance is device time to be known later.

An evaluation begins with a forward of a model in evaluation mode, without gradients, and ends with the next forward
that trains. A loop that does so step after step (rollouts generate like this) does not evaluate: that is its work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from rankwatch.meter import Sink
from rankwatch.torch_probe.late import Device, Moment, Span

SPANS_MAX: Final = 32
"""Stretches of device time in one step: 8 micro-batches of 4 phases. Further ones are dropped and counted."""

EVAL: Final = "eval"

_Open = tuple[str, AbstractContextManager[None], Moment | None]


class AutomaticPhases:
    """Enters and leaves phases of the step that is being recorded; leaving one leaves what was entered within it."""

    def __init__(self, sink: Sink, device: Device | None, failed: Callable[[Exception], None]) -> None:
        self._sink = sink
        self._device = device
        self._failed = failed
        self._open: list[_Open] = []
        self._spans: list[Span] = []
        self._step = 0
        """Steps begun."""
        self._evaluated_in = -1
        """The newest step with a forward that did not train."""

    def watch_model(self, model: torch.nn.Module, bare: torch.nn.Module) -> list[RemovableHandle]:
        """Mark forward by hooks on the model itself, and backward's begin by one on its output.

        Args:
            model: as the loop calls it.
            bare: what is within its wrappers: evaluations often call that.
        """
        handles = [
            model.register_forward_pre_hook(Mark(self._forward_begins, self._failed)),
            model.register_forward_hook(Mark(self._forward_ends, self._failed), always_call=True),
        ]
        if bare is not model:
            handles.append(bare.register_forward_pre_hook(Mark(self._bare_forward_begins, self._failed)))
        return handles

    def step_begins(self) -> None:
        """Leave whatever an exception left open, or an evaluation between the steps; forget the last step's spans."""
        self._step += 1
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)
        self._spans.clear()

    def enter(self, name: str) -> None:
        """A phase begins. Inside itself it goes on; where the loop has opened it, that one counts."""
        if any(name == opened for opened, _, _ in self._open):
            return
        phase = self._sink.phase(name)
        phase.__enter__()
        self._open.append((name, phase, self._device.now() if self._device and name != EVAL else None))

    def leave(self, name: str) -> None:
        """A phase ends; nothing happens if it has not begun."""
        while any(name == opened for opened, _, _ in self._open):
            opened, phase, begun = self._open.pop()
            phase.__exit__(None, None, None)
            if begun is not None and self._device is not None:
                self._keep(Span(f"device.{opened}", begun, self._device.now()))

    def take_spans(self) -> tuple[Span, ...]:
        """The step's stretches of device time, in the order they ended."""
        spans = tuple(self._spans)
        self._spans.clear()
        return spans

    def _keep(self, span: Span) -> None:
        if len(self._spans) < SPANS_MAX:
            self._spans.append(span)
        else:
            self._sink.drop("spans")

    def _forward_begins(self, module: torch.nn.Module, *_: Any) -> None:
        if _is_evaluation(module):
            self._evaluates()
            return
        self.leave(EVAL)
        self.enter("forward")

    def _bare_forward_begins(self, module: torch.nn.Module, *_: Any) -> None:
        if _is_evaluation(module):
            self._evaluates()

    def _evaluates(self) -> None:
        seldom = self._evaluated_in < self._step - 1
        self._evaluated_in = self._step
        if seldom:
            self.enter(EVAL)

    def _forward_ends(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        self.leave("forward")
        tensor = next(_with_graph(output), None)
        if tensor is not None:
            tensor.register_hook(Mark(self._backward_begins, self._failed))  # type: ignore[no-untyped-call]

    def _backward_begins(self, *_: Any) -> None:
        self.enter("backward")


class Mark:
    """A hook that never raises, is not traced by a compiler, and stays behind when the model is copied or saved."""

    def __init__(self, mark: Callable[..., None], failed: Callable[[Exception], None]) -> None:
        self._mark = mark
        self._failed = failed

    def __call__(self, *args: Any) -> None:
        """Mark."""
        if torch.compiler.is_compiling():
            return
        try:
            self._mark(*args)
        except Exception as error:  # noqa: BLE001 -- nothing of ours may end a user's forward or backward
            self._failed(error)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _silence, ()


def _is_evaluation(module: torch.nn.Module) -> bool:
    return not (module.training or torch.is_grad_enabled())


def _silence() -> Callable[..., None]:
    return _silent


def _silent(*_: Any) -> None:
    """In a copy of the model nothing is marked."""


def _with_graph(output: Any) -> Iterator[torch.Tensor]:
    """Tensors of a model's output that a backward can start from."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from _with_graph(part)
    elif isinstance(output, tuple | list):
        for part in output:
            yield from _with_graph(part)
