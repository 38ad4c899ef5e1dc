"""The watched models: their wrappers, the devices of their parameters, and how their gradients are reduced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from rankwatch.torch_probe.arguments import Handed
from rankwatch.torch_probe.device_identity import ON_HOST
from rankwatch.torch_probe.fsdp import flats, own_part

_CPU: Final = torch.device("cpu")
_WRAPPERS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch.compile, FSDP1 and activation checkpointing add to the names of parameters."""


class WatchedModel:
    """A module with its parameters, in any nesting of torch.compile and DistributedDataParallel."""

    def __init__(self, module: torch.nn.Module, replicated: bool | None = None, *, placed: bool = True) -> None:
        """Inspect a module.

        Args:
            module: the module as the loop calls it.
            replicated: whether peers hold bit-equal parameters; None: true if DDP keeps them equal.
            placed: the topology was declared, so that the ranks of a DDP group count as peers even if it spans only a
                part of the job.
        """
        self.module = module
        self.bare = _bare(module)
        self.named = [(_plain(name), parameter) for name, parameter in self.bare.named_parameters()]
        self.sharded = any(hasattr(parameter, "to_local") for _, parameter in self.named) or bool(flats(module))
        self.ddp: DistributedDataParallel | None = None
        self._said = replicated
        self.placed = placed
        for part in module.modules():
            if self.ddp is None and isinstance(part, DistributedDataParallel):
                self.found_within(part)

    def found_within(self, ddp: DistributedDataParallel) -> bool:
        """Store the DDP wrapper through which the model is called, if it has all the model's parameters.

        Returns:
            Whether the wrapper is new.
        """
        if self.ddp is not None:
            return False
        reduced = {id(parameter) for parameter in ddp.parameters()}
        if not all(id(parameter) in reduced for _, parameter in self.named):
            return False
        self.ddp = ddp
        return True

    @property
    def replicated(self) -> bool:
        """Whether ranks of a peer group hold bit-equal parameters."""
        if self._said is not None:
            return self._said
        if self.ddp is None or self.sharded:
            return False
        return self.placed or group_size(self.ddp.process_group) == group_size(None)

    @property
    def name(self) -> str:
        """Name of the model's class."""
        return type(getattr(self.bare, "_fsdp_wrapped_module", self.bare)).__name__


class WatchedModels:
    """All watched models, as one list of parameters."""

    def __init__(self, handed: Iterable[Handed], *, placed: bool) -> None:
        """Inspect the models; see `WatchedModel` for `placed`."""
        self.each: list[WatchedModel] = []
        given: list[str] = []
        for call in handed:
            for name, module in call.models:
                self.each.append(WatchedModel(module, call.replicated, placed=placed))
                given.append(name)
        self.names: list[str] = []
        self.parameters: list[torch.nn.Parameter] = []
        known: set[int] = set()
        for prefix, model in zip(self._prefixes(given), self.each, strict=True):
            for name, parameter in model.named:
                if id(parameter) not in known:
                    known.add(id(parameter))
                    self.names.append(prefix + name)
                    self.parameters.append(parameter)
        self.sharded = any(model.sharded for model in self.each)
        self.home = next((tensor.device for tensor in self.parameters if tensor.device.type not in ON_HOST), _CPU)

    def place(self) -> None:
        """The topology became known: it says which ranks are peers."""
        for model in self.each:
            model.placed = True

    def _prefixes(self, given: list[str]) -> list[str]:
        """Prefixes of parameter names if there are several models: the given name or the class, numbered if equal."""
        if len(self.each) == 1:
            return [""]
        wanted = [name or model.name for name, model in zip(given, self.each, strict=True)]
        often = Counter(wanted)
        seen: Counter[str] = Counter()
        prefixes = []
        for name in wanted:
            prefixes.append(f"{name}{seen[name]}." if often[name] > 1 else f"{name}.")
            seen[name] += 1
        return prefixes

    @property
    def replicated(self) -> bool:
        """Whether any model's parameters are bit-equal on peers."""
        return any(model.replicated for model in self.each)

    @property
    def is_whole_after_backward(self) -> bool:
        """Whether gradients are reduced when backward ends, before the loop clips them; else only before the update."""
        return self.all_in_ddp or not is_distributed()

    @property
    def unreduced(self) -> bool:
        """Whether nobody reduces gradients: they stay this rank's own."""
        return not (self.reduced_by_ddp or self.sharded)

    @property
    def divided(self) -> bool:
        """Whether a rank has only a part of the reduced gradients: sharded, or DDP unites only a part of the ranks."""
        groups = [model.ddp.process_group for model in self.each if model.ddp is not None]
        return self.sharded or any(group_size(group) < group_size(None) for group in groups)

    @property
    def waits_in_ddp(self) -> bool:
        """Whether DDP's reductions are where this rank waits for all others: no other axis divides the job."""
        return is_distributed() and self.all_in_ddp and not self.divided

    @property
    def all_in_ddp(self) -> bool:
        """Whether DDP reduces all gradients, if over a part of the ranks."""
        return all(model.ddp is not None for model in self.each)

    @property
    def compiled(self) -> bool:
        """Whether a part of a model is compiled, and may communicate within."""
        parts = (part for model in self.each for part in model.module.modules())
        return any(hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) for part in parts)

    @property
    def reduced_by_ddp(self) -> bool:
        """Whether DDP has reduced some gradients when backward ends."""
        return any(model.ddp is not None for model in self.each)

    @property
    def own_parts(self) -> list[torch.Tensor]:
        """The parameters that are bit-equal on peers; without any, this rank's part of all parameters.

        Reading a whole DTensor would be a collective.
        """
        models = [model for model in self.each if model.replicated] or self.each
        return [own_part(parameter) for model in models for _, parameter in model.named]

    @property
    def reduces(self) -> bool:
        """Whether the current backward ends with DDP's reduction; within `no_sync` it does not."""
        return any(model.ddp is not None and model.ddp.require_backward_grad_sync for model in self.each)

    @property
    def reduces_early(self) -> bool:
        """Whether a local gradient may be overwritten before backward ends.

        DDP reduces in place if gradients are views of its buckets, and with a static graph its first reduction begins
        early.
        """
        ddps = [model.ddp for model in self.each if model.ddp is not None]
        return any(ddp.gradient_as_bucket_view or ddp.static_graph for ddp in ddps)


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def is_distributed() -> bool:
    """Whether there are other ranks."""
    return group_size(None) > 1


_SIZES: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def group_size(group: Any) -> int:
    """How many ranks a process group has; `None`: the default group, 1 before there is one.

    Several answers are needed in every step, so each group is asked once.
    """
    dist = torch.distributed
    if group is None:
        group = dist.group.WORLD if dist.is_available() else None
    if group is None:
        return 1
    known = _SIZES.get(group)
    if known is None:
        known = _SIZES[group] = int(group.size())
    return known


def active_ddp() -> DistributedDataParallel | None:
    """The DDP wrapper whose forward is running; frameworks wrap the model after returning it, so it is found here.
    Torch has no public name for it; a version without this attribute yields None.
    """
    return getattr(DistributedDataParallel, "_active_ddp_module", None)


def _bare(module: torch.nn.Module) -> torch.nn.Module:
    """The model without wrappers, whose parameters have their original names."""
    seen: list[Any] = []
    while module not in seen:
        seen.append(module)
        inner = getattr(module, "_orig_mod", None)  # torch.compile
        if inner is None and isinstance(module, DistributedDataParallel):
            inner = module.module
        if isinstance(inner, torch.nn.Module):
            module = inner
    return module


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
