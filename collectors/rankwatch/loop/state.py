"""The training state, which decides all further steps: captured by copy, restored in place.

Equal state at the same step makes all later steps equal. It consists of the registered objects, the position in the
data, and the random states of Python, NumPy, torch and CUDA. These are set last, since creating a data iterator may
draw from them. This module imports neither torch nor NumPy: if they are not loaded, they have no state.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

KEEP_MAX: Final = 16
"""Most captures kept in memory: each is a whole copy of model and optimizer."""


class Capture(NamedTuple):
    """A whole copy of one rank's training state at the boundary before `step`."""

    step: int
    states: Mapping[str, Any]
    """`state_dict()` of each registered object, deeply copied, tensors in host memory."""
    random: Mapping[str, Any]
    position: int | None
    """Batches drawn so far; None before the first was asked for."""
    data: Any
    """`state_dict()` of data that has one."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors in it."""
        return _tensor_bytes(self.states)


class Batches(Iterator[Any]):
    """The job's batches in order, rebuilt at the right position after a restore.

    Made from a callable that builds an iterator at a position (batches already drawn), which is called when the
    first batch is asked for.
    """

    def __init__(self, build: Callable[[int], Any]) -> None:
        self._build = build
        self._iterator: Iterator[Any] | None = None
        self._position = 0

    @property
    def position(self) -> int | None:
        """Batches drawn so far; None before the first was asked for."""
        return self._position if self._iterator is not None else None

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._build(self._position))
        batch = next(self._iterator)
        self._position += 1
        return batch

    def state(self) -> Any:
        """None: the position is the whole state."""
        return None

    def move_to(self, position: int | None, state: Any = None) -> None:
        """Rebuild the iterator at a position; None: the next batch builds it, as at the start."""
        del state
        self._position = position or 0
        self._iterator = iter(self._build(position)) if position is not None else None


class LoaderBatches(Iterator[Any]):
    """The batches of a loader with its own state, as one iterator that stays valid after a restore.

    It ends with the loader; iterating over it again begins the next epoch.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None
        self._ended = False
        self._drawn = 0

    @property
    def position(self) -> int | None:
        """Batches drawn so far; None before the first was asked for."""
        return self._drawn if self._iterator is not None else None

    def __iter__(self) -> LoaderBatches:
        if self._ended:
            self._iterator, self._ended = iter(self._loader), False
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._ended = True
            raise
        self._drawn += 1
        return batch

    def state(self) -> Any:
        """The loader's own state, copied."""
        return copied(self._loader.state_dict())

    def move_to(self, position: int | None, state: Any) -> None:
        """Restore the loader's state; the iterator is created now, unless none existed at the capture."""
        self._loader.load_state_dict(copied(state))
        self._drawn, self._ended = position or 0, False
        self._iterator = iter(self._loader) if position is not None else None


class EpochBatches(Iterator[Any]):
    """The batches of a loader over several epochs, as one iterator that stays valid after a restore.

    A loader with a state of its own restores itself. Another one draws the epoch's batches anew and skips those that
    were drawn, beginning with the random states of the epoch's begin, which decide its order.
    """

    def __init__(self, loader: Any, epochs: int, set_epoch: Callable[[int], object] | None = None) -> None:
        """Begin before the first epoch.

        Args:
            loader: yields the batches of one epoch each time it is iterated over.
            epochs: how often.
            set_epoch: called with the epoch's number before it begins; None: `set_epoch` of the loader or its sampler,
                unless there is only one epoch, whose number the script may have set already.
        """
        self._loader = loader
        self._epochs = epochs
        self._set_epoch = set_epoch or (_own_set_epoch(loader) if epochs > 1 else lambda _: None)
        self._keeps_state = _keeps_state(loader)
        self._epoch = 0
        self._iterator: Iterator[Any] | None = None
        self._random: Mapping[str, Any] = {}
        """Random states at the begin of this epoch."""
        self._in_epoch = 0
        self._drawn = 0

    @property
    def position(self) -> int:
        """Batches drawn so far."""
        return self._drawn

    def __next__(self) -> Any:
        while self._epoch < self._epochs:
            if self._iterator is None:
                self._begin_epoch()
            assert self._iterator is not None
            for batch in self._iterator:
                self._in_epoch += 1
                self._drawn += 1
                return batch
            self._epoch, self._in_epoch, self._iterator = self._epoch + 1, 0, None
        raise StopIteration

    def skip(self, count: int) -> None:
        """Skip so many batches; a loader with its own state keeps it."""
        self._drawn = count
        if self._keeps_state:
            return
        if length := _length(self._loader):
            self._epoch, count = divmod(count, length)
        self._draw(count)

    def state(self) -> Any:
        """The position in the epoch, and the state on which its order depends."""
        own = copied(self._loader.state_dict()) if self._keeps_state else None
        return self._epoch, self._in_epoch, self._iterator is not None, dict(self._random), own

    def move_to(self, position: int | None, state: Any) -> None:
        """Go back to the position that `state` describes."""
        self._epoch, in_epoch, begun, random, own = state
        self._drawn, self._iterator, self._in_epoch = position or 0, None, 0
        if own is not None:
            self._loader.load_state_dict(copied(own))
            self._in_epoch = in_epoch
        elif begun:
            set_random_states(random)
            self._draw(in_epoch)

    def _begin_epoch(self) -> None:
        self._set_epoch(self._epoch)
        self._random = random_states()
        self._iterator = iter(self._loader)

    def _draw(self, count: int) -> None:
        """Draw and forget batches, which do not count as drawn."""
        drawn, self._drawn = self._drawn, 0
        for _ in range(count):
            next(self, None)
        self._drawn = drawn


class TrainingState:
    """The registered objects of one rank."""

    def __init__(self, objects: Mapping[str, Any], data: Any = None) -> None:
        """Register objects and data.

        Args:
            objects: anything with `state_dict` and `load_state_dict`, by name.
            data: a callable that builds an iterator of batches at a position, or an iterable with `state_dict` and
                `load_state_dict`.

        Raises:
            ValueError: an object or the data is none of these.
        """
        for name, member in objects.items():
            if not _keeps_state(member):
                raise ValueError(f"{name} has no state_dict and load_state_dict")
        if data is not None and not callable(data) and not _keeps_state(data):
            raise ValueError("data must be a callable that builds batches at a position, or have a state_dict")
        self._objects = dict(objects)
        self.batches: Batches | LoaderBatches | EpochBatches | None = None
        if data is not None:
            self.batches = LoaderBatches(data) if _keeps_state(data) else Batches(data)

    def capture(self, step: int) -> Capture:
        """Copy the whole state. Call it at a step boundary: gradients are not copied."""
        return Capture(
            step,
            {name: copied(member.state_dict()) for name, member in self._objects.items()},
            random_states(),
            self.batches.position if self.batches is not None else None,
            self.batches.state() if self.batches is not None else None,
        )

    def restore(self, capture: Capture) -> None:
        """Load a capture into the same objects, clear gradients, move the data, then set the random states.

        The capture does not change: copies are loaded, since optimizers keep the tensors they are given.
        """
        for name, member in self._objects.items():
            member.load_state_dict(copied(capture.states[name]))
        for member in self._objects.values():
            if hasattr(member, "zero_grad"):
                member.zero_grad()
        if self.batches is not None:
            self.batches.move_to(capture.position, capture.data)
        set_random_states(capture.random)


class MemoryTier:
    """The last few captures of this rank, by checkpoint id. They survive a rollback, not the process.

    With two or more places, one is reserved for the newest capture that proved good: captures go on after a fault, and
    must not evict the state from before it. Until the service has named that capture, the oldest is kept, since it is
    the most likely to be from before a fault.
    """

    def __init__(self, keep: int, every: int) -> None:
        """Begin without captures.

        Args:
            keep: captures kept; 0: none are made. Each takes as much host memory as model and optimizer.
            every: steps between captures.

        Raises:
            ValueError: out of range.
        """
        if not 0 <= keep <= KEEP_MAX:
            raise ValueError(f"keep must be 0 to {KEEP_MAX} captures, not {keep}")
        if every < 1:
            raise ValueError(f"every must be at least 1 step, not {every}")
        self.every = every if keep else 0
        self.proven = ""
        """Id of the capture in the reserved place; if "" or not kept, the oldest capture is reserved."""
        self._keep = keep
        self._captures: dict[str, Capture] = {}

    def __contains__(self, checkpoint: str) -> bool:
        return checkpoint in self._captures

    def __getitem__(self, checkpoint: str) -> Capture:
        return self._captures[checkpoint]

    @property
    def kept(self) -> list[str]:
        """Ids of the kept captures, oldest first."""
        return list(self._captures)

    @property
    def reserved(self) -> str:
        """Id of the capture that newer ones do not evict; "" if there is no reserved place."""
        if self._keep < 2 or not self._captures:
            return ""
        return self.proven if self.proven in self._captures else next(iter(self._captures))

    def make_room(self) -> list[str]:
        """Drop captures until there is room for one more. Call it before the capture, so that memory is bounded.

        Returns:
            Ids of the dropped captures: the oldest that are not reserved.
        """
        gone = []
        while len(self._captures) >= self._keep:
            reserved = self.reserved
            gone.append(next(checkpoint for checkpoint in self._captures if checkpoint != reserved))
            del self._captures[gone[-1]]
        return gone

    def add(self, checkpoint: str, capture: Capture) -> None:
        """Keep a capture."""
        self._captures[checkpoint] = capture

    def drop_after(self, step: int) -> None:
        """Drop captures of steps that a rollback has undone."""
        self._captures = {name: kept for name, kept in self._captures.items() if kept.step <= step}


def random_states() -> dict[str, Any]:
    """The random states of the loaded libraries: python, numpy, torch, cuda."""
    states: dict[str, Any] = {}
    if (random := sys.modules.get("random")) is not None:
        states["python"] = random.getstate()
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set random states that `random_states` returned."""
    if "python" in states:
        sys.modules["random"].setstate(states["python"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])
    if "cuda" in states:
        sys.modules["torch"].cuda.set_rng_state_all(states["cuda"])


def copied(value: Any) -> Any:
    """A deep copy in host memory: values of tensors without their graph, containers of the same type."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().cpu() if value.device.type != "cpu" else value.detach().clone()
    if isinstance(value, dict):
        fresh = {key: copied(part) for key, part in value.items()}
        return fresh if type(value) is dict else _like(value, fresh)
    if type(value) in (list, tuple):
        return type(value)(copied(part) for part in value)
    return copy.deepcopy(value)


def _like(value: dict[Any, Any], fresh: dict[Any, Any]) -> dict[Any, Any]:
    """A mapping of the same type with new content: a module's OrderedDict has `_metadata`, which loading reads."""
    twin = copy.copy(value)
    twin.clear()
    twin.update(fresh)
    return twin


def _length(loader: Any) -> int:
    """Batches of an epoch; 0 if the loader does not know, as a DataLoader over a stream, whose `__len__` raises."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return 0


def _keeps_state(member: Any) -> bool:
    return hasattr(member, "state_dict") and hasattr(member, "load_state_dict")


def _own_set_epoch(loader: Any) -> Callable[[int], object]:
    """The function that sets the epoch of a loader or its sampler; without effect if neither needs it."""
    for one in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        reported = getattr(one, "set_epoch", None)
        if callable(reported):
            return reported  # type: ignore[no-any-return]
    return lambda _: None


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(_tensor_bytes(part) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(part) for part in value)
    return int(getattr(value, "nbytes", 0))
