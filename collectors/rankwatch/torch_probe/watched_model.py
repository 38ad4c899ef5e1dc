"""The watched models: their wrappers, the devices of their parameters, and how their gradients are reduced.

Arguments of `watch.torch`: models and optimizers; one, a list, or a dict of them; with or without wrappers.

What torch's two forms of FSDP keep of a module's parameters.

All private names of FSDP are here. A version of torch without them yields nothing, and the probe then watches less.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel

from rankwatch.torch_probe.device import ON_HOST

Optimizer = torch.optim.Optimizer


class Scaler(Protocol):
    """The part of torch.amp.GradScaler that the probe uses."""

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Multiply by the loss scale."""

    def is_enabled(self) -> bool:
        """Whether it scales at all."""


@dataclass(frozen=True)
class Handed:
    """The arguments of one call of `watch.torch`."""

    models: tuple[tuple[str, torch.nn.Module], ...]
    """Each with its name; "" if it has none."""
    optimizers: tuple[Optimizer, ...]
    scaler: Scaler | None
    replicated: bool | None

    @classmethod
    def of(cls, model: Any, optimizer: Any, scaler: Scaler | None, replicated: bool | None) -> Handed:
        """Parse the arguments.

        Raises:
            TypeError: an argument is not a model or not an optimizer.
        """
        models, optimizers = _named(model), tuple(_unwrapped(one) for _, one in _named(optimizer))
        wrong = [one for _, one in models if not isinstance(one, torch.nn.Module)]
        if wrong or not models:
            raise TypeError(
                f"watch.torch: the model must be a torch.nn.Module, or a list or dict of them, not {_kind(wrong)}"
            )
        wrong = [one for one in optimizers if not isinstance(one, Optimizer)]
        if wrong or not optimizers:
            raise TypeError(
                "watch.torch: the optimizer must be a torch.optim.Optimizer, or a list or dict of them, "
                f"not {_kind(wrong)}"
            )
        return cls(models, optimizers, scaler, replicated)

    def without(self, later: Handed) -> Handed:
        """The models and optimizers that a later call did not pass again."""
        models = tuple(pair for pair in self.models if all(pair[1] is not model for _, model in later.models))
        optimizers = tuple(one for one in self.optimizers if all(one is not other for other in later.optimizers))
        return Handed(models, optimizers, self.scaler, self.replicated)


def check_parts(fingerprint_every: int, on_nonfinite: str, overhead_max: float) -> None:
    """Check what is to be measured.

    Raises:
        ValueError: a number is out of range, or a word is not known.
    """
    if not overhead_max > 0:
        raise ValueError(f"overhead_max must be more than 0, not {overhead_max}")
    if fingerprint_every < 0:
        raise ValueError(f"fingerprint_every must be 0 or more, not {fingerprint_every}")
    if on_nonfinite not in ("record", "skip"):
        raise ValueError(f'on_nonfinite must be "record" or "skip", not {on_nonfinite!r}')


def check_skip(*, divided: bool, grad_norm: bool) -> None:
    """Check that all ranks of a job with `on_nonfinite="skip"` decide alike.

    Args:
        divided: a rank knows only the gradients of a part of the model.
        grad_norm: it is to decide by the norm that it measures.

    Raises:
        ValueError: they would not, or there is no norm to decide by.
    """
    if divided and grad_norm:
        raise ValueError(
            'on_nonfinite="skip": each rank has gradients of a part of this model alone: ranks would not decide alike. '
            "Pass grad_norm=False, and log the norm of the whole as grad_norm before the optimizer steps"
        )
    if not divided and not grad_norm:
        raise ValueError('on_nonfinite="skip" decides by the total gradient norm: leave grad_norm on')


def _named(given: Any) -> tuple[tuple[str, Any], ...]:
    if isinstance(given, torch.nn.Module | Optimizer):  # first, because a ModuleList is a module and iterable
        return (("", given),)
    if isinstance(given, Mapping):
        return tuple((str(name), one) for name, one in given.items())
    if isinstance(given, Iterable) and not isinstance(given, str):
        return tuple(("", one) for one in given)
    return (("", given),)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer that makes the updates: frameworks return wrappers whose own hooks never run."""
    seen: list[Any] = []
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer) and inner not in seen:
        seen.append(optimizer)
        optimizer = inner
    return optimizer


def _kind(wrong: Sequence[Any]) -> str:
    return type(wrong[0]).__name__ if wrong else "nothing"


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat parameter of FSDP1 (`FullyShardedDataParallel`), which holds several original ones in turn."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    """Original names, within the module that FSDP wraps."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the whole original parameters."""
    originals: tuple[torch.Tensor, ...]
    """The original parameters (`use_orig_params=True`); empty if the module has only the flat one."""
    sizes: tuple[int, ...]
    """Elements of each stretch of the flat parameter that is not divided, padding included."""
    is_padding: tuple[bool, ...]
    """Whether each stretch is padding between two parameters."""
    group: Any
    """Process group over which it is divided, or replicated if `divides` is False."""
    replicas: Any
    """Process group of the ranks that hold the same part (HYBRID_SHARD); None: there are none."""
    divides: bool


@dataclass(frozen=True, slots=True)
class FsdpBlock:
    """A module whose parameters FSDP gathers together, or a part of one; without further such modules within it."""

    outer: torch.nn.Module
    """The module whose output FSDP watches for the start of its backward."""
    inner: torch.nn.Module
    """The module whose forward begins when the parameters are gathered."""
    all_ranks: bool
    """Whether its parameters are divided over, or replicated on, all ranks of the job."""


def blocks(module: torch.nn.Module) -> list[FsdpBlock]:
    """The blocks within a module, of both forms of FSDP.

    A block that has others within, as the root often has, gathers the parameters of the rest of its modules, such as an
    embedding or a head. Each of these counts as a block: when it begins, the outer one's wait is over.
    """
    found = []
    for part in module.modules():
        if not _is_managed(part):
            continue
        all_ranks = _ranks_of(part) == _world_size()
        if any(_is_managed(inner) for inner in part.modules() if inner is not part):
            found += [FsdpBlock(own, own, all_ranks) for own in _own_modules(part)]
        else:
            found.append(FsdpBlock(part, getattr(part, "_fsdp_wrapped_module", part), all_ranks))
    return found


def _own_modules(part: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The largest modules with parameters within a block, outside of the blocks within it."""
    for child in part.children():
        holds_blocks = any(_is_managed(inner) for inner in child.modules())
        if holds_blocks or isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):  # lists are not called
            if not _is_managed(child):
                yield from _own_modules(child)
        elif any(True for _ in child.parameters()):
            yield child


def _is_managed(part: torch.nn.Module) -> bool:
    if hasattr(part, "_fsdp_wrapped_module"):
        return getattr(part, "_handle", None) is not None
    return hasattr(part, "_get_fsdp_state")


def _ranks_of(part: torch.nn.Module) -> int:
    """How many ranks hold a part of a block's parameters."""
    own = managed_by(part)
    if own:
        return min(int(record.mesh_info.mesh.size()) for record in own)
    groups = [getattr(part, name, None) for name in ("process_group", "_inter_node_pg")]
    return math.prod(int(group.size()) for group in groups if group is not None)


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def flats(module: torch.nn.Module) -> list[Flat]:
    """The flat parameters of all FSDP1 modules within a module."""
    found = []
    for part in module.modules():
        flat = getattr(getattr(part, "_handle", None), "flat_param", None)
        if flat is None or not getattr(flat, "_is_flat_param", False):
            continue
        sizes = tuple(flat._numels_with_padding)
        found.append(
            Flat(
                flat,
                tuple(flat._fqns),
                tuple(tuple(shape) for shape in flat._shapes),
                tuple(flat._params or ()),
                sizes,
                tuple(getattr(flat, "_is_padding_mask", None) or [False] * len(sizes)),
                getattr(part, "process_group", None),
                getattr(part, "_inter_node_pg", None),
                getattr(getattr(part, "sharding_strategy", None), "name", "") != "NO_SHARD",
            )
        )
    return found


def managed(module: torch.nn.Module) -> list[Any]:
    """FSDP2's records of the parameters that it divides (`fully_shard`); see `divided_by` and `whole_of`."""
    return [record for part in module.modules() for record in managed_by(part)]


def managed_by(part: torch.nn.Module) -> list[Any]:
    """FSDP2's records of the parameters that it gathers together for this module."""
    if not hasattr(part, "_get_fsdp_state"):
        return []
    state = part._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return [record for group in groups for record in group.fsdp_params]


def divided_by(record: Any) -> torch.Tensor:
    """The divided parameter, which the model and its optimizer know."""
    return record.sharded_param  # type: ignore[no-any-return]


def whole_of(record: Any) -> torch.Tensor | None:
    """The whole parameter, with which forward and backward compute; None before the first forward.

    It stays the same object, and gets the gradient of this rank's own data.
    """
    return getattr(record, "_unsharded_param", None)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor. Reading a whole DTensor would be a collective."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


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
        """Set the topology, which shows which ranks are peers."""
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
