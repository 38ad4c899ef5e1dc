"""Step boundaries where the loop is not ours: a step ends when its optimizer has stepped.

    steps = OptimizerSteps(lambda: watch)     # from the next optimizer step on
    ...
    steps.close()                             # where the process goes on without training

Torch's hooks on all optimizers show every optimizer step of the process. After each step of the optimizer that leads,
the running step ends and the next one begins, outside of its work until the next forward or backward: what lies between
(evaluation, logging, saving) is judged as outside of a step, and a process that ends there has left its loop in order.
Orders are carried out at these boundaries. A loop that can be stopped asks `watch.should_stop`; nothing here ends it.

Not seen are optimizers whose step is compiled, and those that are no torch.optim.Optimizer.

Finds the modules that an optimizer trains, in a process whose script was not asked for them.

The loss of a step as its backward sees it: the scalar on which `backward` is called, before a loss scale.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from rankwatch.notices import say
from rankwatch.torch_probe.phases import Mark
from rankwatch.watch import Watch


def parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of an optimizer's parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def parameters_of(optimizer: torch.optim.Optimizer) -> int:
    """How many parameters an optimizer has."""
    return sum(len(group["params"]) for group in optimizer.param_groups)


def models_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Module]:
    """The outermost modules that hold the parameters of an optimizer, wrappers included; empty if none is known.

    A few modules that together hold all the parameters, those with the most parameters first: a copy of a part, such as
    a `Sequential` over some layers, adds nothing. Looks at each object of the garbage collector once.
    """
    missing = parameter_ids(optimizer)
    modules = [found for found in gc.get_objects() if issubclass(type(found), torch.nn.Module)]
    holders = [
        module
        for module in modules
        if any(id(parameter) in missing for parameter in module.__dict__.get("_parameters", {}).values())
    ]
    roots = _outermost(holders, modules)
    held = {id(root): {id(parameter) for parameter in root.parameters()} & missing for root in roots}
    chosen = []
    for root in sorted(roots, key=lambda root: len(held[id(root)]), reverse=True):
        if held[id(root)] & missing:
            chosen.append(root)
            missing -= held[id(root)]
    return chosen


def _outermost(modules: Iterable[torch.nn.Module], known: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules that contain these and are contained in no other."""
    parents: dict[int, list[torch.nn.Module]] = {}
    for module in known:
        for child in module.__dict__.get("_modules", {}).values():
            if child is not None:
                parents.setdefault(id(child), []).append(module)
    roots: dict[int, torch.nn.Module] = {}
    seen: set[int] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        above = parents.get(id(module), [])
        waiting += above
        if not above:
            roots[id(module)] = module
    return list(roots.values())


Loss = torch.Tensor | float


class Losses:
    """Watches what `torch.autograd.backward` is called on, which `Tensor.backward` calls too. Waits for no device.

    The losses of a step are added up: a loop that accumulates gradients divides each loss, so the sum is their mean.
    """

    def __init__(self, begins: Callable[[], bool], failed: Callable[[Exception], None]) -> None:
        """Replace two functions of torch, until `close`.

        Args:
            begins: called when a backward begins; returns whether it counts.
            failed: called with an error of ours; the backward itself goes on.
        """
        self.replaces = False
        """A further loss replaces the sum: a closure computes the loss of one step several times."""
        self._begins = begins
        self._failed = failed
        self.added = 0
        """How many losses the sum has."""
        self._sum: Loss | None = None
        self._unscaled: torch.Tensor | None = None
        self._originals = torch.autograd.backward, torch.amp.GradScaler.scale
        torch.autograd.backward = self._watched_backward(torch.autograd.backward)
        torch.amp.GradScaler.scale = self._watched_scale(torch.amp.GradScaler.scale)  # type: ignore[method-assign]

    def take(self) -> Loss | None:
        """The loss since the last call, on its device; None without a backward of a scalar."""
        found, self._sum, self._unscaled = self._sum, None, None
        self.added = 0
        return found

    def close(self) -> None:
        """Restore torch's own functions."""
        torch.autograd.backward, torch.amp.GradScaler.scale = self._originals  # type: ignore[method-assign]

    def _watched_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def watched(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._backward_begins(tensors, grad_tensors)
            return backward(tensors, grad_tensors, *args, **kwargs)

        return watched

    def _watched_scale(self, scale: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(scale)
        def watched(self_: torch.amp.GradScaler, outputs: Any) -> Any:
            if isinstance(outputs, torch.Tensor) and outputs.requires_grad and self_.is_enabled():
                self._unscaled = outputs.detach()  # without its graph, which would stay in memory
            return scale(self_, outputs)

        return watched

    def _backward_begins(self, tensors: Any, gradients: Any) -> None:
        try:
            if not self._begins():
                return
            tensor = tensors if isinstance(tensors, torch.Tensor) else _sole(tensors)
            unscaled, self._unscaled = self._unscaled, None
            if gradients is None and tensor is not None and tensor.numel() == 1 and not hasattr(tensor, "to_local"):
                self._add(tensor.detach() if unscaled is None else unscaled)
        except Exception as error:  # noqa: BLE001 -- an error of ours must not end a user's backward
            self._failed(error)

    def _add(self, tensor: torch.Tensor) -> None:
        loss: Loss = float(tensor) if tensor.device.type == "cpu" else tensor
        self._sum = loss if self._sum is None or self.replaces else self._sum + loss
        self.added = 1 if self.replaces else self.added + 1


def _sole(tensors: Any) -> torch.Tensor | None:
    found = tuple(tensors)
    return found[0] if len(found) == 1 and isinstance(found[0], torch.Tensor) else None


Optimizer = torch.optim.Optimizer

OPTIMIZERS_MAX: Final = 16
"""Optimizers of different parameters that are measured: no training step is known to have more. Others only step."""
IDLE_STEPS: Final = 10
"""Steps without one of an optimizer after which it is idle: another one that comes then takes its place."""
TAKES_OVER: Final = 2
"""Steps of another optimizer since the last boundary, after which it leads: the leading one is done, or is rarer."""

_NO_THREAD: Final = -1


class OptimizerSteps:
    """Makes the boundaries of a watch's steps. One for each process; nothing here raises into training."""

    def __init__(
        self,
        watch: Callable[[], Watch | None],
        *,
        models: Callable[[Optimizer], Sequence[torch.nn.Module]] = models_of,
        loss: bool = True,
        begun: Callable[[Watch, Optimizer, Sequence[torch.nn.Module]], None] | None = None,
        hooks: bool = True,
    ) -> None:
        """Place hooks on all optimizers, those that are made later included.

        Args:
            watch: called after the first optimizer step of this process, on its training thread; None: watch nothing.
            models: the models of an optimizer, as the loop calls them; none: only times and losses are recorded.
            loss: log as `loss` the scalars on which `backward` is called.
            begun: called once, with watch, optimizer and its models, when the first step has begun.
            hooks: place the hooks; else the caller has placed hooks that call `before` and `after`.
        """
        self._start = watch
        self._models_of = models
        self._logs_loss = loss
        self._begun = begun
        self._watch: Watch | None = None
        self._thread = 0
        self._stepping: Optimizer | None = None
        """The optimizer that steps now; the outer one, where one calls another."""
        self._made = 0
        """Steps of all optimizers, skipped ones included."""
        self._at_rest = False
        """The running step has begun, and its work has not."""
        self._since: Counter[int] = Counter()
        """Steps of the other optimizers since the last boundary, by their ids."""
        self._boundaries = 0
        self._lead: weakref.ref[Optimizer] | None = None
        self._known: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """How many parameters it had when its models were looked for, by optimizer."""
        self._newest: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """The boundaries before its newest step, by optimizer."""
        self._replaced: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that were idle when another one came. One that comes back takes turns, and is not replaced again."""
        self._accumulated = 0
        """The most losses that a step has added up since its models are known; 0: no step has ended since then."""
        self._measured: list[tuple[Optimizer, Sequence[torch.nn.Module]]] = []
        self._losses: Losses | None = None
        self._forwards: list[RemovableHandle] = []
        self._scaler_step = torch.amp.GradScaler.step
        self._hooks: list[RemovableHandle] = []
        if hooks:
            self._hooks += register_optimizer_step_pre_hook(self.before), register_optimizer_step_post_hook(self.after)

    def close(self) -> None:
        """Remove all hooks and make no more boundaries; a step whose work has not begun is discarded."""
        for handle in (*self._hooks, *self._forwards):
            handle.remove()
        if self._watch is not None:
            torch.amp.GradScaler.step = self._scaler_step  # type: ignore[method-assign]
        if self._losses is not None:
            self._losses.close()
        self._thread = _NO_THREAD
        atexit.unregister(self._process_ends)
        self._leave("end")

    # ---- hooks of optimizers and loss scalers ------------------------------------------------------------------------

    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer is about to step."""
        if torch.compiler.is_compiling() or not self._is_ours or self._stepping is not None:
            return
        self._stepping = optimizer
        self._work_begins()
        if self._losses is not None:
            self._losses.replaces = any(callable(argument) for argument in (*args[1:], *kwargs.values()))

    def after(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """An optimizer has stepped."""
        if torch.compiler.is_compiling() or not self._is_ours or self._stepping is not optimizer:
            return
        self._stepping = None
        if self._losses is not None:
            self._losses.replaces = False
        self._stepped(optimizer)

    def _watched(self, scaler_step: Callable[..., Any]) -> Callable[..., Any]:
        """`GradScaler.step`, which does not call the optimizer where gradients have overflowed."""

        @functools.wraps(scaler_step)
        def step(self: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            made = steps._made
            result = scaler_step(self, optimizer, *args, **kwargs)
            if made == steps._made and steps._is_ours and isinstance(optimizer, Optimizer):
                steps._stepped(optimizer)
            return result

        steps = self
        return step

    @property
    def _is_ours(self) -> bool:
        """Whether this is the training thread, or none is known yet."""
        return not self._thread or self._thread == threading.get_ident()

    # ---- boundaries --------------------------------------------------------------------------------------------------

    def _stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has made its step, or its loss scaler has skipped it."""
        try:
            self._made += 1
            self._newest[optimizer] = self._boundaries
            if self._watch is None:
                self._begin(optimizer)
                return
            if self._leads(optimizer):
                self._boundary(self._watch)
            else:
                self._watch._meter.outside()
            self._at_rest = True
            if self._known.get(optimizer) != parameters_of(optimizer):
                self._see(self._watch, optimizer)
        except Exception as error:  # noqa: BLE001 -- an error of ours must not end a user's step
            self._failed(error)

    def _begin(self, optimizer: Optimizer) -> None:
        """The process trains: start the watch. The step that has just been made is not recorded."""
        self._thread = threading.get_ident()
        watch = self._start()
        if watch is None:
            self._thread = _NO_THREAD  # the hooks are being called now, so that they cannot be removed
            return
        self._watch = watch
        self._lead = weakref.ref(optimizer)
        torch.amp.GradScaler.step = self._watched(self._scaler_step)  # type: ignore[method-assign]
        if self._logs_loss:
            self._losses = Losses(self._backward_begins, self._failed)
        atexit.register(self._process_ends)
        models = self._see(watch, optimizer)
        watch.begin(steps_made(optimizer))
        self._at_rest = True
        watch._meter.rest()
        if self._begun is not None:
            self._begun(watch, optimizer, models)

    def _leads(self, optimizer: Optimizer) -> bool:
        """Whether the step ends with this optimizer's step. Equal on all ranks, whose optimizers step in one order."""
        lead = self._lead() if self._lead is not None else None
        if optimizer is lead:
            return True
        self._since[id(optimizer)] += 1
        if self._boundaries == 0 and optimizer not in self._known:
            self._lead = weakref.ref(optimizer)  # of optimizers that take turns the last one of the first round leads
            return False
        if lead is not None and self._since[id(optimizer)] < TAKES_OVER:
            return False
        self._lead = weakref.ref(optimizer)
        return True

    def _boundary(self, watch: Watch) -> None:
        self._since.clear()
        self._boundaries += 1
        added = self._losses.added if self._losses is not None else 0
        if added > self._accumulated > 0:
            watch._changed("work", f"{added} backward passes a step instead of {self._accumulated}")
        self._accumulated = max(added, self._accumulated)
        loss = self._losses.take() if self._losses is not None else None
        if loss is not None:
            watch.log(loss=loss)
        watch.end()
        watch.begin()
        watch._meter.rest()

    def _see(self, watch: Watch, optimizer: Optimizer) -> Sequence[torch.nn.Module]:
        """Measure an optimizer and its models; it replaces those of the same parameters, and those that are idle."""
        self._known[optimizer] = parameters_of(optimizer)
        self._accumulated = 0
        own = parameter_ids(optimizer)
        idle = [one for one, _ in self._measured if self._is_idle(one)]
        for one in idle:
            self._replaced.add(one)
            self._known.pop(one, None)
        kept = [pair for pair in self._measured if pair[0] not in idle and not own & parameter_ids(pair[0])]
        models = self._models_of(optimizer)
        if len(kept) >= OPTIMIZERS_MAX:
            say(f"{type(optimizer).__name__} is not measured: {OPTIMIZERS_MAX} other optimizers are")
        if not models or len(kept) >= OPTIMIZERS_MAX:
            return models
        if len(kept) < len(self._measured):
            _forget(watch)
        self._measured = [*kept, (optimizer, models)]
        known = {id(model): model for _, found in self._measured for model in found}
        watch.torch(list(known.values()), [one for one, _ in self._measured])
        for handle in self._forwards:
            handle.remove()
        mark = Mark(self._forward_begins, self._failed)
        self._forwards = [model.register_forward_pre_hook(mark) for model in known.values()]
        return models

    def _is_idle(self, optimizer: Optimizer) -> bool:
        return optimizer not in self._replaced and self._boundaries - self._newest[optimizer] > IDLE_STEPS

    # ---- work and rest -----------------------------------------------------------------------------------------------

    def _work_begins(self) -> None:
        if self._at_rest and self._watch is not None:
            self._at_rest = False
            self._watch._meter.inside()

    def _forward_begins(self, module: torch.nn.Module, *_: Any) -> None:
        if self._at_rest and module.training and torch.is_grad_enabled() and self._is_ours:
            self._work_begins()

    def _backward_begins(self) -> bool:
        """A backward begins; returns whether its loss is one of the training thread."""
        if not self._is_ours:
            return False
        if self._losses is not None and not self._losses.replaces:
            self._stepping = None  # an exception has left the step of an optimizer
        self._work_begins()
        return True

    def _process_ends(self) -> None:
        """Run at Python's shutdown, before the watch's own exit handler; from then on the exit status decides how the
        run ended.
        """
        self._leave("break")

    def _leave(self, reason: str) -> None:
        if self._at_rest and self._watch is not None:
            self._at_rest = False
            self._watch._loop.abandon()
            self._watch._loop.exit.leave(reason)

    def _failed(self, error: Exception) -> None:
        if self._watch is not None:
            self._watch._faults.caught(error)
        else:
            self._thread = _NO_THREAD
            say(f"this process is not watched: {error}")


def _forget(watch: Watch) -> None:
    """Measure no model and no optimizer any more, until the next call of `watch.torch`."""
    probe, watch._loop.probe = watch._loop.probe, None
    if probe is not None:
        probe.close()


def steps_made(optimizer: Optimizer) -> int:
    """How many steps an optimizer has made by its own count, loaded with a checkpoint too; 1 if it keeps none."""
    counts = [state["step"] for state in optimizer.state.values() if isinstance(state, dict) and "step" in state]
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return max(1, int(torch.stack(counts).max()))  # of tensors, for one wait where they are on a device
    return 1
