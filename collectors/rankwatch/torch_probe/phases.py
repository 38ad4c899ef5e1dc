"""Marks the phases forward, backward, collective, optimizer and eval, unless the loop marks them itself.

On an accelerator each of them except eval is also timed on the device.

An evaluation begins with a forward of a model in evaluation mode, without gradients, and ends with the next forward
that trains. In a loop that does so in every step (rollouts generate like this), it is the work and not an evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from rankwatch.sink import Sink
from rankwatch.torch_probe.device import WAIT, DeviceTimer, TimedMoment

OUTPUTS_MAX: Final = 4
"""Tensors in a model's output that are watched for the start of backward: it need not begin at the first, such as a
loss that the loop does not use. One takes 2 us."""

WORK: Final = "step_work"
"""How much a step has to do: elements of the inputs of all forwards that train, as a multiple of the first step's. It
is recorded from the first step on that differs."""
EVAL: Final = "eval"
FORWARD: Final = "forward"


class OpenPhase(NamedTuple):
    """A phase that has begun and not ended."""

    name: str
    phase: AbstractContextManager[None]
    begun: TimedMoment | None
    """On the device; None where it is not timed there."""
    is_timed: bool
    """Whether it is one of those that are timed on the device; some of many are left out."""


class AutomaticPhases:
    """Enters and leaves phases of the step that is being recorded; leaving one also leaves those entered within it."""

    def __init__(self, sink: Sink, timer: DeviceTimer | None, failed: Callable[[Exception], None]) -> None:
        self._sink = sink
        self._timer = timer
        self._failed = failed
        self._open: list[OpenPhase] = []
        self._step = 0
        """Steps begun."""
        self._work = StepWork(sink)
        self._evaluated_in = -1
        """The newest step with a forward that did not train."""

    def watch_model(self, model: torch.nn.Module, bare: torch.nn.Module) -> list[RemovableHandle]:
        """Mark forward by hooks on the model itself, and the start of backward by a hook on its output.

        Args:
            model: the model as the loop calls it.
            bare: the model without wrappers, which evaluations often call.
        """
        handles = [
            model.register_forward_pre_hook(Mark(self._forward_begins, self._failed), with_kwargs=True),
            model.register_forward_hook(Mark(self._forward_ends, self._failed), always_call=True),
        ]
        if bare is not model:
            handles.append(bare.register_forward_pre_hook(Mark(self._bare_forward_begins, self._failed)))
        return handles

    def step_begins(self) -> None:
        """End phases that an exception or an evaluation between steps left open."""
        self._step += 1
        while self._open:
            self._open.pop().phase.__exit__(None, None, None)
        self._report_timer()
        if self._timer is not None:
            self._timer.step_begins()

    def step_ends(self) -> None:
        """End an evaluation, and record the size of the step's work."""
        self.leave(EVAL)
        self._work.step_ends()

    def enter(self, name: str) -> None:
        """A phase begins; no effect if it is open already, also by the loop."""
        if self._is_open(name):
            return
        # A forward without gradients, such as a teacher's, is followed by no backward.
        timed = name != EVAL and (name != FORWARD or torch.is_grad_enabled())
        begun = self._timer.phase_begins(name) if self._timer and timed else None
        phase = self._sink.phase(name)
        phase.__enter__()
        self._open.append(OpenPhase(name, phase, begun, timed))
        self._report_timer()

    def leave(self, name: str) -> None:
        """A phase ends; no effect if it is not open."""
        while self._is_open(name):
            left = self._open.pop()
            left.phase.__exit__(None, None, None)
            if left.begun is not None and self._timer is not None:
                self._timer.phase_ends(left.name, left.begun)
            self._report_timer()

    def _report_timer(self) -> None:
        """Set the phase of the work that the device is given from now on."""
        if self._timer is None:
            return
        timed = next((opened for opened in reversed(self._open) if opened.is_timed), None)
        left_out = self._is_open(EVAL) or (timed is not None and timed.begun is None)
        self._timer.phase = None if left_out else "" if timed is None else timed.name

    def _is_open(self, name: str) -> bool:
        return bool(self._open) and name in [opened.name for opened in self._open]

    def _forward_begins(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if is_recomputed():
            return
        if _is_evaluation(module):
            self._evaluates()
            return
        if torch.is_grad_enabled():
            self._work.add(args, kwargs)
        self.leave(EVAL)
        self.enter(FORWARD)

    def _bare_forward_begins(self, module: torch.nn.Module, *_: Any) -> None:
        if is_recomputed():
            return
        if _is_evaluation(module):
            self._evaluates()
        elif self._timer is not None and self._open and self._open[-1].name == FORWARD:
            opened = self._open[-1]
            if opened.begun is not None:  # before it, DDP broadcasts the model's buffers
                self._timer.phase_ends(WAIT, opened.begun, FORWARD)
                self._open[-1] = opened._replace(begun=self._timer.mark())

    def _evaluates(self) -> None:
        seldom = self._evaluated_in < self._step - 1
        self._evaluated_in = self._step
        if seldom:
            self.enter(EVAL)

    def _forward_ends(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        if is_recomputed():
            return
        self.leave(FORWARD)
        for tensor in islice(with_graph(output), OUTPUTS_MAX):
            tensor.register_hook(Mark(self._backward_begins, self._failed))  # type: ignore[no-untyped-call]

    def _backward_begins(self, *_: Any) -> None:
        self.enter("backward")


class StepWork:
    """How much the steps have to do (`WORK`)."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._first = self._elements = 0
        self._metric: int | None = None

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A forward begins with these inputs."""
        for inputs in (*args, *kwargs.values()):
            if isinstance(inputs, torch.Tensor):
                self._elements += inputs.numel()

    def step_ends(self) -> None:
        """Record the step, unless all have been alike so far."""
        elements, self._elements = self._elements, 0
        self._first = self._first or elements
        if self._metric is None and elements != self._first:
            self._metric = self._sink.metric(WORK)
        if self._metric is not None and elements:
            self._sink.put(self._metric, elements / self._first)


class Mark:
    """A hook that never raises, is not traced by a compiler, and is not copied or saved with the model."""

    def __init__(self, mark: Callable[..., None], failed: Callable[[Exception], None]) -> None:
        self._mark = mark
        self._failed = failed

    def __call__(self, *args: Any) -> None:
        """Run the mark, unless a compiler is tracing."""
        if torch.compiler.is_compiling():
            return
        try:
            self._mark(*args)
        except Exception as error:  # noqa: BLE001 -- an error of the probe must not end a user's forward or backward
            self._failed(error)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _silence, ()


def _is_evaluation(module: torch.nn.Module) -> bool:
    return not (module.training or torch.is_grad_enabled())


def is_recomputed() -> bool:
    """Whether a backward runs on this thread: then a forward in it is an activation checkpoint's, and its work.

    Torch has no public name for it; FSDP2 uses this one too.
    """
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def _silence() -> Callable[..., None]:
    return _silent


def _silent(*_: Any) -> None:
    """The hook of a copied model: it marks nothing."""


def with_graph(output: Any) -> Iterator[torch.Tensor]:
    """Tensors in a module's input or output through which a backward goes on: no leaves, whose hooks would stay."""
    if isinstance(output, torch.Tensor):
        if output.grad_fn is not None:
            yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from with_graph(part)
    elif isinstance(output, tuple | list):
        for part in output:
            yield from with_graph(part)
